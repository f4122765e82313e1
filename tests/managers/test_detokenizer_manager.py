from __future__ import annotations

import re
import threading

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from patience import PATIENCE_S
from tokenizer_samples import byte_level_tokenizer, default_tokenizer, texts

from tercet.managers.detokenizer_manager import DetokenizerManager, run_detokenizer
from tercet.managers.text_stream import StopStringChecker, TextStream
from tercet.srt.io_struct import (
    AbortFinish,
    BatchTokenOut,
    BrokenMessage,
    Counts,
    DecodeOptions,
    DetokenizerAlive,
    LengthFinish,
    StopFinish,
    ToDetokenizer,
    TokenOut,
    ToTokenizer,
)
from tercet.srt.ipc import Receiver, RunDir, Sender
from tercet.srt.request_options import RequestOptions
from tercet.srt.sampling_params import SamplingParams

PLAIN = DecodeOptions(skip_special_tokens=True, no_stop_trim=False, stop_strings=[])


def token_out(rid, ids, finish=None, options=None):
    return TokenOut(
        rid=rid,
        token_ids=ids,
        finish=finish,
        counts=Counts(5, len(ids), 2, 1),
        options=options,
    )


def process(manager, *outs):
    return manager.process(BatchTokenOut(list(outs))).outs


def encode(text):
    return default_tokenizer().encode(text, add_special_tokens=False)


def answer(text, finish, options=PLAIN, manager=None):
    """The text of a whole answer, one token a message."""
    manager = manager or DetokenizerManager(default_tokenizer())
    ids = encode(text)
    shown = ""
    for index, token in enumerate(ids):
        last = index == len(ids) - 1
        (out,) = process(manager, token_out("r", [token], finish if last else None, options if index == 0 else None))
        assert out.finish == (finish if last else None)
        shown += out.text
    assert manager.num_requests == 0
    return shown


def test_passes_on_all_that_it_does_not_change():
    manager = DetokenizerManager(default_tokenizer())
    ids = encode("Hello")
    (out,) = process(manager, token_out("r", ids, LengthFinish(1), PLAIN))
    assert (out.rid, out.text, out.token_ids, out.finish) == ("r", "Hello", ids, LengthFinish(1))
    assert out.counts == Counts(5, len(ids), 2, 1)
    assert out.tokens.options is None, "only this process needs them"


@pytest.mark.parametrize(
    "end", [LengthFinish(9), AbortFinish("gone"), AbortFinish("not a number", 500, "InvalidLogits")]
)
def test_an_end_without_a_stop_releases_all_text(end):
    options = DecodeOptions(True, False, ["<stop>", "\n\n"])
    assert answer("a <sto", end, options) == "a <sto"
    # The last token but one of an emoji: what is there is shown as what it is.
    manager = DetokenizerManager(default_tokenizer())
    ids = encode("😺")
    assert len(ids) > 1
    assert process(manager, token_out("r", ids[:-1], None, PLAIN))[0].text == ""
    assert process(manager, token_out("r", [], end))[0].text == "\ufffd"


@given(text=texts)
def test_text_survives_any_road(text):
    if encode(text):
        expected = default_tokenizer().decode(encode(text))
        assert answer(text, LengthFinish(1)) == expected


def test_the_stop_token_is_trimmed_unless_it_is_wanted():
    (period,) = encode(".")
    assert answer("Yes.", StopFinish(period)) == "Yes"
    assert answer("Yes.", StopFinish(period), DecodeOptions(True, True, [])) == "Yes."
    eos = 2
    assert answer("Yes<|im_end|>", StopFinish(eos)) == "Yes"
    assert answer("Yes<|im_end|>", StopFinish(eos), DecodeOptions(False, False, [])) == "Yes"
    assert answer("Yes<|im_end|>", StopFinish(eos), DecodeOptions(False, True, [])) == "Yes<|im_end|>"
    assert answer("Yes<|im_end|>", StopFinish(eos), DecodeOptions(True, True, [])) == "Yes"


