"""A fake scheduler behind the real TokenizerManager and the real HTTP app, and two clients for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import httpx
import msgspec
import tokenizers
from fake_grammars import FakeGrammars
from fake_results import fake_embedding, fake_hidden, fake_logprobs

from tercet.managers.tokenizer_manager import TokenizerManager
from tercet.srt.adapters import AdapterFacts
from tercet.srt.entrypoints.http_server import create_app, make_server
from tercet.srt.io_struct import (
    AbortFinish,
    AbortReq,
    BatchTextOut,
    Counts,
    EngineView,
    FinishReason,
    FlushCacheReply,
    FlushCacheReq,
    GenerateReq,
    LengthFinish,
    RetainReq,
    SchedulerState,
    StateReply,
    StateReq,
    StopFinish,
    TextOut,
    TokenOut,
    ToScheduler,
    ToTokenizer,
    ViewReply,
    ViewReq,
    unpack_ids,
)
from tercet.srt.model_files.model_config import ModelConfig
from tercet.srt.pause_messages import ContinueReq, PauseReply, PauseReq
from tercet.srt.server_args import ServerArgs
from tercet.srt.speculation_state import SpeculationState
from tercet.srt.start_reports import CpuKernels, SchedulerReady
from tercet.srt.text.tokenizer import Tokenizer
from tercet.srt.text.tokenizer_parts import TokenizerParts
from tercet.srt.tier_state import TierState
from tercet.srt.view_parts import HotPrefix, StepRecord
from tercet.srt.weight_messages import UpdateWeightsReply, UpdateWeightsReq, WeightFacts

T = TypeVar("T")

WORDS = ("one", " two", ' "three"', "", " fünf", " \\six\n", " 🙂")
"""Output token i has the text WORDS[i % 7]. One token has no text, and some texts need escapes in JSON."""
CONTEXT_LEN = 256
VOCAB_SIZE = 258
EOS = 256
BOS_TOKEN = 257
FIM = {"pre": 1, "suf": 2, "mid": 3, "pad": 4}
TEMPLATE = (
    "{% if tools %}<tools>{% for t in tools %}{{ t.function | tojson }}{% endfor %}{% endif %}"
    "{% if documents %}<documents>{% for d in documents %}{{ d.title }}: {{ d.text }};{% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.name %}({{ m.name }}){% endif %}"
    "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.id }} {{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}"
    "{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ mood }}"
    "{% if reasoning_effort %}({{ reasoning_effort }}){% endif %}{% endif %}"
)


def text_of(num_tokens: int) -> str:
    """The fake engine's text of `num_tokens` tokens."""
    return "".join(WORDS[i % len(WORDS)] for i in range(num_tokens))


