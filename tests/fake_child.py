"""Child processes without a model, for tests: real processes and sockets, with fixed tokens.

Run as `python -m fake_child ROLE` in place of `tercet.srt.entrypoints.child`. Token i of an answer is 100 + i, with the
text "<i> ". Tokens are 10 ms apart. The environment variable `FAKE_CHILD` chooses how the scheduler fails.
The grammar worker does what the text of a grammar says: "endless", "killed" or "crash". All others are right.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from dataclasses import dataclass

import msgspec
import zmq

from tercet.srt.entrypoints import child
from tercet.srt.grammar_spec import CheckGrammarReply, CheckGrammarReq
from tercet.srt.io_struct import (
    AbortFinish,
    AbortReq,
    BatchTextOut,
    BatchTokenOut,
    Counts,
    DetokenizerAlive,
    FinishReason,
    FlushCacheReply,
    FlushCacheReq,
    GenerateReq,
    Heartbeat,
    LengthFinish,
    SchedulerState,
    StateReply,
    StateReq,
    TextOut,
    ToDetokenizer,
    TokenOut,
    ToScheduler,
    unpack_ids,
)
from tercet.srt.ipc import Receiver, RunDir, Sender
from tercet.srt.pause_messages import ContinueReq, PauseReply, PauseReq
from tercet.srt.start_reports import DetokenizerReady, GrammarWorkerReady, SchedulerReady
from tercet.srt.weight_messages import WeightFacts

MODULE = "fake_child"
HANG = 997
"""A token that makes the scheduler hang, if a prompt begins with it."""
FACTS = SchedulerReady(
    max_total_num_tokens=10_000,
    max_running_requests=256,
    max_req_input_len=500,
    context_len=512,
    chunked_prefill_size=64,
    max_prefill_tokens=128,
    vocab_size=1000,
    dtype="float32",
    weights=WeightFacts("float32", 1),
    device="cpu",
    attention_backend="torch",
    page_size=1,
    kv_bytes=2,
)


@dataclass
class Running:
    num_prompt: int
    max_new: int
    num_done: int = 0

    @property
    def counts(self) -> Counts:
        return Counts(self.num_prompt, self.num_done)


def run_scheduler(server_args, run_dir: RunDir, on_ready, should_stop) -> None:
    behaviour = os.environ.get("FAKE_CHILD", "")
    if behaviour == "user error":
        raise ValueError("the weights are of the wrong kind")
    if behaviour == "bug":
        raise RuntimeError("something broke")
    if behaviour == "exit":
        os._exit(7)
    if behaviour == "slow start":
        time.sleep(60)
    if server_args.device == "cuda" and behaviour != "gpu":
        raise ValueError("--device cuda needs a GPU")
    context = zmq.Context()
    receiver: Receiver = Receiver(context, run_dir.scheduler, ToScheduler)
    detokenizer: Sender = Sender(context, run_dir.detokenizer)
    tokenizer: Sender = Sender(context, run_dir.tokenizer)
    on_ready(msgspec.structs.replace(FACTS, device="cuda") if behaviour == "gpu" else FACTS)
    running: dict[str, Running] = {}
    is_paused = False
    while not should_stop() or behaviour == "deaf":
        receiver.wait(0.01)
        for message in receiver.drain():
            if isinstance(message, GenerateReq):
                num_prompt = len(unpack_ids(message.input_ids))
                if unpack_ids(message.input_ids)[0] == HANG:
                    hang_here()
                max_new = message.options.sampling.max_new_tokens
                assert max_new is not None
                num_done = len(message.resumed.output_ids) if message.resumed else 0
                running[message.rid] = Running(num_prompt, max_new, num_done)
            elif isinstance(message, AbortReq):
                request = running.pop(message.rid or "", None)
                if request is not None:
                    detokenizer.send(BatchTokenOut([_aborted(message.rid or "", request)]))
            elif isinstance(message, FlushCacheReq):
                tokenizer.send(FlushCacheReply(message.call_id, len(running)))
            elif isinstance(message, PauseReq | ContinueReq):
                is_paused = isinstance(message, PauseReq)
                tokenizer.send(PauseReply(message.call_id))
            elif isinstance(message, StateReq):
                tokenizer.send(StateReply(message.call_id, _state(len(running))))
        tokenizer.send(Heartbeat(_state(len(running))))
        outs = [] if is_paused else [_step(rid, request) for rid, request in running.items()]
        for out in outs:
            if out.finish is not None:
                del running[out.rid]
        if outs:
            detokenizer.send(BatchTokenOut(outs))
            time.sleep(0.01)


def hang_here() -> None:
    """Hangs until the file that FAKE_CHILD_GO names exists. Without that: for ever, in C code that holds the lock."""
    flag = os.environ.get("FAKE_CHILD_GO")
    if flag is None:
        re.match("(a+)+$", "a" * 50 + "b")
    while not os.path.exists(flag or ""):
        time.sleep(0.01)


def _step(rid: str, request: Running) -> TokenOut:
    tokens = [100 + request.num_done] if request.max_new else []
    request.num_done += len(tokens)
    finish: FinishReason | None = None
    if request.num_done >= request.max_new:
        finish = LengthFinish(request.num_done)
    return TokenOut(rid=rid, token_ids=tokens, finish=finish, counts=request.counts)


def _aborted(rid: str, request: Running) -> TokenOut:
    finish = AbortFinish("aborted by the client")
    return TokenOut(rid=rid, token_ids=[], finish=finish, counts=request.counts)


def _state(num_running: int) -> SchedulerState:
    return SchedulerState(
        num_running=num_running,
        num_waiting=0,
        num_free_tokens=1,
        num_evictable_tokens=2,
        num_protected_tokens=3,
        num_private_tokens=4,
        max_total_num_tokens=FACTS.max_total_num_tokens,
        last_gen_throughput=0.0,
        cache_hit_rate=0.0,
        num_retractions=0,
        num_aborted=0,
        num_finished=0,
        num_kv_repairs=0,
        new_token_ratio=0.5,
    )


def run_detokenizer(server_args, run_dir: RunDir, on_ready, should_stop) -> None:
    context = zmq.Context()
    receiver: Receiver = Receiver(context, run_dir.detokenizer, ToDetokenizer)
    sender: Sender = Sender(context, run_dir.tokenizer)
    on_ready(DetokenizerReady())
    while not should_stop():
        if not receiver.wait(0.05):
            sender.send(DetokenizerAlive())
        for message in receiver.drain():
            sender.send(BatchTextOut([_text(out) for out in message.outs]))


def _text(out: TokenOut) -> TextOut:
    text = "".join(f"<{token - 100}> " for token in out.token_ids)
    return TextOut(tokens=out, text=text)


def run_grammar_worker(server_args, run_dir: RunDir, on_ready, should_stop) -> None:
    if os.environ.get("FAKE_CHILD") == "slow start":
        time.sleep(60)
    context = zmq.Context()
    receiver: Receiver = Receiver(context, run_dir.grammar, CheckGrammarReq)
    sender: Sender = Sender(context, run_dir.grammar_replies)
    on_ready(GrammarWorkerReady())
    while not should_stop():
        receiver.wait(0.05)
        for message in receiver.drain():
            if message.spec.text in ("killed", "crash"):
                os.kill(os.getpid(), signal.SIGKILL if message.spec.text == "killed" else signal.SIGABRT)
            while message.spec.text == "endless":
                pass
            sender.send(CheckGrammarReply(message.call_id, None))


def run_http_worker(server_args, run_dir: RunDir, on_ready, should_stop, listener) -> None:
    if os.environ.get("FAKE_CHILD") == "bad worker" and run_dir.life >= 2:  # it replaces another one
        raise ValueError("the tokenizer is of the wrong kind")
    child.run_http_worker_role(server_args, run_dir, on_ready, should_stop, listener)


ROLES = {
    "scheduler": run_scheduler,
    "detokenizer": run_detokenizer,
    "grammar": run_grammar_worker,
    "http_worker": run_http_worker,
}

if __name__ == "__main__":
    sys.exit(child.main(ROLES))
