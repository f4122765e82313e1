"""The OpenAI API: request and response types, chat completions, completions, models."""
