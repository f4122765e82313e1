"""The OpenAI dialect: request and response types, chat, completions, server-sent events."""
