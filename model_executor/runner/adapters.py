"""The LoRA adapters of a runner: the tables that its layers read, and the adapter of each row."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from ...srt.machine.huge_pages import Arena
from ...srt.model_files.model_config import ModelConfig
from ..device.device_buffers import Uploads
from ..forward_batch import TokenAdapters
from ..layers.lora_layers import LoraShape, LoraSize, LoraTables, TorchLoraTables
from ..step import NewRow
from ..weights.lora_checkpoint import lora_shapes, read_adapter
from .settings import RunnerSettings


class RowAdapters:
    """The adapter slot of each row, on the device and on the host. Row 0 is padding and has none."""

    def __init__(self, num_rows: int, device: torch.device, uploads: Uploads) -> None:
        self.host: npt.NDArray[np.int32] = np.zeros(num_rows + 1, np.int32)
        self._uploads = uploads
        on_host = torch.from_numpy(self.host)
        self._tensor = on_host if device.type == "cpu" else on_host.to(device)

    def set_rows(self, new_rows: list[NewRow]) -> None:
        """Set the adapters of new owners of rows. A GPU gets them in one transfer."""
        if not new_rows:
            return
        rows = np.array([new_row.row for new_row in new_rows], np.int64)
        self.host[rows] = [new_row.adapter for new_row in new_rows]
        if self._tensor.device.type != "cpu":
            self._tensor.index_copy_(0, *self._uploads.send(rows, self.host[rows]))

    def of_rows(self, rows: torch.Tensor) -> TokenAdapters:
        """The adapters of tokens from their rows, int64 [n] on the device. Needs nothing from the host."""
        return TokenAdapters(self._tensor.index_select(0, rows))


class Adapters:
    """The adapters of a runner."""

    def __init__(self, tables: Mapping[str, LoraTables], max_rank: int, config: ModelConfig, rows: RowAdapters) -> None:
        """`tables`: of each adapted weight, by name."""
        self.rows = rows
        self.tables = tables
        self._max_rank = max_rank
        self._config = config
        self.num_bytes = sum(table.num_bytes for table in tables.values())
        """memory of the tables"""

    def load(self, slot: int, path: str) -> str:
        """Read an adapter into a slot, as `Runner.load_adapter` says."""
        self.unload(slot)
        adapter = read_adapter(path, self._config, self._max_rank)
        try:
            for name, weight in adapter.weights.items():
                self.tables[name].write(slot, weight)
        except ValueError:
            self.unload(slot)
            raise
        return adapter.fingerprint

    def unload(self, slot: int) -> None:
        """Make a slot empty."""
        for table in self.tables.values():
            table.write(slot, None)


def make_adapters(settings: RunnerSettings, config: ModelConfig, uploads: Uploads) -> Adapters | None:
    """Make the empty tables of a runner. None: the settings have no adapters.

    Raises ValueError if the layers have no adapters, and if there is no memory for the tables.
    """
    size = settings.lora
    if size is None:
        return None
    if settings.fuse_small_steps:
        raise ValueError("--fuse-small-steps has no kernels for LoRA adapters: leave it out")
    arena = Arena()  # tables are small
    try:
        tables = {name: _table(settings, size, shape, arena) for name, shape in lora_shapes(config).items()}
    except (OSError, RuntimeError) as error:  # RuntimeError: of torch's allocators
        raise ValueError(
            f"no memory for {size.num_slots} LoRA adapters of rank {size.max_rank}; lower --max-loras or "
            "--max-lora-rank"
        ) from error
    rows = RowAdapters(settings.max_running_requests, settings.device, uploads)
    return Adapters(tables, size.max_rank, config, rows)


def few_rows_bytes(settings: RunnerSettings, config: ModelConfig) -> int:
    """An upper bound of the memory that adapters take in a step of few tokens, but not in the largest step.

    Sums of few rows are divided among more programs of a GPU, whose results are in memory.
    """
    if settings.lora is None or settings.attention_backend != "triton":
        return 0
    from ..kernels.lora import lora_hidden_bytes, lora_row_counts  # importing Triton takes half a second

    device, dtype, rank = settings.device, settings.dtype, settings.lora.max_rank
    counts = [count - 1 for count in lora_row_counts(dtype, device)[1:]]
    shapes = lora_shapes(config).values()
    return max(
        lora_hidden_bytes(count, shape.columns, len(shape.rows) * rank, dtype, device)
        for count in counts
        for shape in shapes
    )


def _table(settings: RunnerSettings, size: LoraSize, shape: LoraShape, arena: Arena) -> LoraTables:
    if settings.attention_backend == "cpu":
        from ..layers.cpu_lora import CpuLoraTables  # needs the compiled operations, which this backend has loaded

        return CpuLoraTables(shape, size, settings.dtype, arena)
    if settings.attention_backend == "triton":
        from ..layers.triton_lora import TritonLoraTables  # importing Triton takes half a second

        return TritonLoraTables(shape, size, settings.dtype, settings.device)
    return TorchLoraTables(shape, size, settings.dtype, settings.device)
