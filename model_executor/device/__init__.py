"""The device: its memory, streams, transfers and types."""
