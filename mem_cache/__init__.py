"""Memory layer: rows, slots and who owns them. Knows token ids and slot indices, never a request."""
