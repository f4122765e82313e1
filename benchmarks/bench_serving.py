"""Measure a running server over HTTP.

It works with Tercet, SGLang, vLLM and any server of the OpenAI API. It loads no torch and uses little processor time,
so that it hardly slows a server on the same cores. docs/benchmarks.md describes the measurements.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from tqdm import tqdm

from ..srt.machine.standard_files import open_standard_files
from ..srt.text.tokenizer import Tokenizer, load_tokenizer
from . import plots, workloads
from .arrivals import arrival_times, trace_times
from .backends import BACKENDS, Dialect, Output, RequestSettings, error_text
from .http_client import HttpClient, HttpError, api_key_header
from .metrics import Measured, measure
from .provenance import command_line, provenance
from .recorded_workloads import custom, first_questions, mooncake, sharegpt
from .report import json_line, show, table
from .serving_args import DATASET_FLAGS, parse
from .text_files import read_text
from .traffic import drive, duration_s
from .workloads import PromptMaker, Request, Stream, random_stream

_PROGRAM = "tercet bench serving"
_POLL_S = 0.5


class BenchError(Exception):
    """The benchmark cannot run. The message says why."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark and returns the exit code.

    0: every request succeeded. 1: a request failed, or nothing could be measured or written. 130: Ctrl-C. Then the
    result covers the requests that had ended, and no file is written.
    """
    open_standard_files()
    options = parse(_PROGRAM, argv)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            run = runner.run(_run(options))
        result = {**_settings(options, run), **run.measured.figures, "client_cpu_seconds": run.client_cpu_s}
        result.update(server_info=run.server_info, **provenance(_command(options, argv)))
        is_shown = show(table(result) + _terminal_plots(options, run.measured) + json_line(result))
        if run.interrupted:
            return 130
        # Files come last: if one cannot be written, the result has been shown.
        if options.output_file is not None:
            details = _details(run) if options.output_details else {}
            with options.output_file.open("a", encoding="utf-8") as file:
                file.write(json_line({**result, **details}))
        if options.plot and run.measured.figures["completed"]:
            title = options.tag or f"{options.backend}, {options.dataset_name}, {len(run.requests)} requests"
            plots.save_png(Path(options.plot), title, run.measured.latencies, run.measured.timeline)
    except (BenchError, HttpError, ValueError, OSError) as error:
        sys.stderr.write(f"{_PROGRAM}: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0 if is_shown and not result["failed"] else 1


def make_requests(options: argparse.Namespace, maker: PromptMaker) -> list[Request]:
    """The requests of the dataset that the options name. Raises ValueError."""
    count, path, seed = options.num_prompts, options.dataset_path, options.seed
    sizes = options.random_input_len, options.random_output_len, options.random_range_ratio
    match options.dataset_name:
        case "random-ids":
            return workloads.random_ids(maker, count, *sizes, seed)
        case "random":
            return workloads.random_text(maker, count, *sizes, seed, _source_text(path))
        case "sharegpt":
            return sharegpt(maker, path, count, options.sharegpt_output_len, options.sharegpt_context_len, seed)
        case "custom":
            return custom(maker, path, count, options.sharegpt_output_len, options.sharegpt_context_len, seed)
        case "mooncake":
            return mooncake(maker, path, count, seed)
    return workloads.shared_prefix(
        maker,
        num_groups=options.gsp_num_groups,
        prompts_per_group=options.gsp_prompts_per_group,
        system_prompt_len=options.gsp_system_prompt_len,
        question_len=options.gsp_question_len,
        output_len=options.gsp_output_len,
        ordered=options.gsp_ordered,
        seed=seed,
    )[:count]


@dataclass(frozen=True)
class _Server:
    """Information that the server gives about itself."""

    model: str | None
    """The model name for requests."""
    paths: list[str]
    """Possible paths of its tokenizer, the best one first."""
    info: dict[str, Any] | None
    """Its settings; None for a server without /server_info."""


@dataclass(frozen=True)
class _Run:
    settings: RequestSettings
    num_prompts: int
    requests: list[Request]
    """Those that have ended."""
    outputs: list[Output]
    interrupted: bool
    """Whether Ctrl-C has ended the run before all requests had ended."""
    measured: Measured
    client_cpu_s: float
    """Processor seconds that this client used during the run."""
    server_info: dict[str, Any] | None


async def _run(options: argparse.Namespace) -> _Run:
    backend = BACKENDS[options.backend]
    client = HttpClient(options.base_url, _headers(options), options.request_timeout_sec)
    try:
        await _wait_until_ready(client, options.ready_check_timeout_sec)
        server = await _ask_server(client)
        tokenizer = _tokenizer(options, server)
        maker = PromptMaker(tokenizer, as_ids=options.tokenize_prompt)
        requests = make_requests(options, maker)
        if len(requests) < options.num_prompts:
            sys.stderr.write(f"{options.dataset_path} has only {len(requests)} usable requests, and all are sent\n")
        settings = RequestSettings(
            model=options.served_model_name or options.model or server.model or "default",
            stream=not options.disable_stream,
            ignore_eos=not options.disable_ignore_eos,
            temperature=options.temperature,
            extra=options.extra_request_body or {},
            incremental=bool((server.info or {}).get("incremental_streaming_output")),
        )
        dialect = backend.dialect(settings)
        if not dialect.ids_allowed and any(not isinstance(request.prompt, str) for request in requests):
            raise BenchError(f"the dataset has prompts of token ids, but --backend {options.backend} accepts text only")
        times = _times(options, requests)
        bodies = [dialect.encode(request) for request in requests]

        await _warm_up(client, dialect, options, maker, requests)
        if options.flush_cache:
            answer = await client.request("POST", backend.flush_path)
            if answer.status != 200:
                raise BenchError(f"--flush-cache: {answer.status} {answer.reason}: {error_text(answer.body)}")
        ended: dict[int, Output] = {}
        interrupted = False
        with tqdm(total=len(bodies), disable=options.disable_tqdm, unit="req", dynamic_ncols=True) as bar:

            def on_finished(index: int, output: Output) -> None:
                ended[index] = output
                bar.update()

            cpu_s = time.process_time()
            try:
                await drive(client, dialect, bodies, times, options.max_concurrency, on_finished)
            except asyncio.CancelledError:  # Ctrl-C
                if not ended:
                    raise
                interrupted = True
            cpu_s = time.process_time() - cpu_s
    finally:
        await client.close()
    measured_requests = [requests[index] for index in sorted(ended)]
    outputs = [ended[index] for index in sorted(ended)]
    measured = measure(measured_requests, outputs, duration_s(outputs), tokenizer, options.goodput)
    return _Run(settings, len(requests), measured_requests, outputs, interrupted, measured, cpu_s, server.info)


async def _wait_until_ready(client: HttpClient, timeout_s: float) -> None:
    """Waits until the server answers. Raises BenchError after the timeout."""
    deadline = time.monotonic() + timeout_s
    if timeout_s == 0:
        return
    told = False
    while True:
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                answer = await client.request("GET", "/v1/models")
            if answer.status < 500:
                return
            why = f"{answer.status} {answer.reason}: {error_text(answer.body)}"
        except HttpError as error:
            why = str(error)
        except TimeoutError:
            why = "no answer"
        if time.monotonic() + _POLL_S > deadline:
            raise BenchError(f"the server was not ready within {timeout_s:g} s: {why}")
        if not told:
            sys.stderr.write(f"waiting up to {timeout_s:g} s for {client.base_url}\n")
            told = True
        await asyncio.sleep(_POLL_S)


async def _ask_server(client: HttpClient) -> _Server:
    models = await _get_json(client, "/v1/models")
    cards = (models or {}).get("data")
    card = cards[0] if isinstance(cards, list) and cards and isinstance(cards[0], dict) else {}
    model = await _get_json(client, "/model_info") or {}
    info = await _get_json(client, "/server_info")
    if info is not None:
        info.pop("api_key", None)  # results may be published
    paths = [model.get("tokenizer_path"), model.get("model_path"), card.get("root"), card.get("id")]
    return _Server(card.get("id"), [path for path in paths if isinstance(path, str) and path], info)


async def _get_json(client: HttpClient, path: str) -> dict[str, Any] | None:
    """The JSON object at this path; None if the server has none."""
    answer = await client.request("GET", path)
    try:
        content = json.loads(answer.body) if answer.status == 200 else None
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _tokenizer(options: argparse.Namespace, server: _Server) -> Tokenizer:
    """The tokenizer at --tokenizer.

    Without that flag: the first of --model and the server's paths that exists on this machine, else simply the first.
    Raises BenchError.
    """
    named = options.tokenizer or options.model
    places = ([named] if named else []) + ([] if options.tokenizer else server.paths)
    if not places:
        raise BenchError("the server does not name its model; give --tokenizer")
    place = next((place for place in places if Path(place).exists()), places[0])
    try:
        return load_tokenizer(place)
    except ValueError as error:
        why = error if Path(place).exists() else f"no tokenizer is called {place!r}, and there is no such path here"
        raise BenchError(f"{why}; --tokenizer names a directory or a GGUF file") from error


async def _warm_up(
    client: HttpClient, dialect: Dialect[Any], options: argparse.Namespace, maker: PromptMaker, like: Sequence[Request]
) -> None:
    """Sends the warm-up requests. Raises BenchError when one fails, because the measured requests would fail, too."""
    requests = workloads.warmups(maker, like, options.warmup_requests, options.seed)
    bodies = [dialect.encode(request) for request in requests]
    outputs, _ = await drive(client, dialect, bodies, np.zeros(len(bodies)), options.max_concurrency)
    for output in outputs:
        if output.error is not None:
            raise BenchError(f"the warm-up failed: {output.error}")


def _times(options: argparse.Namespace, requests: Sequence[Request]) -> np.ndarray:
    if options.use_trace_timestamps:
        return trace_times([request.timestamp_s for request in requests], options.mooncake_slowdown_factor)
    rng = random_stream(options.seed, Stream.ARRIVALS)
    return arrival_times(len(requests), options.request_rate, options.burstiness or 1.0, rng)


def _headers(options: argparse.Namespace) -> dict[str, str]:
    return {**api_key_header(), **dict(options.header or [])}


def _command(options: argparse.Namespace, argv: Sequence[str] | None) -> list[str]:
    """The command line without the values of headers, which may be keys. Results may be published."""
    words = command_line(_PROGRAM, argv)
    for name, value in options.header or []:
        words = [word.replace(f"{name}={value}", f"{name}=...") for word in words]
    return words


def _source_text(path: Path | None) -> str:
    if path is not None and path.suffix == ".json":
        return first_questions(path)
    return read_text(path or workloads.BUNDLED_TEXT)


def _settings(options: argparse.Namespace, run: _Run) -> dict[str, Any]:
    """The settings of the run for the result. Settings without effect in this run are left out."""
    settings = run.settings
    flags = [name for name, (datasets, _) in DATASET_FLAGS.items() if options.dataset_name in datasets]
    mattered = {name: getattr(options, name) for name in flags}
    path = mattered.pop("dataset_path", None)
    return {
        "tag": options.tag,
        "backend": options.backend,
        "base_url": options.base_url,
        "model": settings.model,
        "dataset_name": options.dataset_name,
        "dataset_path": None if path is None else str(path),
        "num_prompts": run.num_prompts,
        "interrupted": run.interrupted,
        "tokenize_prompt": options.tokenize_prompt,
        "request_rate": "trace" if options.use_trace_timestamps else options.request_rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        "warmup_requests": options.warmup_requests,
        "flush_cache": options.flush_cache,
        "stream": settings.stream,
        "ignore_eos": settings.ignore_eos,
        "temperature": settings.temperature,
        "extra_request_body": dict(settings.extra),
        "seed": options.seed,
        **mattered,
    }


def _details(run: _Run) -> dict[str, Any]:
    """Lists with one entry for each request, in the order of sending."""
    zero = min(output.start_s for output in run.outputs)
    return {
        "input_lens": [request.prompt_len for request in run.requests],
        "output_lens": run.measured.output_lens,
        "start_times": [output.start_s - zero for output in run.outputs],
        "latencies": [output.latency_s for output in run.outputs],
        "ttfts": [output.arrivals[0] - output.start_s if output.arrivals else None for output in run.outputs],
        "itls": run.measured.itls,
        "generated_texts": [output.text for output in run.outputs],
        "errors": [output.error or "" for output in run.outputs],
    }


def _terminal_plots(options: argparse.Namespace, measured: Measured) -> str:
    if not measured.figures["completed"]:
        return ""
    width = min(100, shutil.get_terminal_size().columns)
    drawn = ""
    if options.plot is not None:
        drawn += "\n" + plots.terminal_cdfs(measured.latencies, width)
    if options.plot is not None or options.plot_throughput:
        drawn += "\n" + plots.terminal_timeline(measured.timeline, width)
    return drawn


if __name__ == "__main__":
    sys.exit(main())
