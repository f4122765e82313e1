"""For each honoured field of each endpoint: a value, and what it must change (see `field_walks`)."""

from __future__ import annotations

from typing import Any

from fake_adapters import PIRATE
from fake_http import FIM
from field_walks import BOS, STREAM, Effect, Seen, Table, logprobs, sampling


def message_of(seen: Seen) -> dict[str, Any]:
    message: dict[str, Any] = seen.answer["choices"][0]["message"]
    return message


def calls_of(seen: Seen) -> list[Any]:
    return message_of(seen).get("tool_calls", [])


def thoughts_of(seen: Seen) -> list[str]:
    return [one["choices"][0]["delta"].get("reasoning_content", "") for one in seen.answer]


SAMPLING: Table = {
    "temperature": sampling("temperature", 0.5),
    "top_p": sampling("top_p", 0.25),
    "top_k": sampling("top_k", 7),
    "min_p": sampling("min_p", 0.125),
    "frequency_penalty": sampling("frequency_penalty", 0.5),
    "presence_penalty": sampling("presence_penalty", 0.5),
    "repetition_penalty": sampling("repetition_penalty", 1.5),
    "stop": sampling("stop", ["x"]),
    "stop_regex": sampling("stop_regex", ["x+y"]),
    "stop_token_ids": sampling("stop_token_ids", [3]),
    "logit_bias": sampling("logit_bias", {"1": 1.0}),
    "ignore_eos": sampling("ignore_eos", True),
    "no_stop_trim": sampling("no_stop_trim", True),
    "skip_special_tokens": sampling("skip_special_tokens", False),
    "n": (3, lambda seen: len(seen.reqs) == 3),
}
GRAMMARS: Table = {
    "json_schema": sampling("json_schema", '{"type":"integer"}'),
    "regex": sampling("regex", "a+"),
    "ebnf": sampling("ebnf", 'root ::= "a"'),
    "structural_tag": sampling("structural_tag", '{"format":{"type":"any_text"}}'),
}
NATIVE_SAMPLING: Table = {
    **SAMPLING,
    **GRAMMARS,
    "max_new_tokens": sampling("max_new_tokens", 5),
    "min_new_tokens": sampling("min_new_tokens", 1),
    "sampling_seed": sampling("sampling_seed", 4711),
}
USER: tuple[Any, Effect] = ("me", lambda seen: seen.req.options.tenant == "me")
LIMITS: Table = {
    "priority": (7, lambda seen: seen.req.options.priority == 7),
    "waiting_timeout": (2.5, lambda seen: seen.req.options.waiting_timeout == 2.5),
    "running_timeout": (2.5, lambda seen: seen.req.options.running_timeout == 2.5),
}
RETENTION: Table = {
    "session_id": ("agent 7", lambda seen: seen.req.options.session_id == "agent 7"),
    "retention_seconds": (45.5, lambda seen: seen.req.options.retention_seconds == 45.5),
}
LORA: tuple[Any, Effect] = ("pirate", lambda seen: seen.req.options.adapter == PIRATE.ref)
SALT: tuple[Any, Effect] = ("pepper", lambda seen: seen.req.options.cache_salt == "pepper")


