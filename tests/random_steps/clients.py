"""The clients of a random case: what they send to the engine, what they hear, and what they must hear."""

from __future__ import annotations

from collections import Counter
from typing import Any

from random_steps.adapters import LoadedAdapters
from random_steps.answers import SEED, Answer
from random_steps.cases import CONTEXT_LEN, POISON
from random_steps.retention import RetentionBooks
from random_steps.returned import check_hidden, check_logprobs, wish_of
from scheduler_rig import Rig

from tercet.srt.errors import InvalidRequest, PromptTooLong, QueueFull, StreamChanged, WaitingTimeout
from tercet.srt.io_struct import AbortFinish, Counts, LengthFinish, Resumed, RetainReq, pack_ids
from tercet.srt.request_options import RequestOptions
from tercet.srt.sampling_params import SamplingParams

VOCAB = 97
_MAX_CONTINUED = 150
"""A longer conversation is not continued."""


class Clients:
    """All requests of a case. They outlive the engine. `seen`: how often something rare has happened."""

    def __init__(self, seen: Counter[str]) -> None:
        self._seen = seen
        self._arrived: dict[str, dict[str, Any]] = {}
        """The requests, as they were sent."""
        self._answers: dict[str, Answer] = {}
        self._live: dict[str, None] = {}
        """Those that have arrived and not ended."""
        self._aborted: set[str] = set()
        self._served: set[str] = set()
        """Those whose adapter stays loaded until they end."""
        self._tool_calls: list[tuple[int, str]] = []
        """The turns after which the scheduler is told of them."""

    def meet(self, rig: Rig, retention: RetentionBooks | None) -> None:
        """An engine has started. `retention`: None: its cache honours none."""
        self._rig = rig
        self._retention = retention

    def arrive(self, rid: str, request: dict[str, Any], weights: int, adapters: LoadedAdapters) -> None:
        """`weights`: the version in use."""
        name = request.pop("lora_name", None)
        request["adapter"] = None if name is None else adapters.ref(name)
        if name is not None and adapters.is_safe(name):
            self._served.add(rid)
        continued = f"r{request.pop('continues', None)}"
        if continued in self._arrived and isinstance(self._rig.heard[continued].finish, LengthFinish):
            history = self._tokens(continued)
            if POISON not in history and len(history) <= _MAX_CONTINUED:
                request["prompt"] = history + request["prompt"][-8:]
        self._arrived[rid] = request
        self._live[rid] = None
        number = 0 if request["adapter"] is None else int(request["adapter"].fingerprint, 16)
        self._answers[rid] = Answer(request["prompt"], request.get("regex"), weights, VOCAB, number)
        self._seen["requests with an adapter"] += bool(number)
        self._add(rid)

    def _add(self, rid: str, resumed: Resumed | None = None) -> None:
        request = {name: value for name, value in self._arrived[rid].items() if name not in ("tool_call", "logprobs")}
        wish = self._arrived[rid].get("logprobs")
        request["logprobs"] = None if wish is None else wish_of(wish, len(request["prompt"]))
        waited_s = None if resumed is not None and resumed.output_ids else 0.0
        self._rig.add(rid, ignore_eos=True, sampling_seed=SEED, resumed=resumed, waited_s=waited_s, **request)

    def _tokens(self, rid: str) -> list[int]:
        """Prompt and output so far."""
        return [*self._arrived[rid]["prompt"], *self._rig.heard[rid].ids]

    def abort(self, rid: str | None) -> None:
        """None: all requests."""
        self._aborted.update(self._live if rid is None else self._live.keys() & {rid})
        self._rig.abort(rid)

    def on_weights(self, weights: int) -> None:
        """The runner has other weights from now on."""
        for rid in self._live:
            req = self._rig.scheduler.queues.find(rid)  # None: it has not arrived at the scheduler
            output = self._rig.heard[rid].ids if req is None else req.output_ids
            self._answers[rid].on_weights(len(output), weights)
            self._seen["outputs of several weights"] += bool(output)

    # The ends of requests

    def hear(self, turn: int) -> None:
        """After turn `turn`: notes which requests have ended, and what the cache must retain of them."""
        for rid in self._rig.ended:
            del self._live[rid]
            if self._retention is None or isinstance(self._rig.heard[rid].finish, AbortFinish):
                continue
            options = self._options(rid)
            if options.changes_retention:
                self._retention.expect(self._tokens(rid), options.retention_seconds or 0.0, options)
                self._seen["retentions of requests"] += bool(options.retention_seconds)
            tool_call = self._arrived[rid]["tool_call"]
            if tool_call is not None:
                self._tool_calls.append((turn + tool_call[0], rid))
        self._rig.ended.clear()

    def tell_tool_calls(self, turn: int) -> None:
        """Tells the scheduler which requests have ended in a tool call, as the process that reads their text does."""
        due = [rid for when, rid in self._tool_calls if when <= turn]
        self._tool_calls = [one for one in self._tool_calls if one[0] > turn]
        for rid in due:
            assert self._retention is not None
            _, seconds = self._arrived[rid]["tool_call"]
            options, token_ids = self._options(rid), self._tokens(rid)
            self._rig.inbox.messages.append(RetainReq(rid, pack_ids(token_ids), options, seconds))
            self._retention.expect(token_ids, seconds, options)
            self._seen["retentions of tool calls"] += 1

    def _options(self, rid: str) -> RequestOptions:
        request = self._arrived[rid]
        return RequestOptions(
            sampling=SamplingParams(),
            cache_salt=request["salt"],
            adapter=request["adapter"],
            tenant=request["tenant"],
            session_id=request.get("session_id", ""),
            retention_seconds=request.get("retention_seconds"),
        )

    # Restarts

    def resume(self) -> None:
        """A new engine gets the requests of one that has died, those with output first."""
        heard = self._rig.heard
        for rid in [rid for rid in self._live if rid in self._aborted]:
            heard[rid].finish = AbortFinish("aborted by the client")
            del self._live[rid]
        for rid in sorted(self._live, key=lambda rid: not heard[rid].ids):
            self._resume(rid)

    def _resume(self, rid: str) -> None:
        heard = self._rig.heard[rid]
        self._answers[rid].on_restart(len(heard.ids))
        counts = Counts(0) if heard.last is None else heard.last.counts
        resumed = Resumed([], None, counts.num_retractions)
        if heard.ids:
            places = counts.host_tokens, counts.storage_tokens
            resumed = Resumed(list(heard.ids), counts.cached_tokens, counts.num_retractions, *places)
        self._seen["resumed requests with tokens"] += bool(heard.ids)
        self._add(rid, resumed)

    # The end

    def check(self) -> None:
        """Every request has the right answer."""
        assert not self._live, "a request has no end"
        for rid, request in self._arrived.items():
            self._check_answer(rid, **request)

    def _check_answer(self, rid: str, prompt: list[int], max_new_tokens: int, **_: object) -> None:
        length = max_new_tokens
        heard, answer = self._rig.heard[rid], self._answers[rid]
        assert heard.finish is not None, f"{rid} has no end"
        if len(prompt) + length > min(CONTEXT_LEN, self._rig.kv.allocator.size):
            assert isinstance(heard.finish, AbortFinish) and heard.finish.err_type == PromptTooLong.__name__
            return
        assert heard.ids == answer.tokens(len(heard.ids)), f"{rid} has other tokens"
        self._check_returned(rid, whole=not isinstance(heard.finish, AbortFinish))
        if not isinstance(heard.finish, AbortFinish):
            assert heard.finish == LengthFinish(length) and len(heard.ids) == length
            assert heard.last is not None
            counts = heard.last.counts
            assert counts.host_tokens + counts.storage_tokens <= counts.cached_tokens
        elif heard.finish.err_type == "InvalidLogits":
            assert POISON in answer.tokens(length)
        elif heard.finish.err_type in (InvalidRequest.__name__, StreamChanged.__name__):
            assert self._arrived[rid]["adapter"] is not None and rid not in self._served
            assert not heard.ids, f"{rid} has lost its adapter"
            self._seen["requests without their adapter"] += 1
        elif heard.finish.err_type is not None:
            assert heard.finish.err_type in (QueueFull.__name__, WaitingTimeout.__name__)
            assert not heard.ids, f"{rid} was refused after its first token"
        else:
            assert rid in self._aborted or "run" in heard.finish.message

    def _check_returned(self, rid: str, *, whole: bool) -> None:
        request, heard, answer = self._arrived[rid], self._rig.heard[rid], self._answers[rid]
        if "regex" in request and heard.ids and heard.last is not None:
            self._seen["retractions under a grammar"] += heard.last.counts.num_retractions
        ids, wish = self._tokens(rid), request.get("logprobs")
        if wish is not None:
            options = wish_of(wish, len(request["prompt"]))
            num = check_logprobs(heard.logprobs, ids, options, answer, VOCAB, whole)
            self._seen["log probabilities of prompts"] += num
            self._seen["log probabilities under a grammar"] += len(heard.ids) if "regex" in request else 0
            assert heard.last is not None or not num
            self._seen["log probabilities beside reused KV"] += bool(num and heard.last.counts.cached_tokens)
        if request.get("hidden"):
            self._seen["hidden states"] += check_hidden(heard.hidden, ids, len(request["prompt"]), answer, whole=whole)
