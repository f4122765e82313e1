"""Where a figure comes from, read from files alone."""

from __future__ import annotations

import json
from pathlib import Path

from tercet import __version__
from tercet.benchmarks.provenance import command_line, commit, provenance

SHA = "0123456789abcdef0123456789abcdef01234567"


def git(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_", "-")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_the_commit_of_a_branch_a_packed_branch_and_a_detached_head(tmp_path: Path) -> None:
    head = "ref: refs/heads/main\n"
    git(tmp_path / "loose/.git", HEAD=head, refs__heads__main=SHA + "\n")
    git(
        tmp_path / "packed/.git",
        HEAD=head,
        packed_refs=f"# pack-refs\n{'f' * 40} refs/heads/x\n{SHA} refs/heads/main\n",
    )
    git(tmp_path / "detached/.git", HEAD=SHA + "\n")
    for name in ("loose", "packed", "detached"):
        assert commit(tmp_path / name) == SHA


def test_the_commit_of_a_linked_working_tree(tmp_path: Path) -> None:
    git(tmp_path / "main/.git", refs__heads__other=SHA + "\n", HEAD="ref: refs/heads/main\n")
    git(tmp_path / "main/.git/worktrees/w", HEAD="ref: refs/heads/other\n", commondir="../..\n")
    git(tmp_path / "w", **{".git": f"gitdir: {tmp_path}/main/.git/worktrees/w\n"})
    assert commit(tmp_path / "w") == SHA


def test_no_checkout_no_commit(tmp_path: Path) -> None:
    assert commit(tmp_path) is None
    git(tmp_path / "new/.git", HEAD="ref: refs/heads/main\n")
    assert commit(tmp_path / "new") is None


def test_a_result_says_where_it_comes_from() -> None:
    found = provenance(["bench", "--tag", "two words"])
    assert found["command"] == "bench --tag 'two words'"
    assert found["tercet_version"] == __version__
    assert found["hardware"]["cores"] >= 1 and found["hardware"]["cpu"]
    assert found["date"].endswith("+00:00")
    assert json.loads(json.dumps(found)) == found


def test_the_command_can_be_typed_again() -> None:
    assert command_line("tercet bench serving", ["--seed", "1"]) == ["tercet", "bench", "serving", "--seed", "1"]
