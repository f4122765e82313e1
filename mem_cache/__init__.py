"""Layer 1, memory: who owns which slot of the KV pool. It knows token ids and slot indices, but no requests.

All of it is numpy on the host, except `token_to_kv_pool`, the only file that imports torch.
docs/memory.md describes the whole layer.
"""
