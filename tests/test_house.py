"""The rules of the house that a machine can check. CONTRIBUTING.md says what each is for."""

from __future__ import annotations

import ast
import configparser
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import house_rules
import pytest
from source_tree import (
    HOUSE,
    NOT_PACKAGES,
    ROOT,
    Module,
    SourceTree,
    When,
    chain,
    files,
    imports,
    loaded_with,
    modules,
)

from tercet.srt import command_line

ROLES = {
    "tokenizer": r"managers\.tokenizer_manager",
    "scheduler": r"managers\.scheduler(_\w+)?",
    "detokenizer": r"managers\.detokenizer_manager",
}
NO_TORCH = [
    "managers.tokenizer_manager",
    "managers.detokenizer_manager",
    "srt.entrypoints.http_server",
]
TORCH_IN_MEMORY_LAYER = "mem_cache.token_to_kv_pool"
READS_ENVIRONMENT = "srt.env"
STARTS_PROCESSES = {
    "srt.entrypoints.processes",
    "srt.entrypoints.fork_server",
    "srt.entrypoints.child",
    "benchmarks.server_process",
}
"""The engine's own, of which a child may start itself again, and the servers that a benchmark compares."""
NOT_IN_WHEEL = "benchmarks.peers"
"""Measures other engines. Setup.cfg does not list it, so a wheel is without it."""
ASK_FOR_PEERS = {"benchmarks.compare", "benchmarks.bench_offline_throughput"}
"""Modules of the wheel that import it, inside a function, after they have asked whether it is here."""
MOST_LINES = 400
CPP_SUFFIXES = {".h", ".cpp"}

IMPORT_NAMES = {
    "pyyaml": "yaml",
    "pyzmq": "zmq",
    "opentelemetry-api": "opentelemetry",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
    "opentelemetry-sdk": "opentelemetry",
}

UNPICKLERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
UNPICKLING_METHODS = {"recv_pyobj", "send_pyobj", "recv_serialized"}
OPENS_URLS = {"srt.entrypoints.chat_partners"}
"""`tercet chat --base-url`, whose user names the server."""
URL_OPENERS = r"(urllib\.request|http\.client|requests|httpx|aiohttp|urllib3|huggingface_hub)\b"
PROCESS_STARTERS = re.compile(r"os\.(fork\w*|exec\w+|spawn\w+|posix_spawn\w*|popen|system)|.*create_subprocess_\w+")


