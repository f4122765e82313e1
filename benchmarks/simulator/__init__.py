"""A simulator of serving: the real scheduler against a device that only says how long each step takes."""
