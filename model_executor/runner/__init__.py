"""The model runner: settings, loading, running steps, recorded decode steps, the size of the KV pool."""
