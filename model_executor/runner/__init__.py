"""Running steps: the ModelRunner, recorded decode steps, memory for the KV pool."""
