"""Layer 1, memory: who owns which slot of the KV pool. Token ids and slot indices only, never a request.

Everything here is numpy on the host, but for `token_to_kv_pool`, the one file that imports torch.
docs/memory.md tells the whole story.
"""