GENERATE: Table = {
    "text": ("b", lambda seen: seen.prompt == "b"),
    "input_ids": ([99, 100], lambda seen: seen.prompt == "cd"),
    "stream": STREAM,
    "rid": ("me", lambda seen: seen.answer["meta_info"]["id"] == "me"),
    **LIMITS,
    **RETENTION,
    "cache_salt": SALT,
    "lora_path": LORA,
    "extra_key": SALT,
    "tenant": USER,
    "return_logprob": (True, lambda seen: len(seen.answer["meta_info"]["output_token_logprobs"]) == 2),
    "logprob_start_len": logprobs("logprob_start_len", 0, "input_token_logprobs"),
    "top_logprobs_num": logprobs("top_logprobs_num", 2, "output_top_logprobs"),
    "return_hidden_states": (True, lambda seen: len(seen.answer["meta_info"]["hidden_states"]) == 2),
    "token_ids_logprob": logprobs("token_ids_logprob", [7], "output_token_ids_logprobs"),
    "return_text_in_logprobs": (True, lambda seen: seen.answer["meta_info"]["output_token_logprobs"][0][2] == "\x00"),
    "model": ("gpt", lambda seen: seen.answer["error"]["code"] == "model_not_found"),
}
LOGPROB_MODIFIERS = ("logprob_start_len", "top_logprobs_num", "token_ids_logprob", "return_text_in_logprobs")
"""Fields of GENERATE that have no effect without `return_logprob`."""
OPENAI: Table = {
    **SAMPLING,
    **GRAMMARS,
    "seed": sampling("sampling_seed", 4711),
    "min_tokens": sampling("min_new_tokens", 1),
    "max_tokens": sampling("max_new_tokens", 5),
    "model": GENERATE["model"],
    "stream": STREAM,
    "rid": ("me", lambda seen: seen.answer["id"] == "me"),
    **LIMITS,
    **RETENTION,
    "cache_salt": SALT,
    "lora_path": LORA,
    "user": USER,
    "return_cached_tokens_details": (
        True,
        lambda seen: (
            seen.answer["sglext"]["cached_tokens_details"]
            == {"device": seen.answer["usage"]["prompt_tokens"] - 1, "host": 0}
        ),
    ),
}
COMPLETIONS: Table = {
    **OPENAI,
    "return_token_ids": (True, lambda seen: seen.answer["choices"][0]["prompt_token_ids"] == [BOS, 97]),
    "prompt": ("b", lambda seen: seen.prompt == "b"),
    "add_special_tokens": (False, lambda seen: seen.ids == [97]),
    "logprobs": (2, lambda seen: len(seen.answer["choices"][0]["logprobs"]["top_logprobs"][1]) == 2),
    "echo": (True, lambda seen: seen.answer["choices"][0]["text"].startswith("a")),
    "suffix": ("b", lambda seen: seen.ids == [BOS, FIM["pre"], 97, FIM["suf"], 98, FIM["mid"]]),
}
CHAT: Table = {
    **OPENAI,
    "return_token_ids": (True, lambda seen: seen.answer["prompt_token_ids"][:6] == [*b"<user>"]),
    "max_completion_tokens": sampling("max_new_tokens", 5),
    "add_generation_prompt": (False, lambda seen: seen.prompt == "<user>a\n"),
    "continue_final_message": (True, lambda seen: seen.prompt == "<user>a"),
    "chat_template_kwargs": ({"mood": "!"}, lambda seen: seen.prompt.endswith("<assistant>!")),
    "logprobs": (True, lambda seen: len(seen.answer["choices"][0]["logprobs"]["content"]) == 2),
    "top_logprobs": (3, lambda seen: len(seen.answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 3),
    "tools": ([{"type": "function", "function": {"name": "f"}}], lambda seen: len(calls_of(seen)) == 2),
    "tool_choice": ("none", lambda seen: "<tools>" not in seen.prompt and calls_of(seen) == []),
    "parallel_tool_calls": (False, lambda seen: len(calls_of(seen)) == 1),
    "separate_reasoning": (False, lambda seen: message_of(seen)["content"].startswith("hm</think>")),
    "stream_reasoning": (False, lambda seen: [text for text in thoughts_of(seen) if text] == ["hm"]),
    "thinking_token_budget": (5, lambda seen: seen.answer["error"]["param"] == "thinking_token_budget"),
    "prediction": (
        {"type": "content", "content": "a"},
        lambda seen: seen.answer["error"]["param"] == "prediction",
    ),  # the server makes no drafts
    "reasoning_effort": ("high", lambda seen: seen.prompt.endswith("<assistant>(high)")),
    "documents": ([{"title": "A", "text": "b"}], lambda seen: seen.prompt.startswith("<documents>A: b;<user>")),
}
MESSAGE: Table = {
    "role": ("system", lambda seen: seen.prompt.startswith("<system>")),
    "content": ("b", lambda seen: seen.prompt.startswith("<user>b")),
    "name": ("me", lambda seen: "(me)" in seen.prompt),
    "reasoning_content": ("why", lambda seen: "[why]" in seen.prompt),
    "tool_calls": ([{"function": {"name": "f"}}], lambda seen: "<tool_call> f{}" in seen.prompt),
    "tool_call_id": ("c1", lambda seen: "<tool>a(c1)" in seen.prompt),
}
TOOL: Table = {
    "type": ("custom", lambda seen: "'custom'" in seen.answer["error"]["message"]),
    "function": ({"name": "g"}, lambda seen: seen.prompt.startswith('<tools>{"name": "g"}')),
}
FUNCTION: Table = {
    "name": ("g", lambda seen: seen.prompt.startswith('<tools>{"name": "g"}')),
    "description": ("D", lambda seen: '"description": "D"' in seen.prompt),
    "parameters": ({"type": "object"}, lambda seen: '"parameters": {"type": "object"}' in seen.prompt),
    "strict": (True, lambda seen: seen.req.options.sampling.structural_tag is not None),
}
GIVEN_CALL: Table = {
    "function": ({"name": "g"}, lambda seen: "<tool_call> g{}" in seen.prompt),
    "id": ("c1", lambda seen: "<tool_call>c1 f{}" in seen.prompt),
    "type": ("custom", lambda seen: seen.answer["error"]["param"] == "messages[0].tool_calls[0].type"),
}
GIVEN_FUNCTION: Table = {
    "name": ("g", lambda seen: "<tool_call> g{}" in seen.prompt),
    "arguments": ('{"a": 1}', lambda seen: '<tool_call> f{"a": 1}' in seen.prompt),
}
TEXT_PART: Table = {
    "type": ("image_url", lambda seen: seen.answer["error"]["code"] == "unsupported_field"),
    "text": ("b", lambda seen: seen.prompt.startswith("<user>b")),
}
STREAM_OPTIONS: Table = {
    "include_usage": (True, lambda seen: seen.answer[-1]["usage"]["completion_tokens"] == 2),
    "continuous_usage_stats": (True, lambda seen: seen.answer[0]["usage"]["completion_tokens"] == 1),
}
SCORE: Table = {
    "query": ("c", lambda seen: seen.prompt == "cb"),
    "items": (["c"], lambda seen: seen.prompt == "ac"),
    "label_token_ids": ([7], lambda seen: seen.req.options.logprobs.token_ids_logprob == [7]),
    "apply_softmax": (True, lambda seen: sum(seen.answer["scores"][0]) == 1.0),
    "item_first": (True, lambda seen: seen.prompt == "ba"),
    "model": OPENAI["model"],
    "cache_salt": SALT,
    "lora_path": LORA,
    "user": USER,
    **LIMITS,
}
EMBEDDINGS: Table = {
    "input": ([98], lambda seen: seen.ids == [98]),
    "model": OPENAI["model"],
    "encoding_format": ("base64", lambda seen: isinstance(seen.answer["data"][0]["embedding"], str)),
    "dimensions": (3, lambda seen: len(seen.answer["data"][0]["embedding"]) == 3),
    "pooling": ("mean", lambda seen: seen.req.options.pooling == "mean"),
    "add_special_tokens": COMPLETIONS["add_special_tokens"],
    "cache_salt": SALT,
    "lora_path": LORA,
    "user": USER,
    **LIMITS,
}
TOKENIZE: Table = {
    "model": OPENAI["model"],
    "prompt": ("b", lambda seen: seen.answer["tokens"] == [BOS, 98]),
    "add_special_tokens": (False, lambda seen: seen.answer["tokens"] == [97]),
    "return_token_strs": (True, lambda seen: seen.answer["token_strs"] == ["<bos>", "a"]),
}
TOKENIZE_CHAT: Table = {
    "add_generation_prompt": (False, lambda seen: bytes(seen.answer["tokens"]) == b"<user>a\n"),
    "continue_final_message": (True, lambda seen: bytes(seen.answer["tokens"]) == b"<user>a"),
    "chat_template_kwargs": ({"mood": "!"}, lambda seen: bytes(seen.answer["tokens"]).endswith(b"<assistant>!")),
    "tools": (
        [{"type": "function", "function": {"name": "f"}}],
        lambda seen: bytes(seen.answer["tokens"]).startswith(b"<tools>"),
    ),
}
DETOKENIZE: Table = {
    "model": OPENAI["model"],
    "tokens": ([98], lambda seen: seen.answer["text"] == "b"),
    "skip_special_tokens": (False, lambda seen: seen.answer["text"] == "a<eos>"),
}

HI = {"role": "user", "content": "a"}
ONE_TOOL = {"type": "function", "function": {"name": "f"}}
