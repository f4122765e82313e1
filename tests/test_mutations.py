"""The list of mutations does not rot. scripts/mutate runs them; here each is only looked at."""

from __future__ import annotations

import ast
from pathlib import Path

import mutate
import pytest
from mutate import PAGE, ROOT, Copy, Mutation, read_mutations, read_report, with_table

MUTATIONS = read_mutations()


def functions_of(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_each_has_a_name_of_its_own() -> None:
    names = [mutation.name for mutation in MUTATIONS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_it_can_be_applied_and_its_tests_exist(mutation: Mutation) -> None:
    source = (ROOT / mutation.file).read_text(encoding="utf-8")
    mutated = mutation.applied(source)
    assert mutated != source
    ast.parse(mutated)
    assert mutation.tests
    for test in mutation.tests:
        path, _, function = test.partition("::")
        assert function in functions_of(ROOT / path), test


def test_the_table_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_table(page, MUTATIONS), "out of date: scripts/mutate --write rewrites it"


def mutation_of(text: str, *tests: str) -> Mutation:
    return Mutation("name", "danger", "guard", "code.py", text, "pass", tests or ("tests/test_a.py::test_a",))


def checkout(folder: Path) -> Path:
    (folder / "tests").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "code.py").write_text("guard()\n", encoding="utf-8")
    return folder


def test_a_mutation_is_judged_by_all_of_its_tests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = checkout(tmp_path / "source")
    copy = Copy(tmp_path, source)
    assert not (copy.root / ".git").exists()
    one, other = "tests/test_a.py::test_a", "tests/test_a.py::test_b"
    seen = []

    def judge(failed: set[str], passed: set[str]) -> str:
        def run(self: Copy, tests: tuple[str, ...]) -> tuple[set[str], set[str]]:
            seen.append((self.root / "code.py").read_text(encoding="utf-8"))
            return failed, passed

        monkeypatch.setattr(mutate.Copy, "run", run)
        return copy.judge(mutation_of("guard()", one, other))

    assert judge({one, other}, set()) == "killed"
    assert judge({one}, {other}) == f"survived: {other}"
    assert judge({one}, set()) == f"no result: {other}"
    assert seen == ["pass\n"] * 3
    assert (copy.root / "code.py").read_text(encoding="utf-8") == "guard()\n"
    assert (source / "code.py").read_text(encoding="utf-8") == "guard()\n"


def test_tests_of_kernels_run_under_the_interpreter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = []

    def run(self: Copy, tests: tuple[str, ...], variables: dict[str, str]) -> tuple[set[str], set[str]]:
        seen.append((tests, variables))
        return set(tests), set()

    monkeypatch.setattr(mutate.Copy, "_run", run)
    kernel, other = "tests/model_executor/kernels/test_a.py::test_a", "tests/test_b.py::test_b"
    assert Copy(tmp_path, checkout(tmp_path / "source")).run((kernel, other)) == ({kernel, other}, set())
    assert seen == [((other,), {"TRITON_INTERPRET": "0"}), ((kernel,), {"TRITON_INTERPRET": "1"})]


@pytest.mark.parametrize("text", ["absent", "u"])
def test_a_text_that_is_not_there_once_is_not_found(tmp_path: Path, text: str) -> None:
    source = checkout(tmp_path / "source")
    (source / "code.py").write_text("u, u\n", encoding="utf-8")
    assert Copy(tmp_path, source).judge(mutation_of(text)).startswith("not found: code.py has the text")


def test_one_failed_case_fails_a_test_and_a_skipped_test_has_no_result(tmp_path: Path) -> None:
    cases = [
        '<testcase classname="tests.srt.test_a" name="test_a[1]"/>',
        '<testcase classname="tests.srt.test_a" name="test_a[2]"><failure/></testcase>',
        '<testcase classname="tests.srt.test_a" name="test_ab"/>',
        '<testcase classname="tests.srt.test_b" name="test_a"><skipped/></testcase>',
        '<testcase classname="" name="tests.srt.test_c"><error/></testcase>',
    ]
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>", encoding="utf-8")
    tests = tuple(f"tests/srt/{name}" for name in ("test_a.py::test_a", "test_a.py::test_ab", "test_b.py::test_a"))
    assert read_report(report, (*tests, "tests/srt/test_c.py::test_a")) == ({tests[0]}, {tests[1]})