class FakeScheduler:
    """Answers every prompt with WORDS, `step` tokens in each output. A test sets the attributes before its requests."""

    def __init__(self) -> None:
        self.manager: TokenizerManager
        self.step = 1
        self.words: Sequence[str] = WORDS
        """The text of each output token, from the beginning again after the last one."""
        self.stop_after: int | None = None
        """Number of tokens before the stop token; None: run to max_new_tokens."""
        self.fail: tuple[int, FinishReason] | None = None
        """Number of tokens, and the finish reason after them."""
        self.mute = False
        """Accepts requests and sends no output, but answers aborts."""
        self.unsent = 0
        """Number of tokens that an aborted request has generated and not sent yet."""
        self.pauses: list[PauseReq | ContinueReq] = []
        self.is_paused = False
        self.tiers: TierState | None = None
        self.speculation: SpeculationState | None = None
        self.num_drafts = self.num_accepted_drafts = 0
        """In the counts of each output."""
        self.answers: dict[type, Callable[[Any], ToTokenizer]] = {}
        """The replies to further kinds of messages."""
        self.dead = False
        """Answers no calls."""
        self.delay_s = 0.0
        self.gate = False
        """Holds every output in `held` until `release`."""
        self.held: list[tuple[GenerateReq, int]] = []
        self._loop: asyncio.AbstractEventLoop
        self.received: list[GenerateReq] = []
        self.running: dict[str, GenerateReq] = {}
        self._done: dict[str, int] = {}
        self.aborted: list[str | None] = []
        self.retained: list[RetainReq] = []

    def send(self, message: ToScheduler) -> None:
        loop = self._loop = asyncio.get_running_loop()
        if isinstance(message, GenerateReq):
            self.received.append(message)
            self.running[message.rid] = message
            self._go_on(message, len(message.resumed.output_ids) if message.resumed else 0)
        elif isinstance(message, AbortReq):
            self.aborted.append(message.rid)
            request = self.running.pop(message.rid or "", None)
            if request is not None and not self.dead:
                done = self._done.pop(request.rid)
                finish = AbortFinish("aborted by the client")
                out = self._out(request, done, done + self.unsent, finish)
                loop.call_soon(self.manager.on_message, BatchTextOut([out]))
        elif self.dead:
            return
        elif isinstance(message, RetainReq):
            self.retained.append(message)
        elif type(message) in self.answers:
            loop.call_soon(self.manager.on_message, self.answers[type(message)](message))
        elif isinstance(message, FlushCacheReq):
            loop.call_soon(self.manager.on_message, FlushCacheReply(message.call_id, len(self.running)))
        elif isinstance(message, PauseReq | ContinueReq):
            self.pauses.append(message)
            self.is_paused = isinstance(message, PauseReq)
            loop.call_soon(self.manager.on_message, PauseReply(message.call_id))
        elif isinstance(message, ViewReq):
            loop.call_soon(self.manager.on_message, ViewReply(message.call_id, self.view(message.after_step)))
        else:
            assert isinstance(message, StateReq)
            loop.call_soon(self.manager.on_message, StateReply(message.call_id, self.state()))

    def release(self) -> None:
        """Sends one held output. May be called from any thread."""
        self._loop.call_soon_threadsafe(self._write, *self.held.pop(0))

    def _go_on(self, request: GenerateReq, done: int) -> None:
        self._done[request.rid] = done
        if self.mute:
            return
        if self.gate:
            self.held.append((request, done))
        else:
            self._loop.call_later(self.delay_s, self._write, request, done)

    def _write(self, request: GenerateReq, done: int) -> None:
        if request.rid not in self.running:
            return
        limit = request.options.sampling.max_new_tokens
        assert limit is not None
        upto = min(done + self.step, limit)
        finish: FinishReason | None = LengthFinish(limit) if upto == limit else None
        if self.stop_after is not None and upto >= self.stop_after:
            upto, finish = self.stop_after, StopFinish(EOS)
        if self.fail is not None and upto >= self.fail[0]:
            upto, finish = self.fail
        out = self._out(request, done, upto, finish)
        if finish is not None:
            del self.running[request.rid]
        else:
            self._go_on(request, upto)
        self.manager.on_message(BatchTextOut([out]))

    def _out(self, request: GenerateReq, done: int, upto: int, finish: FinishReason | None) -> TextOut:
        prompt_tokens = len(request.input_ids) // 4
        text = "".join(self.words[i % len(self.words)] for i in range(done, upto))
        ids = [i % 256 for i in range(done, upto)]
        counts = Counts(prompt_tokens, upto, prompt_tokens - 1, 0, None if finish is None else 0.25)
        counts = msgspec.structs.replace(
            counts, num_drafts=self.num_drafts, num_accepted_drafts=self.num_accepted_drafts
        )
        logprobs = fake_logprobs(request, done, ids) if request.options.logprobs is not None else None
        tokens = TokenOut(rid=request.rid, token_ids=ids, finish=finish, counts=counts, logprobs=logprobs)
        tokens = msgspec.structs.replace(tokens, hidden_states=fake_hidden(request, done, upto))
        if request.options.pooling is not None and isinstance(finish, LengthFinish):
            tokens = msgspec.structs.replace(tokens, embedding=fake_embedding(request))
        return TextOut(tokens=tokens, text=text)

    def say(self, *pieces: str) -> None:
        """From now on every answer is these pieces, each of one token, and ends with a stop token."""
        self.words, self.stop_after = pieces, len(pieces)

    def state(self) -> SchedulerState:
        return SchedulerState(
            num_running=len(self.running),
            num_waiting=2,
            num_free_tokens=600,
            num_evictable_tokens=200,
            num_protected_tokens=150,
            num_private_tokens=50,
            max_total_num_tokens=1000,
            last_gen_throughput=12.5,
            cache_hit_rate=0.25,
            num_retractions=3,
            num_aborted=4,
            num_finished=5,
            num_kv_repairs=0,
            new_token_ratio=0.5,
            num_waiting_uncached_tokens=70,
            num_retained_tokens=30,
            is_paused=self.is_paused,
            tiers=self.tiers,
            speculation=self.speculation,
        )

    def view(self, after_step: int) -> EngineView:
        steps = [StepRecord(number, number / 10, 0.05, 0, 1) for number in (1, 2, 3) if number > after_step]
        return EngineView(0.4, self.state(), 70, steps, [], [HotPrefix(0, 0, 3, 9, False, list(b"hot"))])

    def prompts(self) -> list[list[int]]:
        return [unpack_ids(one.input_ids).tolist() for one in self.received]

    def prompt_texts(self) -> list[str]:
        return [bytes(ids).decode() for ids in self.prompts()]


def byte_tokenizer(*added: str) -> Tokenizer:
    """A tokenizer that encodes text as UTF-8: token i is byte i, and 256 and 257 are special tokens. The bytes FIM are
    the tokens for fill in the middle.

    `added`: further tokens, with ids from 258 on, which are outside the model's vocabulary.
    """
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    chars = {byte: chr(byte) for byte in visible} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    assert set(chars.values()) == set(alphabet)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={char: byte for byte, char in chars.items()}, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<eos>", "<bos>", *added])
    parts = TokenizerParts(
        backend, {"eos_token": "<eos>", "bos_token": "<bos>"}, frozenset({EOS}), {"default": TEMPLATE}, FIM
    )
    return Tokenizer(parts)


