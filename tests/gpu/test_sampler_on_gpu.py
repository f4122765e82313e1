"""The sampler without Triton kernels on a GPU, where it serves models with torch's own attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampling_reference import EVERY_KIND, all_rows, new_row, sampler_of_every_kind

pytestmark = pytest.mark.gpu


def test_on_a_gpu_nothing_waits_and_the_tokens_are_the_cpus() -> None:
    n, vocab_size = len(EVERY_KIND), 50_001
    on_gpu, on_cpu = sampler_of_every_kind(vocab_size, "cuda"), sampler_of_every_kind(vocab_size)
    logits = torch.randn(4, n, vocab_size, generator=torch.Generator().manual_seed(2)) * 2
    logits_gpu = logits.cuda()
    torch.cuda.synchronize()
    tokens = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(4):
            seq_lens = np.full(n, 3 + step, np.int32)
            tokens.append(on_gpu.sample(logits_gpu[step], all_rows(), seq_lens))
        on_gpu.set_row(new_row(2, seed=5, output=(1, 2), repetition_penalty=1.1))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for step in range(4):
        expected = on_cpu.sample(logits[step], all_rows(), np.full(n, 3 + step, np.int32))
        assert tokens[step].tolist() == expected.tolist()
