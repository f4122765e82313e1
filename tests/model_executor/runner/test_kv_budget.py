from __future__ import annotations

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_runner import make_toy_runner

from tercet.mem_cache import token_to_kv_pool
from tercet.model_executor.device.memory import Memory, host_memory
from tercet.model_executor.runner.kv_budget import (
    DEFAULT_CPU_BYTES,
    DEFAULT_CPU_SHARE,
    GPU_MARGIN,
    check_adapters,
    check_host_kv,
    check_random_weights,
    check_weights,
    num_kv_tokens,
)

GIB = 1 << 30


def tokens(memory, **options):
    defaults = {"page_size": 1, "context_len": 2048, "mem_fraction_static": None, "max_total_tokens": None}
    options = {**defaults, "on_cpu": True, "reserve": 0, **options}
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
    with pytest.raises(ValueError, match=r"steps need 30.00 GiB"):
        tokens(Memory(100 * GIB, 30 * GIB), on_cpu=False, reserve=30 * GIB)


def test_tokens_asked_for():
    memory = Memory(4 * GIB, 2 * GIB)
    assert tokens(memory, max_total_tokens=1000) == 1000
    assert tokens(memory, max_total_tokens=1000, page_size=16) == 992
    most = (2 * GIB >> 15) - 1  # one is the dummy
    assert tokens(memory, max_total_tokens=most) == most
    with pytest.raises(ValueError, match=f"{most + 1}.*{most} tokens"):
        tokens(memory, max_total_tokens=most + 1)


@given(
    total=st.integers(1, 64 * GIB),
    share=st.floats(0, 1),
    reserve=st.integers(0, GIB),
    bytes_per_token=st.integers(1, 1 << 20),
    page_size=st.sampled_from([1, 16, 256]),
    context_len=st.integers(1, 1 << 20),
    fraction=st.none() | st.floats(0.01, 1),
    on_cpu=st.booleans(),
)
def test_the_pool_has_all_pages_that_its_rule_allows(
    total, share, reserve, bytes_per_token, page_size, context_len, fraction, on_cpu
):
    available = int(total * share)
    if fraction is not None:
        most = fraction * total - (total - available)
    elif on_cpu:
        most = min(max(DEFAULT_CPU_BYTES, context_len * bytes_per_token), DEFAULT_CPU_SHARE * available)
    else:
        most = available - reserve - GPU_MARGIN * total

    def fits(num_tokens, rounding_bytes):
        with_dummy = (num_tokens + page_size) * bytes_per_token
        return num_tokens * bytes_per_token <= most + rounding_bytes and with_dummy <= available - reserve

    try:
        number = num_kv_tokens(
            Memory(total, available),
            bytes_per_token,
            page_size=page_size,
            context_len=context_len,
            mem_fraction_static=fraction,
            max_total_tokens=None,
            on_cpu=on_cpu,
            reserve=reserve,
        )
    except ValueError:
        assert not fits(2 * page_size, -1)
    else:
        assert number >= 2 * page_size and number % page_size == 0
        assert fits(number, 1) and not fits(number + page_size, -1)


@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_whole_pages(page_size):
    number = tokens(Memory(9 * GIB + 12345, 7 * GIB + 54321), page_size=page_size)
    assert number > 0 and number % page_size == 0


def test_no_room():
    with pytest.raises(ValueError, match=r"raise --mem-fraction-static 0\.5, or lower --max-prefill-tokens"):
        tokens(Memory(100 * GIB, 10 * GIB), mem_fraction_static=0.5)
    with pytest.raises(ValueError, match=r"not enough memory.*--context-length"):
        tokens(Memory(GIB, 1 << 16))
    with pytest.raises(ValueError, match=r"only 0\.00 GiB are available \(0 tokens\)"):
        tokens(Memory(8 * GIB, GIB), max_total_tokens=1000, reserve=2 * GIB)


@pytest.mark.parametrize("page_size", [1, 16])
def test_the_smallest_pool_has_two_pages_beside_the_dummy(page_size):
    size = 3 * page_size << 15
    assert tokens(Memory(size, size), mem_fraction_static=1.0, page_size=page_size) == 2 * page_size
    with pytest.raises(ValueError, match="not enough memory for a KV pool"):
        tokens(Memory(size, size - 1), mem_fraction_static=1.0, page_size=page_size)


def test_weights_that_do_not_fit():
    check_weights(GIB - 1, Memory(2 * GIB, GIB))
    with pytest.raises(ValueError, match=r"the weights need 1\.00 GiB, but only 1\.00 GiB of the GPU's 2\.00 GiB are"):
        check_weights(GIB, Memory(2 * GIB, GIB))
    check_random_weights(GIB, GIB)
    with pytest.raises(ValueError, match=r"random weights: they take 2\.00 GiB, and 1\.00 GiB are available"):
        check_random_weights(2 * GIB, GIB)


def test_host_memory_for_kv_that_does_not_fit():
    for on_cpu, where in ((True, "beside the weights only"), (False, "but only")):
        check_host_kv(3 * GIB, 4 * GIB, on_cpu=on_cpu)
        check_host_kv(0, 0, on_cpu=on_cpu)
        with pytest.raises(ValueError, match=rf"size 4 needs 4\.00 GiB .* {where} 4\.00 GiB .* lower --hicache-size"):
            check_host_kv(4 * GIB, 4 * GIB, on_cpu=on_cpu)


