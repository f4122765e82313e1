"""The package's source files as data, for tests of the house rules: the modules and their imports."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOT_PACKAGES = {"tests", "scripts", "docs", "build", "dist", "setup"}


class When(Enum):
    """When an import statement runs."""

    ALWAYS = "module level"
    CALLED = "inside a function"
    TYPING = "under TYPE_CHECKING"


@dataclass(frozen=True)
class Import:
    """One imported name. `target` is a module of the package ("managers.scheduler"; "" is the root) when
    `internal`, else the dotted name of something outside it."""

    target: str
    internal: bool
    when: When
    line: int
    name: str | None
    """The name that is imported from the target; None for an import of the module itself."""


@dataclass(frozen=True)
class Module:
    """One source file of the package; `name` is relative to it: "srt.errors", "srt" for srt/__init__.py."""

    name: str
    path: Path
    root: Path

    @property
    def where(self) -> str:
        return str(self.path.relative_to(self.root))

    @property
    def lines(self) -> list[str]:
        return self.path.read_text(encoding="utf-8").splitlines()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"), str(self.path))


class SourceTree:
    """The source files of the folder `root`, which is the package `tercet`. Each file is read once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._modules: dict[str, Module] = {}
        self._imports: dict[str, tuple[Import, ...]] = {}

    def files(self) -> Iterator[Path]:
        """All source files of the checkout, without build results, caches and hidden folders (except .ci)."""
        for folder, folders, names in os.walk(self.root):
            folders[:] = sorted(
                name
                for name in folders
                if (name == ".ci" or not name.startswith("."))
                and name not in {"__pycache__", "build", "dist"}
                and not name.endswith(".egg-info")
            )
            # In a git worktree, .git is a file with a path of the machine.
            yield from (Path(folder, name) for name in sorted(names) if name != ".git")

    def modules(self) -> dict[str, Module]:
        """Name -> module, for every source file of the package."""
        if not self._modules:
            for path in self.files():
                parts = path.relative_to(self.root).with_suffix("").parts
                if path.suffix == ".py" and parts[0] not in NOT_PACKAGES:
                    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                    self._modules[name] = Module(name, path, self.root)
        return self._modules

    def imports(self, name: str) -> tuple[Import, ...]:
        """Everything that module `name` imports, in order."""
        if name not in self._imports:
            module = self.modules()[name]
            package = name.split(".") if module.path.name == "__init__.py" else name.split(".")[:-1]
            if name == "":
                package = []
            self._imports[name] = tuple(self._walk(module.tree, package, When.ALWAYS))
        return self._imports[name]

    def imports_of(self, path: Path) -> tuple[Import, ...]:
        """Everything that a file outside the package imports, in order."""
        return tuple(self._walk(ast.parse(path.read_text(encoding="utf-8"), str(path)), [], When.ALWAYS))

    def _walk(self, node: ast.AST, package: list[str], when: When) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, False, when, node.lineno, None)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                yield Import(node.module or "", False, when, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
            for alias in node.names:
                submodule = ".".join([*base, alias.name])
                if submodule in self.modules():
                    yield Import(submodule, True, when, node.lineno, None)
                else:
                    yield Import(".".join(base), True, when, node.lineno, alias.name)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for child in node.body:
                yield from self._walk(child, package, When.TYPING)
            for child in node.orelse:
                yield from self._walk(child, package, when)
        else:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from self._walk(child, package, When.CALLED if inside else when)

    def loaded_with(self, name: str, *, whens: frozenset[When] = frozenset({When.ALWAYS})) -> dict[str, str]:
        """The package's modules that an import of `name` loads -> the module that imports each.

        An import also loads the `__init__` of every package above the module. The root's `__init__`, the lazy public
        API, loads nothing else.
        """
        asked_by = {name: name}
        todo = [name]
        while todo:
            current = todo.pop()
            if current == "":
                continue
            wanted = [item.target for item in self.imports(current) if item.internal and item.when in whens]
            parts = current.split(".")
            wanted += [".".join(parts[:depth]) for depth in range(len(parts))]
            for target in wanted:
                if target in self.modules() and target not in asked_by:
                    asked_by[target] = current
                    todo.append(target)
        return asked_by


HOUSE = SourceTree(ROOT)
files, modules, imports, loaded_with = HOUSE.files, HOUSE.modules, HOUSE.imports, HOUSE.loaded_with


def chain(asked_by: dict[str, str], name: str) -> str:
    """The chain of imports that loaded `name`, as "a -> b -> c"."""
    names = [name]
    while asked_by[names[-1]] != names[-1]:
        names.append(asked_by[names[-1]])
    return " -> ".join(item or "tercet" for item in reversed(names))
