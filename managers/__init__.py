"""Management layer: TokenizerManager, Scheduler and DetokenizerManager. They exchange only messages."""