@cache
def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def in_package(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def dotted(node: ast.AST) -> str:
    """ "torch.load" for that expression; "" for anything that is not a chain of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else f"().{node.attr}"
    return ""


def used_names(module: Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every name used and every `module.name` imported from outside."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Name | ast.Attribute):
            yield node.lineno, dotted(node)
    for item in imports(module.name):
        if not item.internal:
            yield item.line, f"{item.target}.{item.name}" if item.name else item.target


def test_the_packages_in_setup_cfg_are_the_folders_that_exist() -> None:
    listed = setup_cfg()["options"]["packages"].split()
    holding_code = {".".join(("tercet", *m.path.relative_to(ROOT).parts[:-1])) for m in modules().values()}
    with_init = {
        ".".join(("tercet", *path.relative_to(ROOT).parts[:-1]))
        for path in files()
        if path.name == "__init__.py" and path.relative_to(ROOT).parts[0] not in NOT_PACKAGES
    }
    assert listed == sorted(listed)
    assert {*listed, f"tercet.{NOT_IN_WHEEL}"} == holding_code == with_init
    assert f"tercet.{NOT_IN_WHEEL}" not in listed


def test_nothing_in_the_wheel_loads_what_is_not_in_it() -> None:
    wrong = [
        f"{module.where}:{item.line} {item.target}"
        for module in modules().values()
        if not in_package(module.name, NOT_IN_WHEEL)
        for item in imports(module.name)
        if item.internal and in_package(item.target, NOT_IN_WHEEL)
        if module.name not in ASK_FOR_PEERS or item.when is When.ALWAYS
    ]
    assert not wrong, "\n".join(wrong)


RULES = [
    house_rules.imports_of_unknown_layers,
    house_rules.imports_against_the_execution_order,
    house_rules.modules_without_a_rank,
    house_rules.ranks_without_a_module,
    house_rules.tests_of_no_folder,
    house_rules.modules_without_a_test,
    house_rules.listed_without_a_module,
]
"""tests/test_house_rules.py breaks each of them."""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_nothing_breaks(rule: Callable[[SourceTree], Iterator[str]]) -> None:
    broken = list(rule(HOUSE))
    assert not broken, "\n".join(broken)


def test_imports_inside_the_package_are_relative() -> None:
    own = {"tercet", *(name.split(".")[0] for name in modules() if name)}
    wrong = [
        f"{module.where}:{item.line} {item.target}"
        for module in modules().values()
        for item in imports(module.name)
        if not item.internal and item.target.split(".")[0] in own
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("role", ROLES)
def test_process_roles_never_import_one_another(role: str) -> None:
    others = {other: pattern for other, pattern in ROLES.items() if other != role}
    for name in modules():
        if not re.fullmatch(ROLES[role], name):
            continue
        reached = loaded_with(name, whens=frozenset(When))
        for target in reached:
            for other, pattern in others.items():
                assert not re.fullmatch(pattern, target), f"{role} knows {other}: {chain(reached, target)}"


@pytest.mark.parametrize("name", NO_TORCH)
def test_processes_without_a_model_load_no_torch(name: str) -> None:
    reached = loaded_with(name)
    for module in reached:
        for item in imports(module):
            if not item.internal and item.when is When.ALWAYS:
                outside = item.target.split(".")
                assert outside[0] not in {"torch", "triton"} and "torch" not in outside, chain(reached, module)
    code = f"import sys, tercet.{name}; sys.exit('torch is loaded' if 'torch' in sys.modules else 0)"
    ran = subprocess.run([sys.executable, "-c", code], timeout=120, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_the_lower_layers_know_no_torch() -> None:
    wrong = [
        f"{module.where}:{item.line} {item.target}"
        for module in modules().values()
        if module.name and house_rules.layer(HOUSE, module.name) <= 1 and module.name != TORCH_IN_MEMORY_LAYER
        for item in imports(module.name)
        if not item.internal and item.when is When.ALWAYS and item.target.split(".")[0] in {"torch", "transformers"}
    ]
    assert not wrong, "\n".join(wrong)


def test_the_scheduler_loads_only_what_every_model_needs() -> None:
    heavy = ["transformers", "triton", "gguf", "sympy", "torch._dynamo", "torch._inductor"]
    code = f"import sys, tercet.managers.scheduler_process; print([name for name in {heavy} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True, text=True)
    assert out.stdout.strip() == "[]"


def test_importing_tercet_loads_nothing_heavy() -> None:
    heavy = ["torch", "transformers", "numpy", "msgspec", "zmq", "asyncio"]
    code = f"import sys, tercet; tercet.__version__; print([name for name in {heavy} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert out.stdout.strip() == "[]"


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    extras = setup_cfg()["options.extras_require"]
    optional = extras["grammar"] + extras["tracing"]  # the extras that modules import by name
    requirements = (setup_cfg()["options"]["install_requires"] + optional).split("\n")
    names = [re.match(r"[\w.-]+", line).group() for line in requirements if line.strip()]  # type: ignore[union-attr]
    declared = {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in names}
    imported = {
        item.target.split(".")[0]: f"{module.where}:{item.line}"
        for module in modules().values()
        for item in imports(module.name)
        if not item.internal and item.target.split(".")[0] not in sys.stdlib_module_names
    }
    assert {name: where for name, where in imported.items() if name not in declared} == {}
    assert declared - set(imported) == set()


def test_constraints_are_exact_and_cover_what_is_declared() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins), "one NAME==VERSION a line"
    pinned = {re.sub(r"[-_.]+", "-", pin.split("==")[0]).lower() for pin in pins}
    extras = setup_cfg()["options.extras_require"]
    requirements = "\n".join([setup_cfg()["options"]["install_requires"], *extras.values()]).split("\n")
    declared = {re.split(r"[<>=!~; \[]", line.strip())[0].lower() for line in requirements if line.strip()}
    assert declared - pinned == {"triton"}, "see the head of constraints.txt"


def test_nothing_is_unpickled_and_nothing_prints() -> None:
    wrong = []
    for module in modules().values():
        for line, name in used_names(module):
            parts = name.split(".")
            if parts[0] in UNPICKLERS or name == "torch.load" or parts[-1] in UNPICKLING_METHODS or name == "print":
                wrong.append(f"{module.where}:{line} {name}")
    assert not wrong, "\n".join(wrong)


def test_no_module_trusts_remote_code_or_opens_urls() -> None:
    wrong = []
    for module in modules().values():
        if in_package(module.name, "benchmarks") or module.name in OPENS_URLS:
            continue
        for item in imports(module.name):
            if not item.internal and re.match(URL_OPENERS, f"{item.target}.{item.name}"):
                wrong.append(f"{module.where}:{item.line} {item.target}")
        for node in ast.walk(module.tree):
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code" and ast.unparse(node.value) != "False":
                wrong.append(f"{module.where}:{node.value.lineno} trust_remote_code")
    assert not wrong, "\n".join(wrong)


def test_one_file_reads_the_environment() -> None:
    wrong = [
        f"{module.where}:{line} {name}"
        for module in modules().values()
        if module.name != READS_ENVIRONMENT
        for line, name in used_names(module)
        if re.match(r"os\.(environb?|getenvb?|putenv|unsetenv)\b", name)
    ]
    assert not wrong, "\n".join(wrong)


def test_processes_are_started_in_their_own_files() -> None:
    wrong = []
    for module in modules().values():
        if module.name in STARTS_PROCESSES:
            continue
        for line, name in used_names(module):
            library = re.match(r"(multiprocessing(?!\.connection)|subprocess|pty)\b", name)
            if library or PROCESS_STARTERS.fullmatch(name) or name.endswith("ProcessPoolExecutor"):
                wrong.append(f"{module.where}:{line} {name}")
    assert not wrong, "\n".join(wrong)


def test_no_global_statement_and_no_drawer_of_odds_and_ends() -> None:
    for module in modules().values():
        assert module.path.stem not in {"utils", "util", "helpers", "misc"}, module.where
        for node in ast.walk(module.tree):
            assert not isinstance(node, ast.Global), f"{module.where}:{getattr(node, 'lineno', 0)} global"


def test_an_import_inside_a_function_says_why() -> None:
    wrong = []
    for module in modules().values():
        lines = module.lines
        for item in imports(module.name):
            if item.when is not When.CALLED:
                continue
            above = item.line - 2
            while re.match(r"\s*(from|import) ", lines[above]):  # one comment serves a block of imports
                above -= 1
            if "#" not in lines[item.line - 1] and not lines[above].lstrip().startswith("#"):
                wrong.append(f"{module.where}:{item.line} {item.target}")
    assert not wrong, "\n".join(wrong)


def test_a_file_is_one_idea() -> None:
    lines = {module.where: len(module.lines) for module in modules().values()}
    for path, text in text_files():
        if path.suffix in CPP_SUFFIXES or (path.suffix == ".py" and path.is_relative_to(ROOT / "tests")):
            lines[str(path.relative_to(ROOT))] = len(text.splitlines())
    for folder in ("csrc", "managers", "tests/srt/entrypoints"):
        assert any(name.startswith(f"{folder}/") for name in lines), f"no file of {folder} is counted"
    long = {name: count for name, count in lines.items() if count > MOST_LINES}
    assert not long, f"more than {MOST_LINES} lines: {long}"


def text_files() -> Iterator[tuple[Path, str]]:
    for path in files():
        try:
            yield path, path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture, say


def test_no_file_knows_the_machine_it_was_written_on() -> None:
    places = r"(?<![\w.:/-])/(?:work|root|home|Users|opt)/\w"
    names = ("pypi", "pythonhosted", "download.pytorch", "debian", "npmjs")
    hosts = "|".join(re.escape(name + ".org") for name in names)
    wrong = [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, found.start()) + 1} {found.group()}"
        for path, text in text_files()
        for found in re.finditer(f"{places}|{hosts}", text)
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_is_left_for_later() -> None:
    marks = re.compile(r"#.*\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" * 3, "HA" + "CK")) + r")\b")
    wrong = [str(path.relative_to(ROOT)) for path, text in text_files() if path.suffix == ".py" and marks.search(text)]
    assert not wrong, "\n".join(wrong)


def test_links_in_the_documents_lead_somewhere() -> None:
    pages = {path.resolve(): text for path, text in text_files() if path.suffix == ".md"}
    wrong = []
    for path, text in pages.items():
        for target, section in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?[^)]*\)", text):
            place = (path.parent / target).resolve() if target else path
            is_there = place.exists() and (not section or place not in pages or section in _sections(pages[place]))
            if "://" not in target and not is_there:
                wrong.append(f"{path.relative_to(ROOT)} -> {target}#{section}")
    assert not wrong, "\n".join(wrong)


def _sections(text: str) -> set[str]:
    """The names of a page's headings in links."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_tests_that_documents_name_exist() -> None:
    """The log may name tests of its time."""
    tests = {f"{path.relative_to(ROOT)}": text for path, text in text_files() if path.name.startswith("test_")}
    wrong = [
        f"{path.relative_to(ROOT)} -> {file}::{name}"
        for path, text in text_files()
        if path.suffix == ".md" and path.name != "log.md"
        for file, name in re.findall(r"([\w/]+\.py)::(\w+)", text)
        if not any(f"def {name}(" in source for test, source in tests.items() if f"/{test}".endswith(f"/{file}"))
    ]
    assert not wrong, "\n".join(wrong)


def test_the_documented_settings_are_the_settings() -> None:
    text = (ROOT / "docs/server_args.md").read_text(encoding="utf-8")
    assert text.endswith("\n" + command_line.docs_tables()), "out of date: scripts/check --fix rewrites it"


def test_tests_of_csrc_cpu_say_that_they_need_a_build() -> None:
    """By these words, scripts and the tests of slower builds find them."""
    tests = sorted((ROOT / "tests/model_executor").rglob("test_*.py"))
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in tests}
    wrong = [
        name
        for name, text in texts.items()
        if re.search(r"\bops\.tercet_cpu\b|\bimport cpu_layers\b", text) and "no build of csrc/cpu" not in text
    ]
    assert not wrong, "\n".join(wrong)
