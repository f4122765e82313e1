"""Errors in settings that come from a --config file or from the arguments of an Engine."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tercet.srt.command_line import add_arguments, from_namespace
from tercet.srt.engine_settings import engine_settings
from tercet.srt.server_args import ServerArgs


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"port": "abc"}, "--port must be int, got 'abc'"),
        ({"port": 70000}, "--port must be in [0, 65535], got 70000"),
        ({"dtype": "float64"}, "--dtype must be auto, bfloat16, float16 or float32, got 'float64'"),
        ({"max_itl_ms": "fast"}, "--max-itl-ms must be float, auto or none, got 'fast'"),
        ({"enable_metrics": "yes"}, "--enable-metrics must be true or false, got 'yes'"),
        ({"context_length": "long"}, "--context-length must be int or null, got 'long'"),
        ({"max_total_tokens": 1}, "--max-total-tokens must be at least 2, got 1"),
        (
            {"max_total_tokens": 31, "page_size": 16},
            "--max-total-tokens must be at least 32 with --page-size 16, got 31",
        ),
        ({"random_seed": 2**63}, "--random-seed must be in [-2**63, 2**63), got 9223372036854775808"),
        ({"stream_interval": 10**30}, "--stream-interval must be in [-2**63, 2**63), got 1000000"),
        ({"weight_version": "a\nb"}, "--weight-version must have 1 to 128 printable characters, got 'a\\nb'"),
        ({"weight_version": ""}, "--weight-version must have 1 to 128 printable characters, got ''"),
        ({"weight_version": "a\udcff"}, "--weight-version must be valid UTF-8 without NUL characters"),
        ({"api_key": ["a", "b\udcff"]}, "--api-key must be valid UTF-8 without NUL characters"),
        ({"record_schedule": "a\0b"}, "--record-schedule must be valid UTF-8 without NUL characters"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm must be NGRAM or null, got 'EAGLE'"),
        (
            {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 16},
            "--speculative-num-draft-tokens must be in [1, 15], got 16",
        ),
        (
            {"speculative_num_draft_tokens": 4},
            "--speculative-num-draft-tokens needs --speculative-algorithm NGRAM",
        ),
        ({"lora_paths": "a=b"}, "--lora-paths must be list of str or null, got 'a=b'"),
        ({"lora_paths": [1]}, "--lora-paths must be list of str or null, got [1]"),
        ({"lora_paths": ["a=1", "a=2"]}, "--lora-paths names 'a' twice"),
        ({"lora_paths": ["A=1"]}, "--lora-paths: 'A' is a name of the model; an adapter needs another one"),
        ({"lora_paths": ["a=1", "b=2"], "max_loras": 1}, "at least 2 for the adapters of --lora-paths, got 1"),
        ({"max_loras": 2}, "--max-loras needs --enable-lora or --lora-paths"),
        ({"max_lora_rank": 2}, "--max-lora-rank needs --enable-lora or --lora-paths"),
        ({"lora_dir": "x"}, "--lora-dir needs --enable-lora or --lora-paths"),
        ({"enable_lora": True, "lora_dir": ""}, "--lora-dir must not be empty"),
        ({"enable_lora": True, "max_loras": 0}, "--max-loras must be at least 1, got 0"),
        ({"enable_lora": True, "max_lora_rank": 0}, "--max-lora-rank must be at least 1, got 0"),
        ({"enable_lora": True, "max_lora_rank": 4097}, "--max-lora-rank must be at most 4096, got 4097"),
        ({"host": "[::1]"}, "--host must be an address without brackets, such as ::1, got '[::1]'"),
        ({"prot": 30000}, "unknown setting prot; did you mean port?"),
        ({"zzz": 1}, "unknown setting zzz; docs/server_args.md lists all"),
        ({"kv_events_config": '{"publisher": "kafka"}'}, '"publisher" is "zmq" or "null"'),
        ({"kv_events_config": "{x"}, "--kv-events-config: must be JSON, got '{x'"),
    ],
)
def test_an_error_names_the_setting_the_value_and_what_is_allowed(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        ServerArgs.from_dict({"model_path": "A", **values})
    assert message in str(caught.value)


def test_an_error_shows_no_key() -> None:
    with pytest.raises(ValueError, match="--api-key must be") as caught:
        ServerArgs.from_dict({"model_path": "A", "api_key": ["secret", 3]})
    assert "secret" not in str(caught.value)


def test_an_engine_without_a_tokenizer_has_no_settings_of_one() -> None:
    with pytest.raises(ValueError, match="--tokenizer-path has no effect with --skip-tokenizer-init"):
        engine_settings("A", None, {"skip_tokenizer_init": True, "tokenizer_path": "B"}, refused={})


def test_paths_of_an_engine_may_be_path_objects() -> None:
    made = engine_settings(Path("A"), None, {"tokenizer_path": Path("B/C"), "page_size": 16}, refused={})
    assert (made.model_path, made.tokenizer_path, made.page_size) == ("A", "B/C", 16)


def test_adapters_of_the_start_turn_lora_on() -> None:
    assert ServerArgs(model_path="A", lora_paths=["a=1"]).enable_lora
    for paths in ([], None):
        assert not ServerArgs(model_path="A", lora_paths=paths).enable_lora


def test_a_flag_may_name_several_adapters() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = ["--lora-paths", "a=1", "b=2", "--lora-paths", "c=3", "--max-loaded-loras", "5", "--model-path", "A"]
    args = from_namespace(parser.parse_args(given))
    assert args.adapter_paths == {"a": "1", "b": "2", "c": "3"} and args.max_loras == 5
