"""Model files: the settings of a model, read from a checkpoint directory or a GGUF file."""
