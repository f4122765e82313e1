"""Sampling: the sampling parameters of each row, edits of logits, and the choice of the next token."""
