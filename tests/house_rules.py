"""The rules of the house about imports and tests, as functions of a source tree: each yields what breaks it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from source_tree import SourceTree, When

LAYERS = {
    "srt": 0,
    "mem_cache": 1,
    "model_executor": 2,
    "managers": 3,
    "srt.entrypoints": 4,
    "benchmarks": 5,
}
ENTRY_LAYER = 4
KNOWS = {0: {0}, 1: {0, 1}, 2: {0, 1, 2}, 3: {0, 1, 2, 3}, 4: {0, 3, 4}, 5: {0, 1, 2, 3, 4, 5}}
"""Layers that a module of each layer may import."""
EXECUTION_ORDER = [
    "step",
    "forward_batch",
    "row_states",
    "cpu_build",
    "cpu_extension",
    "device",
    "kernels",
    "attention",
    "layers",
    "models",
    "weights",
    "sampling",
    "cpu_calibration",
    "runner",
]
"""Modules and folders of model_executor: each may import those before it."""

WITHOUT_A_FOLDER = {"e2e", "gpu"}
"""Folders of tests that are of no folder of the package: of all processes together, and of what needs a GPU."""
MIRRORED = ("managers", "mem_cache")
"""Every module of these has a test file of its name, or stands in TESTED_IN."""
TESTED_IN = {
    "managers.engine_runner": "managers/test_schedule_recorder.py",
    "managers.grammar": "managers/test_token_masks.py",
    "managers.grammar_worker": "srt/entrypoints/test_grammar_process.py",
    "managers.proposer": "managers/test_drafts.py",
    "managers.req": "managers/test_batch_result.py",
    "managers.req_factory": "managers/test_scheduler.py",
    "managers.req_states": "managers/test_prefix_states.py",
    "managers.schedule_batch": "managers/test_batch_result.py",
    "managers.calls": "managers/test_tokenizer_manager.py",
    "managers.scheduler_io": "managers/test_scheduler.py",
    "managers.scheduler_facts": "managers/test_local_engine.py",
    "managers.scheduler_process": "e2e/test_greedy_parity.py",
    "managers.text_stream": "managers/test_detokenizer_manager.py",
    "managers.tier_copies": "managers/test_kv_tiers.py",
    "managers.tier_counts": "managers/test_kv_tiers.py",
    "mem_cache.base_prefix_cache": "mem_cache/test_chunk_cache.py",
    "mem_cache.radix_audit": "mem_cache/test_radix_cache.py",
    "mem_cache.radix_node": "mem_cache/test_radix_cache.py",
}
"""Modules without a test file of their name: the file under tests/ that tests them with their neighbours."""


def layer(tree: SourceTree, name: str) -> int:
    """The layer of a module; KeyError for a new top-level folder, which has to be given one first.

    The files beside `__init__.py`, such as commands.py, are entry points.
    """
    if tree.modules()[name].path.parent == tree.root:
        return ENTRY_LAYER
    known = [prefix for prefix in LAYERS if name == prefix or name.startswith(prefix + ".")]
    if not known:
        raise KeyError(f"{name}: not in a layer; put it into an existing folder, or name it in LAYERS")
    return LAYERS[max(known, key=len)]


def imports_of_unknown_layers(tree: SourceTree) -> Iterator[str]:
    for module in tree.modules().values():
        for item in tree.imports(module.name):
            if not item.internal or (item.target == "" and item.name == "__version__"):
                continue
            if module.name == "":
                if item.when is not When.TYPING:
                    yield f"{module.where}:{item.line} loads {item.target}: the public face is lazy"
            elif item.target == "":
                yield f"{module.where}:{item.line} imports {item.name} from the public face"
            elif item.target in tree.modules() and layer(tree, item.target) not in KNOWS[layer(tree, module.name)]:
                yield f"{module.where}:{item.line} imports {item.target}, of a layer that it does not know"


def imports_against_the_execution_order(tree: SourceTree) -> Iterator[str]:
    for module in tree.modules().values():
        own = _rank(module.name)
        for item in tree.imports(module.name):
            other = _rank(item.target)
            if item.internal and own is not None and other is not None and other > own:
                yield f"{module.where}:{item.line} imports {item.target}"


def modules_without_a_rank(tree: SourceTree) -> Iterator[str]:
    for name, module in tree.modules().items():
        part = _execution_part(name)
        if part is not None and part not in EXECUTION_ORDER:
            yield f"{module.where}: {part} has no rank in EXECUTION_ORDER"


def ranks_without_a_module(tree: SourceTree) -> Iterator[str]:
    yield from set(EXECUTION_ORDER) - {_execution_part(name) for name in tree.modules()}


def _execution_part(name: str) -> str | None:
    parts = name.split(".")
    return parts[1] if parts[0] == "model_executor" and len(parts) > 1 else None


def _rank(name: str) -> int | None:
    part = _execution_part(name)
    return EXECUTION_ORDER.index(part) if part in EXECUTION_ORDER else None


# Tests mirror the package


def tests_of_no_folder(tree: SourceTree) -> Iterator[str]:
    """Test files under tests/FOLDER where the package has no FOLDER."""
    for path in _tests(tree):
        folder = path.relative_to(tree.root / "tests").parent
        if folder.parts and folder.parts[0] not in WITHOUT_A_FOLDER and not (tree.root / folder).is_dir():
            yield str(path.relative_to(tree.root))


def modules_without_a_test(tree: SourceTree) -> Iterator[str]:
    """Modules of MIRRORED that the test file of their name does not import, nor stand in TESTED_IN rightly."""
    for name, module in tree.modules().items():
        folder, _, stem = name.rpartition(".")
        if folder not in MIRRORED:
            continue
        own = tree.root / "tests" / folder / f"test_{stem}.py"
        if name in TESTED_IN:
            listed = tree.root / "tests" / TESTED_IN[name]
            if own.exists():
                yield f"{name}: {own.relative_to(tree.root)} exists, so TESTED_IN need not name it"
            elif not listed.exists():
                yield f"{name}: TESTED_IN names {TESTED_IN[name]}, which does not exist"
            elif not any(name in tree.loaded_with(found) for found in _imported_by_test(tree, listed)):
                yield f"{name}: {TESTED_IN[name]} does not reach it"
        elif not own.exists():
            yield f"{module.where}: no {own.relative_to(tree.root)}"
        elif name not in _imported_by_test(tree, own):
            yield f"{module.where}: {own.relative_to(tree.root)} does not import it"


def listed_without_a_module(tree: SourceTree) -> Iterator[str]:
    yield from TESTED_IN.keys() - tree.modules().keys()


def _tests(tree: SourceTree) -> Iterator[Path]:
    yield from (path for path in tree.files() if path.match("test_*.py") and path.is_relative_to(tree.root / "tests"))


def _imported_by_test(tree: SourceTree, path: Path) -> set[str]:
    """Modules of the package that a test imports, itself or through the helpers in tests/*.py that it imports."""
    found: set[str] = set()
    seen: set[Path] = set()
    todo = [path]
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in names:
                helper = tree.root / "tests" / f"{name}.py"
                if helper.exists():
                    todo.append(helper)
                elif name.removeprefix("tercet.") in tree.modules():
                    found.add(name.removeprefix("tercet."))
    return found
