"""Building blocks of a decoder: norms, rotary embedding, linear layers."""
