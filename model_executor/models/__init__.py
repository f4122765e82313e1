"""Model families, as tables over shared decoder blocks."""
