"""The parts of an answer: reasoning, content and tool calls, read from the model's text as it comes."""
