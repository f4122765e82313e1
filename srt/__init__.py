"""Contract layer: what every process agrees on. Nothing here imports torch."""
