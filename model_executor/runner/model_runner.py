"""The ModelRunner: it runs steps of the model on the device, from StepInputs to next tokens. load.py builds it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...mem_cache.token_to_kv_pool import TokenToKVPool
from ...srt.model_files.model_config import ModelConfig
from ..attention.base import AttentionBackend
from ..device.accelerator import Accelerator
from ..device.device_buffers import Downloads, TokenCopy, Uploads
from ..device.inference_mode import in_inference_mode
from ..forward_batch import ForwardBatch, SavedStates, TokenAdapters
from ..layers.output_head import GreedyHead
from ..layers.residual import Stream
from ..models.family import Model
from ..row_states import LayerStates, copy_states, independent_copies
from ..sampling.draft_verification import Verified, verify
from ..sampling.newest_tokens import NewestTokens
from ..sampling.row_logprobs import RowLogprobs, SampledLogprobs
from ..sampling.sampler import Sampler
from ..step import FROM_DEVICE, Choices, ForwardMode, Int32Array, KVCopies, StateCopies, StepInputs, TokenMasks
from .adapters import Adapters
from .hidden_states import fetch_hidden
from .hidden_sums import sum_hidden
from .host_kv import HostKV
from .recorded_steps import DecodeInputs, RecordedSteps, StepHead
from .running_step import NO_EXTRAS, RunningStep, StepExtras
from .settings import RunnerSettings
from .slot_table import SlotTable
from .wanted_tokens import WantedTokens, wanted_tokens
from .weight_update import WeightUpdater


class RunnerBytes(NamedTuple):
    """Device memory of a runner, in bytes."""

    weights: int
    """with the tables of LoRA adapters"""
    kv_pool: int
    graphs: int = 0


class ModelRunner:
    """A loaded model with its KV pool, table of slots, attention backend and sampler, on one device.

    One thread calls `launch` and then `sample` for each step. The scheduler's allocator must have the size of the KV
    pool (`max_total_num_tokens`), and its ReqToTokenPool the size of the table: `max_running_requests` rows of
    `context_len` positions.
    """

    def __init__(
        self,
        settings: RunnerSettings,
        config: ModelConfig,
        model: Model,
        attention: AttentionBackend,
        kv_pool: TokenToKVPool,
        table: SlotTable,
        sampler: Sampler,
        uploads: Uploads,
        accelerator: Accelerator | None,
        num_bytes: RunnerBytes,
    ) -> None:
        self.settings = settings
        self.config = config
        self.model = model
        self.attention = attention
        self.kv_pool = kv_pool
        self.table = table
        self.sampler = sampler
        self.num_bytes = num_bytes
        self.is_asynchronous = accelerator is not None
        """Whether `launch` returns before the step is done. On a CPU it does not, and overlapping steps would only
        delay each token by one step."""
        num_rows = settings.max_running_requests
        self.future_tokens = torch.zeros(num_rows + 1, dtype=torch.int64, device=settings.device)
        """[num_rows + 1], newest token of each row. The next step reads it here, before the host knows it."""
        self._uploads = uploads
        self._downloads = Downloads(num_rows, accelerator)
        self._logprobs = RowLogprobs(
            num_rows,
            config.vocab_size,
            settings.device,
            uploads,
            self._downloads,
            use_kernels=settings.attention_backend == "triton",
        )
        self._recorded: RecordedSteps | None = None
        self.host_kv: HostKV | None = None
        """The memory of the host tier. None: there is no tier, and no step has `kv_copies`."""
        self.weights: WeightUpdater | None = None
        """Loads other weights. Set when the runner is complete."""
        self.states: tuple[LayerStates, ...] = ()
        """Of each recurrent layer."""
        self.adapters: Adapters | None = None
        """The LoRA adapters. None: there are none, and no row has one."""

    @property
    def max_total_num_tokens(self) -> int:
        """The size of the KV pool in tokens."""
        return self.kv_pool.size

    def record_steps(self, recorded: RecordedSteps) -> None:
        """Run the steps that `recorded` can run with it from now on."""
        self._recorded = recorded
        self.num_bytes = self.num_bytes._replace(graphs=recorded.num_bytes)

    @in_inference_mode
    def load_adapter(self, slot: int, path: str) -> str:
        assert self.adapters is not None
        return self.adapters.load(slot, path)

    @in_inference_mode
    def unload_adapter(self, slot: int) -> None:
        assert self.adapters is not None
        self.adapters.unload(slot)

    @in_inference_mode
    def launch(self, step: StepInputs) -> RunningStep:
        """Queue the forward pass of a step. The caller must call `sample` on the result before the next `launch`."""
        if step.kv_copies is not None:
            return self._launch_with_copies(step, step.kv_copies)
        return self._launch(step)

    def _launch_with_copies(self, step: StepInputs, copies: KVCopies) -> RunningStep:
        assert self.host_kv is not None
        under_way = self.host_kv.run(copies)
        if len(step.rows):
            running = self._launch(step)
        else:
            nothing = torch.empty(0, dtype=torch.int64)
            running = RunningStep(self, StepHead(nothing, lambda: nothing), step.rows, step.seq_lens)
        running.copies = under_way
        return running

    def _launch(self, step: StepInputs) -> RunningStep:
        if step.state_copies is not None:
            self._copy_states(step.state_copies)
        for new_row in step.new_rows:
            self.sampler.set_row(new_row)
            self._logprobs.set_row(new_row)
        if self.adapters is not None:
            self.adapters.rows.set_rows(step.new_rows)
        extras, choices = NO_EXTRAS, None if step.mode is ForwardMode.DECODE else step.choices()
        if self._recorded is not None and self._recorded.can_run(step):
            self._update_table(step)
            head = self._recorded.run(step, choices)
        elif choices is None:
            self._update_table(step)
            head = self._launch_decode(step)
        else:
            head, extras = self._launch_extend(step, choices)
        if choices is None:
            return RunningStep(self, head, step.rows, step.seq_lens)
        return RunningStep(self, head, choices.rows, choices.lens, extras, None if choices.drafts is None else choices)

    def _copy_states(self, copies: StateCopies) -> None:
        for sources, targets in independent_copies(copies.sources, copies.targets):
            copy_states(self.states, *self._uploads.send(sources, targets))

    @in_inference_mode
    def choose(
        self,
        head: StepHead,
        rows: Int32Array,
        lens: Int32Array,
        masks: TokenMasks | None = None,
        drafts: Int32Array | None = None,
    ) -> tuple[TokenCopy, SampledLogprobs | None]:
        """Queue N choices of tokens, and the copy of the tokens to the host.

        Also queues the log probabilities of the rows that want them.

        The next step reads the tokens from `future_tokens`. `rows`: int32 [N], the row of each on the host. `lens`:
        int32 [N], length of the request before it. `masks`: the tokens that grammars allow; masked logits may be
        changed. `drafts`: those of Choices.
        """
        if head.greedy is not None and masks is None and self._needs_no_logits(rows, lens):
            return head.greedy(), None
        logits = masked = head.logits()
        if masks is not None and self.sampler.masks_in_place and self._logprobs.wanted(rows):
            masked = logits.clone()  # log probabilities are those of the model
        newest = NewestTokens(self.future_tokens, head.rows)
        tokens = self.sampler.sample(masked, rows, lens, masks, newest, drafts)
        return self._downloads.fetch(tokens), self._logprobs.of_tokens(logits, tokens, rows)

    @in_inference_mode
    def verify(self, tokens: TokenCopy, choices: Choices) -> Verified:
        """Find the accepted tokens of a step with drafts, count them for penalties, and correct `future_tokens`. Only
        on a CPU: on a GPU, the host would wait for the tokens."""
        assert not self.is_asynchronous
        verified = verify(tokens.wait(), choices)
        self.future_tokens.numpy()[verified.rows] = verified.newest()
        self.sampler.count(verified)
        return verified

    def _needs_no_logits(self, rows: Int32Array, lens: Int32Array) -> bool:
        """Whether the most probable token of each row is all that a step without masks needs."""
        return self.sampler.takes_most_probable(rows, lens) and not self._logprobs.wanted(rows)

    def forward(self, batch: ForwardBatch, out: torch.Tensor | None = None) -> torch.Tensor:
        """Queue the forward pass of a batch. Returns float32 logits [num_sampled, vocab], written to `out` if given."""
        return self.model.head(self._stream(batch), out)

    def _stream(self, batch: ForwardBatch) -> Stream:
        """Queue the forward pass of a batch without the head."""
        self._prepare(batch)
        return self.model.forward(batch.input_ids, batch.positions, batch)

    def _prepare(self, batch: ForwardBatch) -> None:
        self.attention.plan(batch)
        if not self.is_asynchronous:
            self.model.rotary.cover(batch.max_seq_len)

    def decode(self, inputs: DecodeInputs, seq_lens: Int32Array, out: torch.Tensor | None = None) -> torch.Tensor:
        """Queue a decode step, also inside a recording. Returns logits as `forward` does.

        The queued work must not depend on the values in tensors. `seq_lens`: int32 [B] on the host, used only as an
        upper bound of the attention work.
        """
        return self.model.head(self._decode_stream(inputs, seq_lens), out)

    def _decode_stream(self, inputs: DecodeInputs, seq_lens: Int32Array) -> Stream:
        """Queue a decode step without the head."""
        start = self.model.start_decode(*inputs, self.future_tokens, self.table.tensor)
        batch = ForwardBatch(
            mode=ForwardMode.DECODE,
            rows=inputs.rows,
            seq_lens=inputs.seq_lens,
            input_ids=start.input_ids,
            positions=start.positions,
            out_cache_loc=inputs.slots,
            req_to_token=self.table.tensor,
            logits_indices=None,
            extend_start_loc=None,
            prefix_lens=None,
            seq_lens_host=seq_lens,
            extend_lens_host=None,
            adapters=None if self.adapters is None else self.adapters.rows.of_rows(inputs.rows),
        )
        self._prepare(batch)
        return self.model.transform(start.x, start.rotations, batch)

    def _update_table(self, step: StepInputs) -> None:
        """Queue the changes of the table before a step, without those for its new tokens."""
        if step.table_updates:
            self.table.write(*self._uploads.send(*self.table.places(step.table_updates)))

    def _launch_decode(self, step: StepInputs) -> StepHead:
        """Queue a DECODE step that is not recorded."""
        inputs = DecodeInputs(*self._uploads.send(*map(_int64, (step.rows, step.seq_lens, step.out_cache_loc))))
        return self._step_head(self._decode_stream(inputs, step.seq_lens), inputs.rows)

    def _step_head(self, stream: Stream, rows: torch.Tensor) -> StepHead:
        """The output head of a launched step. `stream`: of the sampled tokens. `rows`: int64 [R], on the device."""
        head = self.model.head
        if isinstance(head, GreedyHead):
            hidden = head.normalise(stream)
            newest = NewestTokens(self.future_tokens, rows)

            def greedy() -> TokenCopy:
                return self._downloads.fetch(newest.store(head.greedy(hidden)))

            return StepHead(rows, lambda: head.of_hidden(hidden), greedy)
        logits = head(stream)  # now: a GPU computes them while the host waits for masks
        return StepHead(rows, lambda: logits)

    def _launch_extend(self, step: StepInputs, choices: Choices) -> tuple[StepHead, StepExtras]:
        """Queue an EXTEND step that is not recorded. Returns also what is wanted besides the next tokens."""
        wanted = wanted_tokens(step, choices)
        batch, chosen = self._extend_batch(step, choices, wanted)
        if wanted.ranks is None:
            return self._step_head(self._stream(batch), chosen), NO_EXTRAS
        (ranks,) = self._uploads.send(wanted.ranks)
        of_each = self.model.head.normalise(self._stream(batch)).index_select(0, ranks)
        hidden, of_scored, of_pooled, of_shown = of_each.split(wanted.lens)
        if (divisor := self.config.logits_divisor) != 1:  # the last norm has divided all of them (models/decoder.py)
            of_pooled, of_shown = of_pooled * divisor, of_shown * divisor
        scores, sums, states = step.prompt_scores, step.hidden_sums, step.hidden_states
        extras = StepExtras(
            self._logprobs.of_prompts(scores, of_scored, self.model.head.of_hidden) if scores else None,
            sum_hidden(sums, of_pooled, self._downloads) if sums else None,
            fetch_hidden(states, of_shown, self._downloads) if states else None,
        )
        logits = self.model.head.of_hidden(hidden)
        return StepHead(chosen, lambda: logits), extras

    def _extend_batch(
        self, step: StepInputs, choices: Choices, wanted: WantedTokens
    ) -> tuple[ForwardBatch, torch.Tensor]:
        """Send an EXTEND step to the device, in one transfer. Returns also the rows of the choices there."""
        extend_lens, input_ids = step.extend_lens, step.input_ids
        assert extend_lens is not None and input_ids is not None
        positions_host = step.positions
        unknown = np.flatnonzero(input_ids == FROM_DEVICE)
        row_of_each = np.repeat(step.rows, extend_lens)
        sent = self._uploads.send(
            *self.table.changes(step, positions_host),
            unknown,
            _int64(row_of_each[unknown]),
            _int64(step.rows),
            _int64(step.seq_lens),
            _int64(step.out_cache_loc),
            _int64(input_ids),
            positions_host,
            step.starts,
            _int64(step.seq_lens - extend_lens),
            wanted.at,
            _int64(choices.rows),
            *([] if self.adapters is None else [self.adapters.rows.host[row_of_each]]),
        )
        saves = step.state_saves
        saved = None if saves is None else SavedStates(*self._uploads.send(_int64(saves.lens), _int64(saves.rows)))
        places, new_slots, at, from_rows, rows, seq_lens, slots, ids, positions, starts, prefix_lens, *rest = sent
        logits_indices, chosen, *adapters = rest
        self.table.write(places, new_slots)
        if len(unknown):
            ids.index_copy_(0, at, self.future_tokens.index_select(0, from_rows))
        batch = ForwardBatch(
            mode=ForwardMode.EXTEND,
            rows=rows,
            seq_lens=seq_lens,
            input_ids=ids,
            positions=positions,
            out_cache_loc=slots,
            req_to_token=self.table.tensor,
            logits_indices=logits_indices,
            extend_start_loc=starts,
            prefix_lens=prefix_lens,
            seq_lens_host=step.seq_lens,
            extend_lens_host=extend_lens,
            adapters=TokenAdapters(*adapters) if adapters else None,
            sampled_adapters=TokenAdapters(adapters[0].index_select(0, logits_indices)) if adapters else None,
            saved_states=saved,
        )
        return batch, chosen


def _int64(array: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    return array.astype(np.int64)
