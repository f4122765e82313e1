"""scripts/gpu_compile.py compiles what a server launches, in shares that leave nothing out."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_accelerator import FakeAccelerator, use_fake
from fake_gpu_driver import fake_gpu
from runners import make_runner

from tercet.benchmarks.presets import load_shape
from tercet.model_executor.kernels import tuning

SCRIPTS = Path(__file__).parents[2] / "scripts"
MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 9001,
    "max_position_embeddings": 5000, "use_sliding_window": False, "eos_token_id": 2, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module, on a machine with an H100."""
    gpu = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("gpu_compile")


def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str]]:
    """The kernels that Triton compiles from now on: name, and what the key in its cache depends on."""
    from triton import compiler  # imported in a test: the fake driver has replaced its function

    found: list[tuple[str, str, str]] = []
    compile = compiler.compile

    def noted(src: Any, *, target: Any, options: dict[str, Any]) -> Any:
        found.append((src.fn.__name__, src.hash(), json.dumps([str(target), options], default=str, sort_keys=True)))
        return compile(src, target=target, options=options)

    monkeypatch.setattr(compiler, "compile", noted)
    return found


@pytest.mark.parametrize(
    ("ending", "options"),
    [
        ("", {}),
        ("+fused", {"fuse_small_steps": True}),
        ("+dependent", {"fuse_small_steps": True, "dependent_launch": True}),
    ],
)
def test_a_server_finds_all_its_kernels(
    ending: str, options: dict[str, bool], program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(MODEL), encoding="utf-8")
    kernels = program.kernels_of([f"{path}{ending}"])
    with fake_gpu(), pytest.MonkeyPatch.context() as patch:
        ahead = compiled(patch)
        assert [program.compile_share(kernels, share, 3) for share in range(3)] == [0, 0, 0]
    assert len(ahead) == len(kernels)
    monkeypatch.setattr(torch, "empty", torch.zeros)  # nothing runs that would write to them
    use_fake(monkeypatch, FakeAccelerator(), attention=None)
    with fake_gpu(), pytest.MonkeyPatch.context() as patch, program.as_if_on("sm_90", 132, patch):
        by_a_server = compiled(patch)
        make_runner(
            load_shape(str(path)), dtype="bfloat16", attention_backend="triton", page_size=None,
            max_running_requests=64, max_total_tokens=4096, max_prefill_tokens=600, **options,
        )  # fmt: skip
    assert len(by_a_server) > 20 and set(by_a_server) <= set(ahead)


def test_no_module_asks_another_device(program: Any) -> None:
    """One that did would launch a kernel with other warps or tiles than a server."""
    asked = tuning.arch_of, tuning.num_multiprocessors
    with pytest.MonkeyPatch.context() as patch, program.as_if_on("sm_90", 132, patch):
        others = [
            name
            for name, module in sys.modules.items()
            if name.startswith("tercet.model_executor.") and module is not tuning
            if any(value is function for value in vars(module).values() for function in asked)
        ]
    assert not others


def test_a_kernel_that_does_not_compile_stops_no_other(program: Any, capsys: pytest.CaptureFixture[str]) -> None:
    done = []

    def launch(name: str) -> SimpleNamespace:
        def warmup(*, grid: tuple[int, ...]) -> SimpleNamespace:
            if name == "bad":
                raise RuntimeError("no such instruction")
            done.append(name)
            return SimpleNamespace(src=None, metadata=None)

        kernel = SimpleNamespace(warmup=warmup, fn=SimpleNamespace(__name__=name))
        return SimpleNamespace(kernel=kernel, args=(), kwargs={}, grid=(1,))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "drivers", SimpleNamespace(active=SimpleNamespace(launcher_cls=lambda *_: None)))
        assert program.compile_share([launch("one"), launch("bad"), launch("two")], 0, 1) == 1
    assert done == ["one", "two"] and "bad: RuntimeError: no such instruction" in capsys.readouterr().out


@pytest.mark.parametrize("processes", ["0", "-1"])
def test_without_a_process_nothing_would_be_compiled(
    program: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], processes: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_compile.py", "llama-3.2-1b", "--processes", processes])
    with pytest.raises(SystemExit) as caught:
        program.main()
    assert caught.value.code == 2 and "--processes must be at least 1" in capsys.readouterr().err
