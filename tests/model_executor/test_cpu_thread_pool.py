"""The threads of the compiled operations (csrc/cpu/thread_pool.h). Each test has a process to itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S

from tercet.model_executor import cpu_build, cpu_extension

SOURCES = Path(cpu_extension.__file__).parents[1] / "csrc/cpu"
pytestmark = [
    pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor"),
    pytest.mark.timeout(300),
]

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


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is measured in /proc")
def test_an_operation_that_gets_no_memory_raises_an_error():
    run("""
import resource

size = 1 << 20
pools, q = torch.zeros(2, 9, 2, size), torch.zeros(1, 2, size)
table, row, length = torch.arange(9, dtype=torch.int32).view(1, 9), torch.tensor([0]), torch.tensor([5])
before = resource.getrlimit(resource.RLIMIT_AS)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (400 << 20), before[1]))  # a thread needs a gigabyte
try:
    ops.attention(q, *pools, table, row, length, None, None, 1.0)
except (MemoryError, RuntimeError):
    resource.setrlimit(resource.RLIMIT_AS, before)
else:
    raise AssertionError
assert torch.equal(ops.argmax(logits), logits.argmax(1))
""")


JOBS = """
#include <unistd.h>
#include "thread_pool.h"

int main() {
  auto& pool = tercet::ThreadPool::get();
  auto count_jobs = [&](int64_t jobs) {
    std::vector<int64_t> counts(40);
    for (int64_t job = 0; job < jobs; ++job)
      pool.run(1 + job % 40, [&](int64_t item) { counts[item] += 1; });
    int64_t sum = 0;
    for (const int64_t count : counts) sum += count;
    return sum == jobs / 40 * 820 + jobs % 40 * (jobs % 40 + 1) / 2;  // 1 + 2 + ... + 40, and so on
  };
  bool right = count_jobs(4000);
  for (int threads = 1; threads < 5; ++threads) {
    pool.set_num_threads(threads);
    right = count_jobs(1000) && right;
  }
  std::atomic<int> wrong = 0;
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i) callers.emplace_back([&] { wrong += !count_jobs(2000); });
  for (auto& caller : callers) caller.join();
  for (int threads = 1; threads < 4; ++threads) {
    pool.set_num_threads(threads);
    for (int64_t job = 0; job < 100; ++job) {
      std::atomic<int> started = 0;
      int64_t thrown = -1;
      try {
        pool.run(4, [&](int64_t item) {
          ++started;
          while (threads > 1 && started < 2) tercet::pause_cpu();  // so a thread of the pool throws, too
          throw item;
        });
      } catch (int64_t item) {
        thrown = item;
      }
      right = 0 <= thrown && thrown < 4 && count_jobs(3) && right;
    }
  }
  for (int i = 0; i < 100; ++i) {  // the threads of the pool fall asleep
    std::this_thread::sleep_for(std::chrono::microseconds(150 + 2 * i));
    right = count_jobs(40) && right;
  }
  _exit(right && wrong == 0 ? 0 : 1);  // the pool is never destroyed
}
"""


def test_no_access_races(tmp_path):
    """Compiled without torch, because the sanitizer would also report what it cannot see of torch's threads."""
    compiler = cpu_build.find_compiler(os.environ.get("CXX"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    (tmp_path / "ATen").mkdir()
    (tmp_path / "ATen/Parallel.h").write_text("namespace at { inline int get_num_threads() { return 3; } }")
    program = tmp_path / "jobs"
    flags = ("-std=c++20", "-O1", "-g", "-fsanitize=thread", "-pthread", f"-I{tmp_path}", f"-I{SOURCES}", "-o", program)

    def compiles(source: str) -> bool:
        (tmp_path / "jobs.cpp").write_text(source)
        return subprocess.run([compiler, *flags, tmp_path / "jobs.cpp"], timeout=PATIENCE_S).returncode == 0

    if not compiles("int main() {}") or subprocess.run([program]).returncode:
        pytest.skip("the compiler or the system has no ThreadSanitizer")
    assert compiles(JOBS)
    done = subprocess.run([program], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
