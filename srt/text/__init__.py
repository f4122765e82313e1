"""Text: tokenizers, chat templates, and the formats of tool calls and reasoning."""
