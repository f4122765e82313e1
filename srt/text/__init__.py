"""Text and token ids: tokenizers, chat templates."""
