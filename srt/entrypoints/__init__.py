"""Layer 4, entry: the Python Engine, the HTTP server, and the start of the engine's processes."""
