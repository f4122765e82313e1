"""Runs one step of the model: StepInputs in, next tokens out, everything between on the device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from ..mem_cache.token_to_kv_pool import MHATokenToKVPool
from ..srt.model_config import ModelConfig
from .attention.registry import create_attention_backend, resolve_attention_backend
from .dtypes import resolve_dtype
from .forward_batch import FROM_DEVICE, ForwardBatch, ForwardMode, Int32Array, StepInputs
from .kv_budget import device_memory, num_kv_tokens
from .logits_processor import LogitsProcessor
from .models.registry import create_model
from .sampler import Sampler
from .weights import checkpoint_dtype, load_parameters


class StepTokens:
    """A step's tokens on their way home (a StepResult). On a CPU they are home already."""

    def __init__(self, tokens: torch.Tensor) -> None:
        """tokens: int64 [n] on the device"""
        self._arrived: torch.cuda.Event | None = None
        self._tokens = tokens
        if tokens.is_cuda:
            # Queued behind the step on its own stream: the event passes when the copy has, whatever was launched since.
            self._tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._tokens.copy_(tokens, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> Int32Array:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tokens.numpy().astype(np.int32)


class ModelRunner:
    """A loaded model with its KV pool, attention backend and sampler, on one device.

    The scheduler reads `max_total_num_tokens` to make its allocator, makes a ReqToTokenPool of `num_rows` rows of
    `context_len`, and hands that table over with `bind` before the first `launch`.

    Raises ValueError for settings that do not fit the model or the machine.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_running_requests: int,
        device: str = "cpu",
        dtype: str = "auto",
        attention_backend: str = "auto",
        page_size: int = 1,
        context_len: int | None = None,
        mem_fraction_static: float | None = None,
        max_total_tokens: int | None = None,
        seed: int = 0,
    ) -> None:
        self.config = config
        self.device = resolve_device(device)
        self.dtype = resolve_dtype(dtype, checkpoint_dtype(config), self.device)
        self.num_rows = max_running_requests
        self.context_len = context_len or config.context_len
        params = load_parameters(config, self.dtype, self.device, seed)
        self.weight_bytes = sum(tensor.nbytes for tensor in params.values())

        bytes_per_token = MHATokenToKVPool.bytes_per_token(
            config.num_layers, config.num_kv_heads, config.head_dim, self.dtype
        )
        self.max_total_num_tokens = num_kv_tokens(
            device_memory(self.device),
            bytes_per_token,
            page_size=page_size,
            context_len=self.context_len,
            mem_fraction_static=mem_fraction_static,
            max_total_tokens=max_total_tokens,
            on_cpu=self.device.type == "cpu",
        )
        self.kv_bytes = self.max_total_num_tokens * bytes_per_token
        self.kv_pool = MHATokenToKVPool(
            self.max_total_num_tokens,
            page_size,
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            self.dtype,
            self.device,
        )
        self.attention_backend = resolve_attention_backend(attention_backend, self.device)
        self.attention = create_attention_backend(self.attention_backend, config, self.kv_pool)
        self.model = create_model(config, params, self.attention)
        self.logits_processor = LogitsProcessor(self.model.lm_head)
        self.sampler = Sampler(self.num_rows, config.vocab_size, self.device)
        self.future_tokens = torch.zeros(self.num_rows + 1, dtype=torch.int64, device=self.device)
        """newest token of each row; the next step reads it here, so the host need not know it yet"""
        self._shares_table = self.device.type == "cpu"
        self._host_table: Int32Array | None = None
        self._table: torch.Tensor | None = None

    def bind(self, req_to_token: Int32Array) -> None:
        """Takes the scheduler's table, int32 [num_rows + 1, context_len]. A CPU shares its memory; another device gets
        a copy that each `launch` brings up to date."""
        assert req_to_token.dtype == np.int32 and req_to_token.flags.c_contiguous
        assert req_to_token.shape == (self.num_rows + 1, self.context_len), req_to_token.shape
        self._host_table = req_to_token
        table = torch.from_numpy(req_to_token)
        self._table = table if self._shares_table else table.to(self.device, copy=True)

    def launch(self, step: StepInputs) -> StepTokens:
        """Queues the step; `wait` on the result gives the sampled rows' tokens, -1 for invalid logits."""
        with torch.inference_mode():
            for new_row in step.new_rows:
                self.sampler.set_row(new_row)
            batch, sampled_rows = self._to_device(step)
            logits = self.forward(batch)
            rows, seq_lens = step.rows, step.seq_lens
            if step.sampled is not None:
                rows, seq_lens = rows[step.sampled], seq_lens[step.sampled]
            if len(rows) == 0:
                return StepTokens(torch.empty(0, dtype=torch.int64))
            tokens = self.sampler.sample(logits, rows, seq_lens)
            # The row of an invalid token may run one more step before the host knows: any id will do for it.
            self.future_tokens[sampled_rows] = tokens.clamp(min=0)
            return StepTokens(tokens)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """float32 logits [num_sampled, vocab]"""
        self.attention.plan(batch)
        hidden = self.model.forward(batch.input_ids, batch.positions, batch)
        return self.logits_processor(hidden, batch)

    def _to_device(self, step: StepInputs) -> tuple[ForwardBatch, torch.Tensor]:
        """The batch, and the rows (int64) that are sampled."""
        table = self._updated_table(step)
        if step.mode is ForwardMode.DECODE:
            rows, seq_lens, slots = self._send(step.rows, step.seq_lens, step.out_cache_loc)
            positions = seq_lens - 1
            if not self._shares_table:
                table[rows, positions] = slots.int()
            return ForwardBatch(
                mode=step.mode,
                rows=rows,
                seq_lens=seq_lens,
                input_ids=self.future_tokens[rows],
                positions=positions,
                out_cache_loc=slots,
                req_to_token=table,
                logits_indices=None,
                extend_start_loc=None,
                prefix_lens=None,
                seq_lens_host=step.seq_lens,
                extend_lens_host=None,
            ), rows

        extend_lens, input_ids, sampled = step.extend_lens, step.input_ids, step.sampled
        assert extend_lens is not None and input_ids is not None and sampled is not None
        prefix_lens_host = step.seq_lens - extend_lens
        start_loc_host = np.concatenate(([0], np.cumsum(extend_lens)))
        last_tokens = (start_loc_host[1:] - 1)[sampled]
        unknown = np.flatnonzero(input_ids == FROM_DEVICE)
        rows, seq_lens, slots, ids, positions, starts, prefix_lens, last, sampled_rows, unknown_at, unknown_rows = (
            self._send(
                step.rows,
                step.seq_lens,
                step.out_cache_loc,
                input_ids,
                _ranges(prefix_lens_host, extend_lens),
                start_loc_host,
                prefix_lens_host,
                last_tokens,
                step.rows[sampled],
                unknown,
                np.repeat(step.rows, extend_lens)[unknown],
            )
        )
        if len(unknown):
            ids[unknown_at] = self.future_tokens[unknown_rows]
        return ForwardBatch(
            mode=step.mode,
            rows=rows,
            seq_lens=seq_lens,
            input_ids=ids,
            positions=positions,
            out_cache_loc=slots,
            req_to_token=table,
            logits_indices=last,
            extend_start_loc=starts,
            prefix_lens=prefix_lens,
            seq_lens_host=step.seq_lens,
            extend_lens_host=extend_lens,
        ), sampled_rows

    def _updated_table(self, step: StepInputs) -> torch.Tensor:
        """The device's row table with this step's changes of the host's."""
        table, host_table = self._table, self._host_table
        assert table is not None and host_table is not None, "bind() comes first"
        if step.table_updates and not self._shares_table:
            rows, starts, ends = np.array(step.table_updates, dtype=np.int64).T
            index_host = np.repeat(rows * self.context_len, ends - starts) + _ranges(starts, ends - starts)
            index, slots = self._send(index_host, host_table.reshape(-1)[index_host])
            table.view(-1)[index] = slots.int()
        return table

    def _send(self, *arrays: npt.NDArray[np.integer]) -> tuple[torch.Tensor, ...]:
        """Integer arrays as int64 tensors on the device: one transfer for all, and no waiting for it."""
        packed = torch.from_numpy(np.concatenate(arrays).astype(np.int64, copy=False))
        if self.device.type != "cpu":
            packed = packed.pin_memory().to(self.device, non_blocking=True)
        return packed.split([len(array) for array in arrays])


def resolve_device(name: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:N`. Raises ValueError for a device that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda was asked for, but torch sees no GPU here")
    return device


def _ranges(starts: npt.NDArray[np.integer], lens: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """[starts[0], starts[0] + 1, ..., then starts[1], ...], lens[i] numbers of each."""
    ends = np.cumsum(lens, dtype=np.int64)
    return np.arange(ends[-1], dtype=np.int64) + np.repeat(starts - (ends - lens), lens)
