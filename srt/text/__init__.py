"""Text processing: tokenizers and chat templates."""
