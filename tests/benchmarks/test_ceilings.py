from __future__ import annotations

import pytest
import torch

from tercet.benchmarks.ceilings import matmul_flops_per_s


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_products_of_every_type_that_layers_multiply_are_measured(dtype: torch.dtype) -> None:
    assert matmul_flops_per_s(torch.device("cpu"), dtype, 64) > 0