@given(text=texts, end=st.sampled_from([".", "<|im_end|>"]), keep=st.booleans(), cut=st.integers(0, 100))
def test_the_stop_token_alone_is_trimmed_whatever_came_with_it(text, end, keep, cut):
    (stop,) = encode(end)
    ids = [*encode(text), stop]
    cut %= len(ids)
    manager = DetokenizerManager(default_tokenizer())
    outs = process(
        manager,
        token_out("r", ids[:cut], None, DecodeOptions(False, keep, [])),
        token_out("r", ids[cut:], StopFinish(stop)),
    )
    shown = default_tokenizer().decode(ids if keep else ids[:-1], skip_special_tokens=False)
    assert "".join(out.text for out in outs) == shown


def test_marks_are_shown_while_other_special_tokens_are_skipped():
    sampling = SamplingParams(stop="d<|im_start|>")
    options = DecodeOptions.of(RequestOptions(sampling=sampling, shown_tokens=[1]))
    said = "a<|im_start|>b<|im_end|>c<|im_start|>"
    assert answer(said, LengthFinish(9), options) == "a<|im_start|>bc<|im_start|>"
    assert answer(said.replace("c", "d"), LengthFinish(9), options) == "a<|im_start|>b", "a stop string sees them, too"


def test_the_message_is_not_changed_by_trimming():
    (period,) = encode(".")
    ids = [period]
    (out,) = process(DetokenizerManager(default_tokenizer()), token_out("r", ids, StopFinish(period), PLAIN))
    assert out.text == "" and out.token_ids == ids == [period]


@given(
    data=st.data(),
    stops=st.lists(st.text("aé€😀\n\ufffd", min_size=1, max_size=3), min_size=1, max_size=3),
    skip=st.booleans(),
)
def test_the_scheduler_finds_each_stop_string_among_tokens_that_it_leaves_out(data, stops, skip):
    """Tokens of single bytes: characters are cut anywhere, and some bytes are no text."""
    tokenizer = default_tokenizer()
    single = {
        spelled: token for token in range(tokenizer.vocab_size) if len(spelled := tokenizer.token_bytes[token]) == 1
    }
    pieces = st.sampled_from([*"".join(stops).encode(), *"b€é".encode()]).map(lambda byte: bytes([byte]))
    whole = st.sampled_from(stops).map(str.encode)
    data = b"".join(data.draw(st.lists(st.one_of(pieces, whole), max_size=30)))
    options = DecodeOptions(skip, False, stops)
    checker, stream = StopStringChecker(tokenizer, options), TextStream(tokenizer, options)
    for byte in data:
        token = single[bytes([byte])]
        stream.push([token])
        found = None if token in checker.quiet else checker.push(token)
        assert found == stream.matched


def test_tokens_without_the_start_of_a_stop_string_are_pushed_once_for_all_requests():
    first, second = (
        StopStringChecker(default_tokenizer(), DecodeOptions(True, False, [stop])) for stop in ("~A", "~B")
    )
    (harmless,), (start,) = encode("."), encode("~")
    first.push(harmless)
    assert harmless in first.quiet and harmless in second.quiet
    second.push(start)
    assert harmless not in second.quiet and harmless in first.quiet and start not in first.quiet
    assert second.push(harmless) is None and harmless in second.quiet
    for number in range(20):  # clients choose stop strings
        StopStringChecker(default_tokenizer(), DecodeOptions(True, False, [chr(ord("a") + number)]))
    assert len(default_tokenizer().token_bytes._without) == 8


