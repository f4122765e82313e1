"""Choosing the next token: parameters of every row, edits of logits, sampling."""