def with_template(template: str, *added: str) -> Tokenizer:
    """The same with another chat template, and without special tokens that the template could name."""
    backend = byte_tokenizer(*added).backend
    return Tokenizer(TokenizerParts(backend, {}, frozenset({EOS}), {"default": template}))


_TOKENIZER = byte_tokenizer()


def make_manager(
    scheduler: FakeScheduler,
    *,
    tokenizer: Tokenizer | None = _TOKENIZER,
    adapters: Sequence[AdapterFacts] = (),
    **settings: Any,
) -> TokenizerManager:
    """A TokenizerManager with the fake scheduler: context 256, vocabulary 258, model name "tiny"."""
    on = {"enable_priority_scheduling": True, "enable_return_hidden_states": True}
    args = ServerArgs(**{"model_path": "/models/tiny-1", "served_model_name": "tiny", **on, **settings})
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        vocab_size=VOCAB_SIZE,
        context_len=CONTEXT_LEN,
    )
    facts = SchedulerReady(
        max_total_num_tokens=1000,
        max_running_requests=16,
        max_req_input_len=CONTEXT_LEN - 1,
        context_len=CONTEXT_LEN,
        chunked_prefill_size=64,
        max_prefill_tokens=128,
        vocab_size=VOCAB_SIZE,
        dtype="float32",
        weights=WeightFacts("int4, int8", 1 << 30),
        device="cpu",
        attention_backend="torch",
        page_size=1,
        kv_bytes=1 << 29,
        graph_bytes=1 << 28,
        cpu_kernels=CpuKernels("avx2", 256, 1024, "widened", "l2", "tercet", "plain", "measured"),
        adapters=list(adapters),
    )
    if args.skip_tokenizer_init:
        tokenizer = None
    scheduler.manager = TokenizerManager(args, config, tokenizer, facts, scheduler, FakeGrammars())
    return scheduler.manager


class Site:
    """A client of the app in this process, with one event loop and no sockets. It reads a stream to its end."""

    def __init__(self, *, app: dict[str, Any] | None = None, **settings: Any) -> None:
        self.scheduler = FakeScheduler()
        self.manager = make_manager(self.scheduler, **settings)
        settings_of_app = dict(app or {})
        tracer = settings_of_app.pop("tracer", None)
        self.server = make_server(self.manager, **settings_of_app)
        self.app = create_app(self.server, tracer=tracer)
        self._runner = asyncio.Runner()
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app, raise_app_exceptions=True), base_url="http://localhost"
        )

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def request(self, method: str, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        """Sends a request. `body`: bytes, or pieces of bytes, are sent unchanged; other values as JSON."""
        if isinstance(body, bytes | AsyncIterable):
            kwargs["content"] = body
        elif body is not None:
            kwargs["json"] = body
        return self.run(self.client.request(method, path, **kwargs))

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return self.request("GET", path, **kwargs)

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        return self.request("POST", path, body, **kwargs)

    def good(self, path: str, body: Any) -> Any:
        """The JSON of a response that must have status 200."""
        answer = self.post(path, body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a stream, without the last one, which must be `[DONE]`."""
        answer = self.post(path, {**body, "stream": True})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        return events_of(answer.content)

    def refused(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        """The error of a response that must have this status."""
        answer = self.post(path, body)
        assert answer.status_code == status, answer.text
        return error_of(answer)

    def idle(self) -> bool:
        """Whether neither the manager nor the scheduler has any request."""
        return not self.scheduler.running and self.manager.num_unfinished == 0

    def close(self) -> None:
        self.run(self.client.aclose())
        self._runner.close()


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error in a response, which must use OpenAI's envelope."""
    body = answer.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}, body
    return body["error"]


def events_of(content: bytes) -> list[Any]:
    """The JSON of server-sent events before `[DONE]`, which must be the last event, except in Anthropic's API. A named
    event has its `type`.

    Comments are left out.
    """
    parts = content.decode().split("\n\n")
    assert parts.pop() == ""
    if not parts[-1].startswith(("event: message_stop\n", "event: error\n")):
        assert parts.pop() == "data: [DONE]"
    events = []
    for part in parts:
        if part.startswith(":"):
            continue
        *names, data = part.split("\n")
        assert data.startswith("data: ")
        events.append(json.loads(data[len("data: ") :]))
        assert names in ([], [f"event: {events[-1].get('type')}"])
    return events


def loaded_weights(message: UpdateWeightsReq) -> UpdateWeightsReply:
    """A scheduler's answer: the weights are in use."""
    return UpdateWeightsReply(message.call_id, facts=WeightFacts("bfloat16", 7))
