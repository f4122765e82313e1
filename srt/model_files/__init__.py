"""Model files: what a checkpoint directory or a GGUF file says about its model."""