def test_adapters_that_do_not_fit():
    check_adapters(3 * GIB, 4 * GIB)
    check_adapters(0, 0)
    with pytest.raises(ValueError, match=r"adapters need 4\.00 GiB, .* only 4\.00 GiB .* lower --max-loras or --max-l"):
        check_adapters(4 * GIB, 4 * GIB)


@pytest.fixture
def host(tmp_path):
    """A machine with 16 GiB, 12 of them available, the control group's files that are given, and the process in the
    groups that `own` names."""

    def host(files, own="0::/\n"):
        (tmp_path / "proc" / "self").mkdir(parents=True)
        meminfo = f"MemTotal: {16 << 20} kB\nMemFree: 1 kB\nMemAvailable: {12 << 20} kB\n"
        (tmp_path / "proc" / "meminfo").write_text(meminfo)
        (tmp_path / "proc" / "self" / "cgroup").write_text(own)
        for name, text in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return host_memory(tmp_path / "proc", tmp_path / "cgroup")

    return host


def group_2(limit, used, active=0, inactive=0, high="max"):
    """Files of a control group of version 2, in GiB."""
    limit, high = (value if value == "max" else value * GIB for value in (limit, high))
    return {
        "memory.max": f"{limit}\n",
        "memory.high": f"{high}\n",
        "memory.current": f"{used * GIB}\n",
        "memory.stat": f"anon 1\ninactive_file {inactive * GIB}\nactive_file {active * GIB}\nfile_dirty 5\n",
    }


def group_1(limit, used, active=0, inactive=0):
    """The same of version 1; the numbers without `total_` leave out the groups below."""
    return {
        "memory.limit_in_bytes": f"{limit * GIB}\n",
        "memory.usage_in_bytes": f"{used * GIB}\n",
        "memory.stat": f"inactive_file 3\ntotal_inactive_file {inactive * GIB}\ntotal_active_file {active * GIB}\n",
    }


def inside(folder, files):
    return {f"{folder}/{name}": text for name, text in files.items()}


def test_a_host_without_limits(host):
    assert host({}, own="") == Memory(16 * GIB, 12 * GIB)


def test_an_unlimited_control_group(host):
    assert host(group_2("max", 15)) == Memory(16 * GIB, 12 * GIB)


def test_control_group_version_2(host):
    assert host(group_2(8, used=3)) == Memory(8 * GIB, 5 * GIB)


def test_control_group_version_1(host):
    assert host(inside("memory", group_1(4, used=5))) == Memory(4 * GIB, 0)


def test_version_1_without_a_limit(host):
    assert host({"memory/memory.limit_in_bytes": "9223372036854771712\n"}) == Memory(16 * GIB, 12 * GIB)


@pytest.mark.parametrize("own", ["", "0::/elsewhere/on/the/host\n4:memory:/docker/0123\n", "0::/../../outside\n"])
@pytest.mark.parametrize("files", [group_2(8, used=3), inside("memory", group_1(8, used=3))])
def test_a_container_shows_its_own_group_at_the_mount_point(host, files, own):
    assert host(files, own) == Memory(8 * GIB, 5 * GIB)


@pytest.mark.parametrize(
    ("mount", "group", "own"),
    [("", group_2, "0::/system.slice/llm.service\n"), ("memory/", group_1, "4:cpu,memory:/system.slice/llm.service\n")],
)
def test_the_tightest_limit_on_the_way_up_counts(host, mount, group, own):
    """systemd's MemoryMax= and Slurm limit a group below the mount point, whose own limit may be none."""
    files = {
        **inside(f"{mount}system.slice/llm.service", group(6, used=1)),
        **inside(f"{mount}system.slice", group(9, used=7)),
        **inside(f"{mount}system.slice/other.service", group(1, used=1)),
    }
    assert host(files, own) == Memory(6 * GIB, 2 * GIB)


def test_the_name_of_a_group_may_have_any_letters(host):
    assert host(inside("größe.slice", group_2(8, used=3)), "0::/größe.slice\n") == Memory(8 * GIB, 5 * GIB)


def test_version_2_begins_to_reclaim_at_high(host):
    assert host(group_2(8, used=3, high=5)) == Memory(5 * GIB, 2 * GIB)


@pytest.mark.parametrize("files", [group_2(8, 7, 3, 2), inside("memory", group_1(8, 7, 3, 2))])
def test_the_page_cache_is_available(host, files):
    """Active pages, too: the weights of a server before this one are such."""
    assert host(files) == Memory(8 * GIB, 6 * GIB)


def test_this_host():
    memory = host_memory()
    assert 0 < memory.available <= memory.total


def test_a_pool_that_the_system_refuses_is_named(monkeypatch):
    """For example because of `ulimit -v`."""

    def refuse(num_bytes):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(token_to_kv_pool, "zeroed", refuse)
    with pytest.raises(ValueError, match=r"4096 tokens .*Cannot allocate memory; choose a smaller --max-total-tokens"):
        make_toy_runner(max_total_tokens=4096)
