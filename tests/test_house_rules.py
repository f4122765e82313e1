"""Each rule of the house fails where it is broken: the rules of house_rules.py on small made-up packages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import house_rules
import pytest
from house_rules import EXECUTION_ORDER
from source_tree import SourceTree

Rule = Callable[[SourceTree], Iterator[str]]

SOUND = {
    "__init__.py": "",
    "launch_server.py": "from .srt.entrypoints.http_server import app\n",
    "srt/errors.py": "",
    "srt/entrypoints/http_server.py": "from ...managers.req import Req\nfrom ..errors import Refused\n",
    "mem_cache/pool.py": "from ..srt.errors import Refused\n",
    "managers/req.py": "from ..mem_cache.pool import Pool\nfrom ..model_executor.step import Step\n",
    "model_executor/step.py": "from ..mem_cache.pool import Pool\n",
    "model_executor/layers/linear.py": "from ..step import Step\n",
    "model_executor/models/decoder.py": "from ..layers.linear import Linear\n",
    "benchmarks/bench.py": "from ..model_executor.models.decoder import Decoder\n",
    "tests/makers.py": "from tercet.mem_cache.pool import Pool\n",
    "tests/managers/test_req.py": "from tercet.managers.req import Req\n",
    "tests/mem_cache/test_pool.py": "from makers import make\n",
    "tests/e2e/test_all.py": "",
    "tests/test_house.py": "",
}


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SourceTree]:
    monkeypatch.setattr(house_rules, "TESTED_IN", {})

    def make(changed: dict[str, str]) -> SourceTree:
        for name, text in {**SOUND, **changed}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return SourceTree(tmp_path)

    return make


@pytest.mark.parametrize(
    ("rule", "name", "text", "told"),
    [
        # A layer imports a model.
        (
            house_rules.imports_against_the_execution_order,
            "model_executor/layers/linear.py",
            "from ..models.decoder import Decoder\n",
            "model_executor/layers/linear.py:1 imports model_executor.models.decoder",
        ),
        # Inside a function, too.
        (
            house_rules.imports_against_the_execution_order,
            "model_executor/step.py",
            "def make():\n    from .layers import linear\n",
            "model_executor/step.py:2 imports model_executor.layers.linear",
        ),
        # An entry point imports the execution layer.
        (
            house_rules.imports_of_unknown_layers,
            "srt/entrypoints/http_server.py",
            "from ..errors import Refused\nfrom ...model_executor.step import Step\n",
            "srt/entrypoints/http_server.py:2 imports model_executor.step, of a layer that it does not know",
        ),
        (
            house_rules.imports_of_unknown_layers,
            "launch_server.py",
            "from .mem_cache.pool import Pool\n",
            "launch_server.py:1 imports mem_cache.pool, of a layer that it does not know",
        ),
        (
            house_rules.imports_of_unknown_layers,
            "mem_cache/pool.py",
            "from ..managers.req import Req\n",
            "mem_cache/pool.py:1 imports managers.req, of a layer that it does not know",
        ),
        (
            house_rules.imports_of_unknown_layers,
            "srt/errors.py",
            "from ..mem_cache import pool\n",
            "srt/errors.py:1 imports mem_cache.pool, of a layer that it does not know",
        ),
        (
            house_rules.imports_of_unknown_layers,
            "managers/req.py",
            "from ..benchmarks.bench import run\n",
            "managers/req.py:1 imports benchmarks.bench, of a layer that it does not know",
        ),
        # The public face loads a module, and a module asks it for something.
        (
            house_rules.imports_of_unknown_layers,
            "__init__.py",
            "from .srt.errors import Refused\n",
            "__init__.py:1 loads srt.errors: the public face is lazy",
        ),
        (
            house_rules.imports_of_unknown_layers,
            "managers/req.py",
            "from .. import Engine\n",
            "managers/req.py:1 imports Engine from the public face",
        ),
        # A module at the root of model_executor, and a folder there, without a rank.
        (
            house_rules.modules_without_a_rank,
            "model_executor/lora.py",
            "",
            "model_executor/lora.py: lora has no rank in EXECUTION_ORDER",
        ),
        (
            house_rules.modules_without_a_rank,
            "model_executor/experts/router.py",
            "",
            "model_executor/experts/router.py: experts has no rank in EXECUTION_ORDER",
        ),
        # A test in a folder that the package has not, a module without a test, a test that tests another module.
        (house_rules.tests_of_no_folder, "tests/scheduling/test_req.py", "", "tests/scheduling/test_req.py"),
        (
            house_rules.modules_without_a_test,
            "managers/queue.py",
            "",
            "managers/queue.py: no tests/managers/test_queue.py",
        ),
        (
            house_rules.modules_without_a_test,
            "tests/managers/test_req.py",
            "from tercet.mem_cache.pool import Pool\n",
            "managers/req.py: tests/managers/test_req.py does not import it",
        ),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_what_breaks_a_rule_is_told(
    make: Callable[..., SourceTree], rule: Rule, name: str, text: str, told: str
) -> None:
    assert list(rule(make({name: text}))) == [told]


def test_a_sound_package_breaks_none(make: Callable[..., SourceTree]) -> None:
    tree = make({f"model_executor/{name}/__init__.py": "" for name in EXECUTION_ORDER if name != "step"})
    for rule in vars(house_rules).values():
        if callable(rule) and getattr(rule, "__annotations__", {}).get("return") == "Iterator[str]":
            assert list(rule(tree)) == [], rule.__name__


def test_a_rank_without_a_module_is_told(make: Callable[..., SourceTree]) -> None:
    assert set(house_rules.ranks_without_a_module(make({}))) == {*EXECUTION_ORDER} - {"step", "layers", "models"}


def test_an_import_for_types_alone_counts_too(make: Callable[..., SourceTree]) -> None:
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..model_executor.step import Step\n"
    assert len(list(house_rules.imports_of_unknown_layers(make({"mem_cache/pool.py": text})))) == 1
    lazy = text.replace("..model_executor", ".model_executor")
    assert len(list(house_rules.imports_of_unknown_layers(make({"mem_cache/pool.py": "", "__init__.py": lazy})))) == 0


def test_a_new_folder_has_to_be_given_a_layer(make: Callable[..., SourceTree]) -> None:
    tree = make({"plugins/one.py": "from ..srt.errors import Refused\n"})
    with pytest.raises(KeyError, match=r"plugins\.one: not in a layer"):
        list(house_rules.imports_of_unknown_layers(tree))


@pytest.mark.parametrize(
    ("listed", "changed", "told"),
    [
        ("managers/test_req.py", {}, []),
        ("managers/test_gone.py", {}, ["managers.queue: TESTED_IN names managers/test_gone.py, which does not exist"]),
        ("mem_cache/test_pool.py", {}, ["managers.queue: mem_cache/test_pool.py does not reach it"]),
        (
            "managers/test_req.py",
            {"tests/managers/test_queue.py": ""},
            ["managers.queue: tests/managers/test_queue.py exists, so TESTED_IN need not name it"],
        ),
    ],
)
def test_a_module_may_be_listed_with_the_file_that_tests_it(
    make: Callable[..., SourceTree],
    monkeypatch: pytest.MonkeyPatch,
    listed: str,
    changed: dict[str, str],
    told: list[str],
) -> None:
    monkeypatch.setattr(house_rules, "TESTED_IN", {"managers.queue": listed})
    tree = make({"managers/queue.py": "", "managers/req.py": "from .queue import Queue\n", **changed})
    assert list(house_rules.modules_without_a_test(tree)) == told
    assert list(house_rules.listed_without_a_module(tree)) == []


def test_a_listed_module_that_is_gone_is_told(make: Callable[..., SourceTree], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(house_rules, "TESTED_IN", {"managers.gone": "managers/test_req.py"})
    assert list(house_rules.listed_without_a_module(make({}))) == ["managers.gone"]