@given(data=st.data(), text=texts, keep=st.booleans())
def test_scheduler_and_detokenizer_agree_on_stop_strings(data, text, keep):
    """The scheduler ends the answer with the token that completes a stop string; the text ends at the same place."""
    ids = encode(text)
    whole = default_tokenizer().decode(ids)
    stops = data.draw(
        st.lists(
            st.one_of(
                st.text("ab '\n1", min_size=1, max_size=3),
                st.integers(0, len(whole)).map(lambda at: whole[at : at + 3] or "x"),
            ),
            min_size=1,
            max_size=3,
        )
    )
    # A pattern and a string that match the same texts.
    if data.draw(st.booleans()):
        options = DecodeOptions(True, keep, stops[1:], stop_patterns=[re.escape(stops[0])])
    else:
        options = DecodeOptions(True, keep, stops)
    checker = StopStringChecker(default_tokenizer(), options)
    produced, matched = [], None
    for token in ids:
        produced.append(token)
        matched = checker.push(token)
        if matched is not None:
            break
    manager = DetokenizerManager(default_tokenizer())
    finish = LengthFinish(len(produced)) if matched is None else StopFinish(matched)
    cut = data.draw(st.integers(0, len(produced)))
    before, after = process(
        manager, token_out("r", produced[:cut], None, options), token_out("r", produced[cut:], finish)
    )
    shown = before.text + after.text
    # A new detokenizer goes on where the one that died has stopped, also inside a character or a stop string.
    resumed = msgspec.structs.replace(options, resumed_ids=produced[:cut])
    (again,) = process(DetokenizerManager(default_tokenizer()), token_out("r", produced[cut:], finish, resumed))
    assert again.text == after.text
    if matched is None:
        assert shown == default_tokenizer().decode(produced)
        assert not any(stop in shown.rstrip("\ufffd") for stop in stops)
    else:
        end = min(at + len(stop) for stop in stops if (at := whole.find(stop)) >= 0)
        assert matched in stops and shown == whole[: end if keep else end - len(matched)]


def test_a_request_that_ended_before_it_began():
    manager = DetokenizerManager(default_tokenizer())
    end = AbortFinish("aborted")
    (out,) = process(manager, token_out("never", [], end))
    assert (out.text, out.finish) == ("", end)
    (out,) = process(manager, token_out("never", [], end, PLAIN))
    assert (out.text, out.finish) == ("", end)
    assert manager.num_requests == 0


def test_without_a_tokenizer_there_are_ids_only():
    manager = DetokenizerManager(None)
    outs = process(manager, token_out("r", [1, 2], None, PLAIN), token_out("r", [-1], LengthFinish(3)))
    assert [(out.text, out.token_ids) for out in outs] == [("", [1, 2]), ("", [-1])]
    assert manager.num_requests == 0


@pytest.mark.parametrize("bad", [token_out("bad", [-7], None, PLAIN), token_out("bad", [5])], ids=["id", "options"])
def test_a_request_that_cannot_be_detokenised_fails_alone(bad):
    manager = DetokenizerManager(default_tokenizer())
    good = encode("good text")
    outs = process(manager, token_out("good", good[:1], None, PLAIN), bad, token_out("good", good[1:], LengthFinish(2)))
    assert [out.rid for out in outs] == ["good", "bad", "good"]
    assert outs[0].text + outs[2].text == "good text"
    failure = outs[1].finish
    assert isinstance(failure, AbortFinish) and failure.status_code == 500 and outs[1].text == ""
    assert manager.num_requests == 1
    # The scheduler does not know and goes on: nothing more is said, and nothing is kept in the end.
    assert process(manager, token_out("bad", [5])) == []
    assert process(manager, token_out("bad", [6], LengthFinish(3))) == []
    assert manager.num_requests == 0
    # The same id may be used again, even before that end was heard of.
    process(manager, bad)
    (out,) = process(manager, token_out("bad", encode("fine"), LengthFinish(1), PLAIN))
    assert out.text == "fine" and manager.num_requests == 0


@pytest.mark.parametrize("options", [PLAIN, None], ids=["id", "options"])
def test_a_failure_in_the_last_message_leaves_nothing(options):
    manager = DetokenizerManager(default_tokenizer())
    (out,) = process(manager, token_out("bad", [-1 if options else 5], LengthFinish(1), options))
    assert isinstance(out.finish, AbortFinish)
    assert manager.num_requests == 0


