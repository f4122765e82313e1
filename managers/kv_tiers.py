"""The tiers below the KV pool: host memory, and files. They keep the KV of requests that have left the pool.

KV is kept in blocks of whole pages, under keys that name all tokens up to the end of the block (mem_cache/block_keys).
When a request is released, its blocks are copied to host memory, unless a tier has them. With files, a thread writes
them to the disk from there. When a request is admitted, the blocks that continue its cached prefix are copied back into
slots of its own. Blocks that only the disk has are read into host memory first, while the request waits.

This side holds only numbers of slots and blocks. The runner makes the copies that `StepInputs.kv_copies` lists.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from ..mem_cache.block_keys import BlockKeys
from ..mem_cache.host_blocks import HostBlocks
from ..mem_cache.kv_folder import use_time_ns
from ..mem_cache.kv_storage import KVStorage, ReadJob, WriteJob
from ..mem_cache.tier_events import TierEvents
from ..model_executor.step import Int32Array, KVCopies
from ..srt.kv_events import KVEvent
from ..srt.tier_state import TierState
from .req import Req
from .req_tiers import ExpectedEnd, ReqTiers
from .tier_copies import TierCopies
from .tier_counts import TierCounts

READ_TIMEOUT_S = 2.0
"""How long a request waits for its blocks to be read. What is not there by then is computed."""
CLOSE_TIMEOUT_S = 3.0
"""How long the scheduler continues writing at shutdown."""
_WAIT_S = 0.001
_MAX_FILE_CHANGES = 16
"""Files that one turn of the scheduler reports. Each takes about as long as hashing its tokens."""


class KVTiers:
    """Saves the KV of released requests and loads it for admitted ones. Only KVCacheManager and the scheduler call it.

    `admit` loads what `end_of` has found, so it must follow at once. Everything else is best effort: if no host block
    is free, nothing is saved or read.
    """

    def __init__(
        self,
        *,
        page_size: int,
        block_len: int,
        num_blocks: int,
        block_bytes: int,
        identity: bytes,
        storage: KVStorage | None,
        clock: Callable[[], float],
    ) -> None:
        """`block_len`: tokens of a block, whole pages. `block_bytes`: bytes of a block. `identity`: of the model and of
        the format of its KV. `clock`: that of `storage`."""
        assert block_len % page_size == 0
        self.blocks = HostBlocks(num_blocks)
        self.counts = TierCounts(page_size, block_len, block_bytes)
        self._page_size = page_size
        self._block_len = block_len
        self._pages_per_block = block_len // page_size
        self._identity = identity
        self._storage = storage
        self._clock = clock
        self._next = TierCopies()
        """For the next step."""
        self._under_way: deque[TierCopies] = deque()
        """Of launched steps, oldest first."""
        self._reading: dict[bytes, ReadJob] = {}
        self._writing: set[WriteJob] = set()
        self._events: TierEvents | None = None

    # Loading

    def awaits_storage(self, req: Req, match_len: Callable[[Req], int]) -> bool:
        """Whether a waiting request should stay in the queue, because blocks of its prefix are read from files.

        Starts the read. `match_len`: tokens of a request that the prefix cache has.
        """
        if self._storage is None:
            return False
        state = self._state(req)
        if state.is_settled:
            return False
        self._collect(self._storage.poll())
        if state.give_up_s is None:
            state.give_up_s = self._clock() + READ_TIMEOUT_S
        elif self._clock() >= state.give_up_s:
            state.is_settled = True
            return False
        last = state.job
        if last is not None and self._reading.get(last.blocks[0][0]) is last:
            return True
        has_failed = last is not None and last.missed in state.keys.places
        job = None if has_failed else self._start_read(state, req, match_len(req))
        if job is None:
            state.is_settled = True
            return False
        state.jobs.append(job)
        return True

    def wait(self) -> None:
        """For a turn without any work: wait a moment for a read, if one is under way."""
        if self._reading and self._storage is not None:
            self._collect(self._storage.poll(_WAIT_S))

    def end_of(self, req: Req, start: int) -> int:
        """The end of the KV that `admit` could load from `start` on, in tokens and whole pages; `start` if none.

        `start`: tokens that the prefix cache has.
        """
        return self._end(req, start, self._state(req).find_end(*self._from(req, start), [self.blocks.index]))

    def expected_end(self, req: Req, start: int) -> int:
        """As `end_of`, but counts blocks of files, too, as long as the request may still wait for them. Has no effect.

        A policy that orders by the cached prefix counts all tiers the same: to copy a token's KV costs far less than to
        compute it.
        """
        state = self._state(req)
        files = None if state.is_settled else self._storage
        known = state.expected
        is_same = known is not None and known.start == start and known.num_output == len(req.output_ids)
        if known is None or not is_same or not state.is_current(self.blocks, files):
            end = self._end(req, start, state.expect_end(*self._from(req, start), self.blocks, files))
            state.expected = known = ExpectedEnd(start, len(req.output_ids), end)
        return known.end

    def _from(self, req: Req, start: int) -> tuple[Int32Array, int]:
        return req.token_ids(), start // self._block_len

    def _end(self, req: Req, start: int, index: int) -> int:
        """The end in tokens, if `index` is the first block that is not found."""
        return max(min(index * self._block_len, req.reusable_len // self._page_size * self._page_size), start)

    def admit(self, req: Req, start: int, slots: Int32Array) -> None:
        """Plan the copies into the slots of the positions from `start` on, up to `end_of`. Notes the admission."""
        state = self._state(req)
        state.num_admitted = req.num_tokens
        if not len(slots):
            return
        page_size, per_block = self._page_size, self._pages_per_block
        first = start // self._block_len
        last = -(-(start + len(slots)) // self._block_len)
        keys = state.keys.keys[first:last]
        found = [self.blocks.find(key) for key in keys]
        blocks = np.array(found, np.int32)
        for block in blocks.tolist():
            self.blocks.pin(block)
            self._next.loaded.append(block)
        pages = np.arange(start // page_size, (start + len(slots)) // page_size, dtype=np.int32)
        self._next.in_host.append(blocks[pages // per_block - first] * per_block + pages % per_block)
        self._next.in_pages.append(slots[::page_size] // page_size)
        self.counts.num_loaded += len(pages)
        if req.cached_tokens is None:
            self._count(req, state, start, len(slots), keys)

    def _count(self, req: Req, state: ReqTiers, start: int, length: int, keys: list[bytes]) -> None:
        """Note where the loaded tokens of the prompt were."""
        end = min(start + length, len(req.prompt_ids))
        read = state.read
        for index, key in enumerate(keys, start // self._block_len):
            overlap = min((index + 1) * self._block_len, end) - max(index * self._block_len, start)
            if key in read:
                req.storage_tokens += max(overlap, 0)
            else:
                req.host_tokens += max(overlap, 0)

    def _start_read(self, state: ReqTiers, req: Req, num_cached: int) -> ReadJob | None:
        """Read the blocks after the cached prefix that only files have. Returns None if there are none.

        If the first of them is being read, returns that job.
        """
        assert self._storage is not None and state.give_up_s is not None
        first = num_cached // self._block_len
        end = (req.reusable_len - self._page_size) // self._block_len + 1  # `admit` loads no page from there on
        keys = state.keys.cover(req.token_ids())[first:end]
        in_host: list[bytes] = []
        wanted: list[bytes] = []
        for key in keys:
            if not wanted and key in self._reading:
                return self._reading[key]
            if self.blocks.find(key) is not None:
                if wanted:
                    break
                in_host.append(key)
            elif self._storage.has(key) and key not in self._reading:
                wanted.append(key)
            else:
                break
        self.blocks.touch(in_host)
        # More would displace the blocks before them.
        room = self.blocks.num_free + self.blocks.num_kept - len(in_host)
        taken = [(key, block) for key in wanted[: max(room, 0)] if (block := self.blocks.take()) is not None]
        if not taken:
            return None
        job = ReadJob(taken, state.give_up_s, in_host)
        self._reading.update((key, job) for key, _ in taken)
        if self._events is not None:
            for index in range(first + len(in_host), first + len(in_host) + len(taken)):
                self._events.on_read_begins(state.keys.keys, index, req.token_ids(), req.namespace)
        self._storage.read(job)
        self._storage.use(state.keys.keys[: first + len(in_host) + len(taken)])
        return job

    # Saving

    def save(self, req: Req, tokens: Int32Array, slots: Int32Array) -> None:
        """Plan the copies of a request's blocks that no tier has, before another step may write to its slots.

        `tokens`: those of the request. `slots`: int32 [>= kv_len], of its positions. Only KV that is known to give
        finite logits is saved.
        """
        state = self._state(req)
        state.restart()
        num_checked = state.num_checked(req.num_tokens, req.num_unchecked, req.kv_len, is_complete=req.is_complete)
        keys = state.keys.cover(tokens[:num_checked])
        if self._storage is not None:
            self._storage.use(keys)
        found: list[int] = []
        filled: dict[int, int] = {}
        last: WriteJob | None = None
        for index, key in enumerate(keys):
            block = self.blocks.find(key)
            if block is not None:
                last = self._write_again(state.keys, tokens, block, index) or last
                self.blocks.pin(block)  # or a later block of this prefix could take it
                found.append(block)
                continue
            if self._storage is not None and self._storage.has(key):
                if self._events is not None:
                    self._events.on_used_file(keys, index, tokens, req.namespace)
                continue
            block = self._take()
            if block is None:
                break
            self.blocks.name(block, key)
            filled[index] = block
            last = WriteJob(key, block, state.keys.content(tokens, index), use_time_ns(index))
            self._next.filled.append(last)
            if self._events is not None:
                self._events.on_saved(keys, index, tokens, req.namespace)
        for block in reversed(found):
            self.blocks.unpin(block)
        if last is not None:
            last.prefix = keys
        if filled:
            self._next.copy_out(slots, filled, self._page_size, self._pages_per_block)
            self.counts.num_saved += len(filled)

    def _write_again(self, keys: BlockKeys, tokens: Int32Array, block: int, index: int) -> WriteJob | None:
        """Write a block of host memory whose file is missing, unless something is being done with the block."""
        storage, key = self._storage, keys.keys[index]
        if storage is None or storage.has(key) or self.blocks.is_pinned(block) or not storage.is_writing:
            return None
        self.blocks.pin(block)
        job = WriteJob(key, block, keys.content(tokens, index), use_time_ns(index))
        self._writing.add(job)
        storage.write(job)
        return job

    def _take(self) -> int | None:
        """A free block, also one whose write has just ended."""
        if self._writing and self._storage is not None:
            self._collect(self._storage.poll())
        return self.blocks.take()

    # Copies

    @property
    def has_copies(self) -> bool:
        """Whether copies wait for a step."""
        return bool(self._next.filled or self._next.loaded)

    def take_copies(self) -> KVCopies | None:
        """The copies for the step that is built next."""
        if not self.has_copies:
            return None
        copies, self._next = self._next, TierCopies()
        self._under_way.append(copies)
        return copies.arrays()

    def on_copied(self) -> None:
        """The oldest step with copies has ended."""
        copies = self._under_way.popleft()
        for block in reversed(copies.loaded):
            self.blocks.unpin(block)
        for job in copies.filled:
            if self._storage is not None and self._storage.is_writing and not self._storage.has(job.key):
                self._storage.write(job)
                self._writing.add(job)
            else:
                self._unpin_saved(job)

    def _unpin_saved(self, job: WriteJob) -> None:
        self.blocks.unpin(job.block)
        self.blocks.touch(job.prefix)

    def _collect(self, jobs: list[ReadJob | WriteJob]) -> None:
        for job in jobs:
            if isinstance(job, WriteJob):
                self._unpin_saved(job)
                self._writing.remove(job)
                self.counts.num_written += job.is_written
                continue
            self.counts.num_read += job.num_read
            for index, (key, block) in enumerate(job.blocks):
                is_kept = index < job.num_read and not job.is_void
                if is_kept:
                    self.blocks.name(block, key)
                del self._reading[key]
                if self._events is not None:
                    self._events.on_read(key, is_kept=is_kept)
            for _, block in reversed(job.blocks):
                self.blocks.unpin(block)
            self.blocks.touch(job.prefix)

    # KV events

    def watch(self, add: Callable[[KVEvent], None]) -> None:
        """Report to `add` what host memory and files have, and from now on each change. Host memory must be empty."""
        self._events = TierEvents(self._page_size, self._block_len, self._identity, add)
        self.blocks.on_drop = self._events.on_dropped
        if self._storage is not None:
            self._storage.list_files()

    @property
    def has_file_changes(self) -> bool:
        """Whether `report_files` has something to do."""
        return self._storage is not None and self._storage.has_file_changes

    def report_files(self) -> None:
        """Report some of the files that have come or gone. For each turn of a scheduler with KV events."""
        if self._events is not None and self._storage is not None:
            for key, content in self._storage.take_file_changes(_MAX_FILE_CHANGES):
                self._events.on_file(key, content)

    # The whole

    def clear(self) -> None:
        """Empty the host memory. Files stay. No request may hold a row.

        Copies that wait for a step are still made if they go to files: a step copies before it writes to any slot, so
        slots that are free from now on keep their KV until then.
        """
        if self._storage is None:
            for block in self._next.blocks:
                self.blocks.unpin(block)
            self._next = TierCopies()
        self.blocks.clear()
        for job in self._reading.values():
            job.is_void = True
        if self._events is not None:
            self._events.clear(self._identity)
            if self._storage is not None:
                self._storage.list_files()

    def rebuild(self) -> None:
        """After an audit found an error: forget the copies that wait for a step, and all but the pins with a reason."""
        self._next = TierCopies()
        self.blocks.rebuild(self._pinned())

    def change_identity(self, identity: bytes) -> None:
        """From now on, KV is of this identity. `clear` has been called, and no request has ReqTiers."""
        self._identity = identity
        if self._events is not None:
            self._events.clear(identity)

    def close(self) -> None:
        """Write what is copied, for a bounded time, and stop the thread."""
        if self._storage is not None:
            self._storage.close(CLOSE_TIMEOUT_S)

    def state(self) -> TierState:
        return self.counts.state(self.blocks, None if self._storage is None else self._storage.files)

    def audit(self) -> None:
        """Raises AssertionError unless each host block has one owner and each pin has a reason. O(blocks)."""
        if self._storage is not None:
            self._collect(self._storage.poll())
        self.blocks.audit()
        if len(self._pinned()) != self.blocks.num_pins:
            raise AssertionError(f"{self.blocks.num_pins} pins of host blocks, but {len(self._pinned())} reasons")

    def _pinned(self) -> list[int]:
        """The block of each pin that has a reason."""
        copied = [block for one in (self._next, *self._under_way) for block in one.blocks]
        read = [block for job in set(self._reading.values()) for _, block in job.blocks]
        return copied + read + [job.block for job in self._writing]

    def _state(self, req: Req) -> ReqTiers:
        if req.tiers is None:
            req.tiers = ReqTiers(BlockKeys(self._identity, req.namespace, self._block_len))
        return req.tiers
