"""The device: memory, streams, transfers, types."""
