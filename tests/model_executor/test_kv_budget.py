from __future__ import annotations

import pytest

from tercet.model_executor.kv_budget import (
    DEFAULT_CPU_BYTES,
    DEFAULT_CPU_SHARE,
    Memory,
    host_memory,
    num_kv_tokens,
)

GIB = 1 << 30


def tokens(memory, **options):
    options = {
        "page_size": 1, "context_len": 2048, "mem_fraction_static": None, "max_total_tokens": None, "on_cpu": True,
    } | options  # fmt: skip
    return num_kv_tokens(memory, 1 << 15, **options)


def test_a_cpu_gives_a_modest_pool():
    assert tokens(Memory(512 * GIB, 400 * GIB)) == DEFAULT_CPU_BYTES >> 15
    assert tokens(Memory(16 * GIB, 8 * GIB)) == int(8 * GIB * DEFAULT_CPU_SHARE) >> 15
    # a context that the default would not hold
    assert tokens(Memory(512 * GIB, 400 * GIB), context_len=1 << 20) == 1 << 20


def test_a_fraction_is_of_the_whole_memory_with_the_weights():
    # 100 GiB, 30 of them taken by weights; 80 % for both leaves 50 for the pool
    memory = Memory(100 * GIB, 70 * GIB)
    for on_cpu in (True, False):
        assert tokens(memory, mem_fraction_static=0.8, on_cpu=on_cpu) == pytest.approx(50 * GIB >> 15, rel=1e-6)


def test_a_gpu_gives_all_that_steps_leave():
    memory = Memory(100 * GIB, 70 * GIB)
    assert tokens(memory, on_cpu=False) == pytest.approx(68 * GIB >> 15, rel=1e-6)
    assert tokens(memory, on_cpu=False, reserve=5 * GIB) == pytest.approx(63 * GIB >> 15, rel=1e-6)
    # A fraction that was asked for may not take what steps need.
    assert tokens(memory, on_cpu=False, reserve=5 * GIB, mem_fraction_static=0.9) == pytest.approx(60 * GIB >> 15)
    most = (65 * GIB >> 15) - 1
    assert tokens(memory, on_cpu=False, reserve=5 * GIB, mem_fraction_static=0.99) == most
    with pytest.raises(ValueError, match=f"{most} tokens"):
        tokens(memory, on_cpu=False, reserve=5 * GIB, max_total_tokens=most + 1)
    with pytest.raises(ValueError, match=r"30.00 GiB are for steps"):
        tokens(Memory(100 * GIB, 30 * GIB), on_cpu=False, reserve=30 * GIB)


def test_tokens_asked_for():
    memory = Memory(4 * GIB, 2 * GIB)
    assert tokens(memory, max_total_tokens=1000) == 1000
    assert tokens(memory, max_total_tokens=1000, page_size=16) == 992
    most = (2 * GIB >> 15) - 1  # one is the dummy
    assert tokens(memory, max_total_tokens=most) == most
    with pytest.raises(ValueError, match=f"{most + 1}.*{most} tokens"):
        tokens(memory, max_total_tokens=most + 1)


@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_whole_pages(page_size):
    number = tokens(Memory(9 * GIB + 12345, 7 * GIB + 54321), page_size=page_size)
    assert number > 0 and number % page_size == 0


def test_no_room():
    with pytest.raises(ValueError, match="mem_fraction_static"):
        tokens(Memory(100 * GIB, 10 * GIB), mem_fraction_static=0.5)
    with pytest.raises(ValueError, match="no room"):
        tokens(Memory(GIB, 1 << 16))


@pytest.fixture
def host(tmp_path):
    """A machine with 16 GiB, 12 of them available, and the control group's files that are given."""

    def host(files):
        (tmp_path / "proc").mkdir()
        meminfo = f"MemTotal: {16 << 20} kB\nMemFree: 1 kB\nMemAvailable: {12 << 20} kB\n"
        (tmp_path / "proc" / "meminfo").write_text(meminfo)
        for name, text in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return host_memory(str(tmp_path / "proc"), str(tmp_path / "cgroup"))

    return host


def test_a_host_without_limits(host):
    assert host({}) == Memory(16 * GIB, 12 * GIB)


def test_an_unlimited_control_group(host):
    assert host({"memory.max": "max\n", "memory.current": "77\n"}) == Memory(16 * GIB, 12 * GIB)


def test_control_group_version_2(host):
    stat = f"anon 1\ninactive_file {GIB}\nactive_file 7\n"
    files = {"memory.max": f"{8 * GIB}\n", "memory.current": f"{3 * GIB}\n", "memory.stat": stat}
    assert host(files) == Memory(8 * GIB, 6 * GIB)


def test_control_group_version_1(host):
    files = {"memory/memory.limit_in_bytes": f"{4 * GIB}\n", "memory/memory.usage_in_bytes": f"{5 * GIB}\n"}
    assert host(files) == Memory(4 * GIB, 0)


def test_version_1_without_a_limit(host):
    assert host({"memory/memory.limit_in_bytes": "9223372036854771712\n"}) == Memory(16 * GIB, 12 * GIB)


def test_this_host():
    memory = host_memory()
    assert 0 < memory.available <= memory.total
