"""The threads of the compiled operations (csrc/cpu/thread_pool.h). Each test has a process to itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S

from tercet.model_executor import cpu_extension

pytestmark = pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")

START = """
import os, threading
import torch
from tercet.model_executor import cpu_extension

cpu_extension.load()
ops = torch.ops.tercet_cpu
torch.set_num_threads(3)
cpu_extension.take_threads()
logits = torch.randn(64, 50000)
"""


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", START + code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_the_compiled_operations_take_torchs_threads():
    run("""
assert (ops.num_threads(), torch.get_num_threads()) == (3, 1)
ops.argmax(logits)
before = len(os.listdir("/proc/self/task"))
assert before >= 3, before
torch.randn(2000, 2000) @ torch.randn(2000, 2000)
assert len(os.listdir("/proc/self/task")) == before
""")


def test_threads_are_taken_once():
    run("""
cpu_extension.take_threads()
assert (ops.num_threads(), torch.get_num_threads()) == (3, 1)
torch.set_num_threads(2)
cpu_extension.take_threads()
assert (ops.num_threads(), torch.get_num_threads()) == (2, 1)
""")


def test_a_process_ends_while_another_thread_computes():
    """The thread is inside one long call, and does not come back to Python before the process has ended."""
    run("""
graph, x, weight = torch.classes.tercet_cpu.Graph(), torch.randn(20000, 64), torch.ones(64)
graph.record(20000, 1, 1)
first = ops.rms_norm(x, None, weight, 1e-5)
for _ in range(40000):
    ops.rms_norm(x, None, weight, 1e-5)
graph.finish()
first.zero_()
kept = graph, x, weight, first  # by the thread, which outlives this module
threading.Thread(target=lambda *kept: kept[0].run(20000, 1, 1), args=kept, daemon=True).start()
while not first.any():
    pass
""")


def test_threads_change_while_others_compute():
    run("""
expected = ops.argmax(logits)
wrong = []

def compute():
    for _ in range(60):
        if not torch.equal(ops.argmax(logits), expected):
            wrong.append("tokens")

threads = [threading.Thread(target=compute) for _ in range(2)]
for thread in threads:
    thread.start()
n = 0
while any(thread.is_alive() for thread in threads):
    n += 1
    ops.set_num_threads(1 + n % 4)
assert not wrong
""")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_a_fork_has_threads_of_its_own():
    run("""
expected = ops.argmax(logits)
child = os.fork()
if child == 0:
    right = torch.equal(ops.argmax(logits), expected)
    os._exit(0 if right and len(os.listdir("/proc/self/task")) == 3 else 1)
assert os.waitpid(child, 0)[1] == 0
assert torch.equal(ops.argmax(logits), expected)
""")


def test_a_fork_leaves_the_job_of_another_thread_alone():
    run("""
import time

vocab = torch.randn(1, 300_000)

def sample(n):
    ones = torch.ones(n, dtype=torch.float64)
    draws = torch.linspace(0, 0.99, n, dtype=torch.float64)
    lines = torch.zeros(n, dtype=torch.int64)
    return ops.sample(vocab, lines, ones, 1e6 * ones, 0.9 * ones, 1e9 * ones, draws)

expected = sample(40)
for _ in range(10):
    thread = threading.Thread(target=sample, args=(150,))
    thread.start()
    time.sleep(0.02)  # now it computes
    child = os.fork()
    if child == 0:
        ops.set_num_threads(24)  # while the last of them start, the first look for items
        os._exit(0 if torch.equal(sample(40), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
    thread.join()
""")
