"""Which build of csrc/cpu is loaded, and what is said where none is."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.cpp_extension import include_paths

from tercet.model_executor import cpu_build, cpu_extension
from tercet.model_executor.attention.registry import resolve_attention_backend

HERE = next((variant for variant in cpu_extension.VARIANTS if variant.is_supported()), None)
ROOT = Path(cpu_extension.__file__).parents[1]
AVX2 = {"avx2", "fma3", "f16c"}
AVX512 = AVX2 | {"avx512_f", "avx512_bw", "avx512_vl", "avx512_dq"}
CAPABILITY_OF_FLAG = {
    **{f"-mavx512{name}": f"avx512_{name}" for name in ("f", "bw", "vl", "dq", "vnni")},
    **{"-mavx2": "avx2", "-mfma": "fma3", "-mf16c": "f16c", "-mavx512bf16": "avx512_bf16"},
    "-mavxvnni": "avx_vnni",
}

needs_a_processor = pytest.mark.skipif(HERE is None, reason="csrc/cpu has no build for this processor (x86: AVX2)")


@pytest.fixture
def folder(tmp_path, monkeypatch, caplog):
    """An empty folder that builds are looked for in."""
    monkeypatch.setattr(cpu_extension, "_FOLDER", tmp_path)
    cpu_extension.load.cache_clear()
    caplog.set_level(logging.WARNING)
    yield tmp_path
    cpu_extension.load.cache_clear()


@needs_a_processor
@pytest.mark.skipif(
    cpu_build.find_compiler(os.environ.get("CXX")) is None, reason="no C++ compiler, so csrc/cpu cannot be built here"
)
def test_the_fastest_build_for_this_processor_is_made_of_these_sources(caplog):
    """Not skipped where the build failed: what it takes to build is here."""
    cpu_extension.load.cache_clear()
    assert cpu_extension.load() == HERE, caplog.text


@pytest.mark.parametrize(
    ("has", "usable"),
    [
        ({"avx", "f16c"}, []),  # Ivy Bridge
        (AVX2, ["avx2"]),  # Haswell, Zen 3
        (AVX2 | {"avx512_f", "avx512_cd", "avx512_er", "avx512_pf"}, ["avx2"]),  # Knights Landing
        (AVX2 | {"avx_vnni"}, ["avx2_vnni", "avx2"]),  # Alder Lake
        (AVX512, ["avx512", "avx2"]),  # Skylake-X
        (AVX512 | {"avx512_vnni"}, ["avx512_vnni", "avx512", "avx2"]),  # Cascade Lake, Ice Lake
        (AVX512 | {"avx512_bf16"}, ["avx512", "avx2"]),  # no such processor is known
        (AVX512 | {"avx512_vnni", "avx512_bf16"}, ["avx512_bf16", "avx512_vnni", "avx512", "avx2"]),  # Zen 4
    ],
)
def test_the_builds_for_a_processor(has, usable, monkeypatch):
    monkeypatch.setattr(cpu_build, "is_x86", lambda: True)
    capabilities = {"architecture": "x86_64", "avx512_fp16": False, **dict.fromkeys(has, True)}
    assert cpu_build.usable_builds(capabilities) == usable
    assert cpu_build.local_builds(capabilities) == {*usable[:1], *usable[-1:]}


@given(st.dictionaries(st.sampled_from(sorted(CAPABILITY_OF_FLAG.values())), st.booleans()))
def test_a_build_runs_only_where_the_processor_has_the_instructions_that_its_compiler_may_use(capabilities):
    for build in cpu_build.X86_BUILDS.values():
        used = [CAPABILITY_OF_FLAG[flag] for flag in build.flags if flag.startswith("-m")]
        assert build.runs_with(capabilities) == all(capabilities.get(name, False) for name in used)


def test_capabilities_have_the_names_that_torch_gives_them():
    if not cpu_build.is_x86():
        pytest.skip("not an x86 processor")
    assert set(CAPABILITY_OF_FLAG.values()) <= set(torch.cpu.get_capabilities())


def write_build(path: Path, **fields: str) -> None:
    """A file that says that it was built for this torch from these sources, or what `fields` say otherwise."""
    stamp = cpu_build.BuildStamp(torch.__version__, cpu_build.sources_digest(ROOT) or "none")._replace(**fields)
    path.write_bytes(b"not a library" + stamp.macro()[1].strip('"').encode() + b"\0")


def assert_runs_on_torch(caplog: pytest.LogCaptureFixture, *reasons: str) -> None:
    assert cpu_extension.load() is None and not cpu_extension.multiplies(torch.float32)
    assert resolve_attention_backend("auto", torch.device("cpu")) == "torch"
    assert len(caplog.records) == 1 and "The C++ kernels" in caplog.text
    for reason in (*reasons, "setup.py build_ext --inplace"):
        assert reason in caplog.text
    with pytest.raises(ValueError, match=r"compiled C\+\+ kernels"):
        resolve_attention_backend("cpu", torch.device("cpu"))


@needs_a_processor
def test_nothing_was_built(folder, caplog):
    assert_runs_on_torch(caplog, cpu_build.file_name(HERE.name), "was not built")


@needs_a_processor
@pytest.mark.parametrize("suffix", [".cpython-399-x86_64-linux-gnu.so", ".abi3.so", ".so"])
def test_a_build_for_another_python(suffix, folder, caplog):
    foreign = folder / f"_cpu_{HERE.name}{suffix}"
    foreign.write_bytes(b"not a library")
    assert_runs_on_torch(caplog, f"{foreign.name} was built for another Python")


@needs_a_processor
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"torch": "1.2.3+cu99"}, "was built for torch 1.2.3+cu99"),
        ({"sources": "0123456789abcdef"}, "was built from other sources"),
        ({}, "cannot be loaded"),
    ],
)
def test_a_build_that_does_not_fit(fields, reason, folder, caplog):
    write_build(folder / cpu_build.file_name(HERE.name), **fields)
    assert_runs_on_torch(caplog, reason)


@needs_a_processor
@pytest.mark.parametrize("content", [b"", b"\x7fELF of an older Tercet", b"tercet build: cut-off"])
def test_a_build_that_does_not_say_what_it_was_built_for(content, folder, caplog):
    (folder / cpu_build.file_name(HERE.name)).write_bytes(content)
    assert_runs_on_torch(caplog, "has no record of what it was built for")


@needs_a_processor
def test_builds_that_a_checkout_does_not_have_are_no_reasons(folder, caplog, monkeypatch):
    between = cpu_extension.Variant("between", lambda: True)
    monkeypatch.setattr(cpu_extension, "VARIANTS", (HERE, between))
    write_build(folder / cpu_build.file_name(HERE.name), torch="1.2.3")
    assert_runs_on_torch(caplog, "was built for torch 1.2.3")
    assert "between" not in caplog.text


def test_a_processor_without_a_build(folder, caplog, monkeypatch):
    monkeypatch.setattr(cpu_extension, "VARIANTS", ())
    assert cpu_extension.load() is None
    assert "The C++ kernels" in caplog.text and "AVX2" in caplog.text


SLOWER_BUILD = """
import sys
from pathlib import Path
from tercet.model_executor import cpu_extension
cpu_extension._FOLDER = Path(sys.argv[1])
print(cpu_extension.load().name)
"""


@pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")
def test_a_slower_build_takes_the_place_of_a_stale_one(tmp_path):
    usable = [variant for variant in cpu_extension.VARIANTS if variant.is_supported()]
    if len(usable) < 2:
        pytest.skip("one build runs on this processor")
    fast, slow = (cpu_build.file_name(variant.name) for variant in (usable[0], usable[-1]))
    write_build(tmp_path / fast, torch="1.2.3")
    (tmp_path / slow).symlink_to(Path(cpu_extension.__file__).with_name(slow))
    arguments = [sys.executable, "-c", SLOWER_BUILD, str(tmp_path)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == usable[-1].name
    assert f"slower build of the C++ kernels, for {usable[-1].name}" in done.stderr and "torch 1.2.3" in done.stderr


needs_sources = pytest.mark.skipif(not cpu_build.sources(ROOT), reason="an installed package has no csrc")


def build_with(compiler: str, folder: Path, *arguments: str, **variables: str) -> str:
    """What setup.py says when it builds csrc/cpu in `folder` with that compiler; it must not fail, nor build."""
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "__init__.py", "csrc"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "model_executor").mkdir()
    (folder / "model_executor/cpu_build.py").symlink_to(ROOT / "model_executor/cpu_build.py")
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", *arguments, "--build-temp", "temp"],
        cwd=folder,
        env={**os.environ, "CXX": compiler, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not list(folder.rglob("*.so"))
    return done.stderr


@pytest.fixture
def failing_compiler(tmp_path):
    compiler = tmp_path / "g++"
    compiler.write_text('#!/bin/sh\n[ "$1" = -dumpfullversion ] && echo 12.2.0 || exit 1\n')
    compiler.chmod(0o755)
    return str(compiler)


@needs_sources
def test_a_failing_build_says_what_it_means_and_what_to_do(failing_compiler, tmp_path):
    said = build_with(failing_compiler, tmp_path, "--build-lib", "lib")
    for name in cpu_build.builds():
        assert f"building tercet.model_executor._cpu_{name} failed" in said
    assert "torch's operations" in said and "setup.py build_ext --inplace" in said


@needs_sources
@pytest.mark.parametrize("named", [None, "avx512 avx2"])
def test_a_build_in_place_is_for_this_machine(named, failing_compiler, tmp_path):
    said = build_with(failing_compiler, tmp_path, "--inplace", **({} if named is None else {"TERCET_BUILDS": named}))
    expected = cpu_build.local_builds(torch.cpu.get_capabilities()) if named is None else set(named.split())
    assert set(re.findall(r"_cpu_(\w+) failed", said)) == expected & set(cpu_build.builds())


@needs_sources
def test_unknown_builds_are_named(failing_compiler, tmp_path):
    said = build_with(failing_compiler, tmp_path, "--inplace", TERCET_BUILDS="avx-512")
    assert "TERCET_BUILDS: there is no build avx-512; the builds are" in said


@needs_sources
@pytest.mark.parametrize(("compiler", "said"), [("no-such-compiler", "no C++ compiler"), ("false", "cannot be used")])
def test_a_machine_without_a_compiler_that_works_says_so(compiler, said, tmp_path):
    assert said in build_with(compiler, tmp_path, "--build-lib", "lib")


@needs_sources
@pytest.mark.skipif(shutil.which("g++-11") is None, reason="g++-11, the oldest compiler that will do, is not here")
@pytest.mark.parametrize("variant", cpu_build.builds())
def test_gcc_11_understands_the_sources(variant):
    headers = [f"-I{path}" for path in (*include_paths(), sysconfig.get_paths()["include"])]
    flags = [*cpu_build.COMMON_FLAGS, *cpu_build.builds()[variant].flags, '-DTERCET_BUILD=""']
    command = ["g++-11", "-fsyntax-only", *flags, *headers, str(ROOT / "csrc/cpu/ops.cpp")]
    subprocess.run(command, check=True)


def test_setup_uses_names_that_exist():
    names = re.findall(r"cpu_extension\.(\w+)\(", (ROOT / "scripts/setup").read_text())
    assert names
    assert all(hasattr(cpu_extension, name) for name in names)
