"""Layer 3, management: TokenizerManager, Scheduler and DetokenizerManager. They exchange only messages."""