def test_many_requests_at_once_keep_apart():
    manager = DetokenizerManager(byte_level_tokenizer())
    tokenizer = byte_level_tokenizer()
    answers = {f"r{i}": tokenizer.encode(f"answer {i} äöü 😺 {i * i}") for i in range(50)}
    shown = dict.fromkeys(answers, "")
    for step in range(max(map(len, answers.values()))):
        outs = [
            token_out(
                rid,
                [ids[step]],
                LengthFinish(len(ids)) if step == len(ids) - 1 else None,
                PLAIN if step == 0 else None,
            )
            for rid, ids in answers.items()
            if step < len(ids)
        ]
        for out in process(manager, *outs):
            shown[out.rid] += out.text
    assert shown == {f"r{i}": f"answer {i} äöü 😺 {i * i}" for i in range(50)}
    assert manager.num_requests == 0


class FakeLink:
    """Both ends of a link: what is `queued`, each entry after one wait, and what was `sent`."""

    def __init__(self, queued=()):
        self.queued = list(queued)
        self.sent = []

    def wait(self, timeout_s):
        assert 0 < timeout_s <= 0.5
        return bool(self.queued and self.queued[0])

    def drain(self):
        return self.queued.pop(0)

    def send(self, message):
        self.sent.append(message)


def test_the_loop_answers_in_one_message_what_has_queued_up():
    first, *rest = encode("Hello there, world")
    queue = [BatchTokenOut([token_out("r", [token])]) for token in rest[:-1]]
    queue.append(BatchTokenOut([token_out("r", rest[-1:], LengthFinish(1))]))
    receiver = FakeLink([[BatchTokenOut([token_out("r", [first], None, PLAIN)])], [], queue])
    sender = FakeLink()
    run_detokenizer(receiver, sender, default_tokenizer(), lambda: not receiver.queued)
    assert sender.sent.pop(1) == DetokenizerAlive(), "nothing came for half a second"
    assert [len(message.outs) for message in sender.sent] == [1, len(rest)]
    assert "".join(out.text for message in sender.sent for out in message.outs) == "Hello there, world"


def test_the_loop_ends_the_requests_of_a_broken_message_and_goes_on():
    good = encode("Hello there, world")
    queue = [
        BatchTokenOut([token_out(rid, good[:1], None, PLAIN) for rid in ("good", "bad")]),
        BrokenMessage(["bad"], "lost"),
        BatchTokenOut([token_out("good", good[1:], LengthFinish(4))]),
    ]
    receiver, sender = FakeLink([queue]), FakeLink()
    run_detokenizer(receiver, sender, default_tokenizer(), lambda: not receiver.queued)
    (message,) = sender.sent
    assert "".join(out.text for out in message.outs if out.rid == "good") == "Hello there, world"
    assert [out.finish for out in message.outs if out.rid == "bad"] == [None, AbortFinish("lost", 500, "TercetError")]
    assert message.outs[-2].counts == Counts(0)


def test_a_broken_message_leaves_nothing_of_its_requests():
    manager = DetokenizerManager(default_tokenizer())
    process(manager, *(token_out(rid, encode("Hello"), None, PLAIN) for rid in ("good", "bad")))
    manager.fail(BrokenMessage(["bad"], "lost"))
    assert manager.num_requests == len(manager._reader) == 1


def test_the_loop_over_real_sockets_ends_when_it_should():
    run_dir, context = RunDir.create(), zmq.Context()
    stop = threading.Event()
    inbox = Receiver(context, run_dir.detokenizer, ToDetokenizer)
    answers = Receiver(context, run_dir.tokenizer, ToTokenizer)
    scheduler, out = Sender(context, run_dir.detokenizer), Sender(context, run_dir.tokenizer)
    thread = threading.Thread(target=run_detokenizer, args=(inbox, out, default_tokenizer(), stop.is_set))
    try:
        thread.start()
        scheduler.send(BatchTokenOut([token_out("r", encode("Hello"), LengthFinish(1), PLAIN)]))
        assert answers.wait(PATIENCE_S)
        assert [text.text for message in answers.drain() for text in message.outs] == ["Hello"]
    finally:
        stop.set()
        thread.join(PATIENCE_S)
        for end in (inbox, answers, scheduler, out):
            end.close()
        context.term()
        run_dir.remove()
    assert not thread.is_alive()
