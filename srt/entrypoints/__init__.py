"""Entry layer: the Engine, the HTTP server, and the one file that starts processes."""
