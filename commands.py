"""The command line: `tercet serve`, `tercet chat` and `tercet bench`.

`python -m tercet.launch_server` is the same as `tercet serve`.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
from collections.abc import Sequence
from typing import NoReturn

from . import __version__
from .srt import command_line as settings
from .srt.machine.standard_files import open_standard_files
from .srt.model_files.default_model import DEFAULT_MODEL_NAME, INSTALL_COMMAND
from .srt.server_args import ServerArgs
from .srt.settings.checks import check_tokenizer_settings

_SERVE = "Serve a model over HTTP: OpenAI's endpoints and SGLang's /generate."
_SERVE_USAGE = "%(prog)s [options] [MODEL]"
"""Without the names of more than a hundred flags, which would hide an error below them."""
FLAGS_OF_VLLM = {
    "--max-model-len": "--context-length",
    "--gpu-memory-utilization": "--mem-fraction-static",
    "--max-num-seqs": "--max-running-requests",
    "--max-num-batched-tokens": "--max-prefill-tokens",
}
"""Flags of vLLM -> those that do the same here."""
_CHAT = "Chat with a running server, or with a model in this process."
_BENCH = "Run a benchmark of a running server or of the engine."
_BENCHMARKS = {
    "serving": ("bench_serving", "throughput, latencies and goodput of a running server"),
    "offline": ("bench_offline_throughput", "tokens per second of the engine, for many requests at once"),
    "one-batch": ("bench_one_batch", "prefill latency and decode steps of one batch"),
    "prefix": ("bench_prefix_cache", "hit rate and speed-up of the prefix cache"),
    "scheduler": ("bench_scheduler", "simulation of a server, or replay of a recorded schedule"),
    "scheduler-cpu": ("bench_scheduler_cpu", "processor time of the scheduler for a step"),
    "simulation": ("bench_simulation", "errors of the simulation, compared with a real server"),
    "grammars": ("bench_grammars", "cost of structured output, and its correctness"),
    "kernels": ("bench_kernels", "correctness and speed of each GPU kernel"),
    "linears": ("bench_linears", "matrix products of a decode step on a CPU"),
    "quantization": ("bench_quantization", "change of a model's predictions with 8-bit and 4-bit weights"),
    "speculation": ("bench_speculation", "speculative decoding: tokens per second with and without drafts"),
    "startup": ("bench_startup", "time of a server's start, and memory of its processes"),
    "compare": ("compare", "Tercet and other servers side by side"),
}
"""Name of each benchmark on the command line -> its module in benchmarks/, and what it measures."""
_MODEL = (
    f"Hugging Face directory or GGUF file; without one: {DEFAULT_MODEL_NAME}, if it is installed ({INSTALL_COMMAND})"
)


def main(argv: Sequence[str] | None = None) -> int:
    """The `tercet` command; returns the exit code. Raises KeyboardInterrupt."""
    open_standard_files()
    parser = argparse.ArgumentParser(prog="tercet", description="Tercet: an LLM serving engine.")
    parser.add_argument("--version", action="version", version=f"tercet {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    serve = commands.add_parser("serve", usage=_SERVE_USAGE, help=_SERVE, description=_SERVE)
    _add_serve_arguments(serve)
    chat = commands.add_parser("chat", help=_CHAT, description=_CHAT)
    _add_chat_arguments(chat)
    bench = commands.add_parser(
        "bench",
        help=_BENCH,
        description=_BENCH,
        epilog="\n".join(["benchmarks:", *(f"  {name:<14} {text}" for name, (_, text) in _BENCHMARKS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench.add_argument("benchmark", metavar="BENCHMARK", choices=_BENCHMARKS, help="name of a benchmark (below)")
    flags = bench.add_argument(
        "arguments", metavar="FLAGS", nargs=argparse.REMAINDER, help="flags of the benchmark; its --help lists them"
    )
    flags.required = False  # Python 3.11 would name it beside a missing BENCHMARK
    namespace, unknown = parser.parse_known_args(argv)
    if unknown:
        _refuse(unknown, {"serve": serve, "chat": chat, "bench": bench}[namespace.command])
    if namespace.command == "bench":
        return _bench(namespace.benchmark, namespace.arguments)
    return _chat(namespace) if namespace.command == "chat" else _serve(serve, namespace)


def launch_server() -> int:
    """`python -m tercet.launch_server`; returns the exit code. Raises KeyboardInterrupt."""
    parser = argparse.ArgumentParser("python -m tercet.launch_server", usage=_SERVE_USAGE, description=_SERVE)
    _add_serve_arguments(parser)
    namespace, unknown = parser.parse_known_args()
    if unknown:
        _refuse(unknown, parser)
    return _serve(parser, namespace)


def _refuse(unknown: Sequence[str], parser: argparse.ArgumentParser) -> NoReturn:
    """Exits with an error about the first of these arguments, which names similar flags."""
    flag = unknown[0].partition("=")[0]
    if not flag.startswith("-"):
        parser.error(f"unexpected argument {flag!r}")
    known = [name for action in parser._actions for name in action.option_strings]
    near = [FLAGS_OF_VLLM[flag]] if FLAGS_OF_VLLM.get(flag) in known else difflib.get_close_matches(flag, known)
    hint = f"did you mean {' or '.join(near)}?" if near else f"{parser.prog} --help lists all"
    parser.error(f"unknown flag {flag}; {hint}")


def _add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", help=_MODEL)
    settings.add_arguments(parser)


def _add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    of_server = "with --base-url: the name of a model or LoRA adapter of the server"
    parser.add_argument("model", metavar="MODEL", nargs="?", help=f"{_MODEL}; {of_server}")
    parser.add_argument(
        "--base-url", metavar="URL", help="running server; default: TERCET_BASE_URL, else http://127.0.0.1:30000"
    )
    parser.add_argument("--api-key", metavar="KEY", help="API key of the server; default: TERCET_API_KEY")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument("--temperature", metavar="FLOAT", type=float, help="sampling temperature; default: the model's")
    parser.add_argument(
        "--max-tokens",
        metavar="INT",
        type=int,
        help="maximum tokens of an answer; default: up to the end of the context",
    )


def _serve(parser: argparse.ArgumentParser, namespace: argparse.Namespace) -> int:
    try:
        server_args = server_args_of(namespace)
    except ValueError as error:
        parser.error(str(error))
    # Imported here: `tercet --help` needs no server.
    from .srt.entrypoints.server import serve

    return serve(server_args)


def server_args_of(namespace: argparse.Namespace) -> ServerArgs:
    """Settings from a parsed command line.

    The model is the positional argument, --model-path, the model in --config, or the default model. Raises ValueError.
    """
    named = getattr(namespace, "model_path", None)
    if namespace.model is not None:
        if named is not None and named != namespace.model:
            raise ValueError(f"two different models are given: {namespace.model} and --model-path {named}")
        namespace.model_path = namespace.model
    server_args = settings.from_namespace(namespace)
    check_tokenizer_settings(server_args)
    return server_args


def _chat(namespace: argparse.Namespace) -> int:
    # Imported here: `tercet serve` does not chat.
    from .srt.entrypoints.chat_cli import chat

    return chat(
        model=namespace.model,
        base_url=namespace.base_url,
        api_key=namespace.api_key,
        system=namespace.system,
        temperature=namespace.temperature,
        max_tokens=namespace.max_tokens,
    )


def _bench(name: str, arguments: Sequence[str]) -> int:
    # Imported by name: benchmarks are the top layer, and no module may import them.
    module = importlib.import_module(f".benchmarks.{_BENCHMARKS[name][0]}", __package__)
    exit_code: int = module.main(arguments)
    return exit_code
