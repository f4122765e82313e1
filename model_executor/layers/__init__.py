"""The layers of a decoder: embeddings, norms, rotary embedding, linear layers, attention."""
