"""Entry layer: the Python Engine, the HTTP server, and the start of the engine's processes."""
