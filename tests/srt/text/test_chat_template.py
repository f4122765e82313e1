from __future__ import annotations

import copy

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tercet.srt.errors import InvalidRequest
from tercet.srt.text import chat_template
from tercet.srt.text.chat_template import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content | trim + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"""

STRICT = """{{ bos_token }}{% for m in messages %}
    {% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('roles must take turns, got ' + m['role']) }}
    {% endif %}
    {% if m['role'] == 'user' %}
[INST] {{ m['content'] }} [/INST]
    {%- else %}
 {{ m['content'] }}{{ eos_token }}
    {%- endif %}
{% endfor %}"""

TOOLS = """{%- set ns = namespace(last=-1) %}
{%- if tools %}{% for tool in tools %}{{ tool | tojson }}
{{ tool | tojson(indent=2) }}{% endfor %}{% endif %}
{%- for message in messages %}
    {%- set ns.last = loop.index0 %}
    {%- if message.tool_calls is defined %}
        {%- for call in message.tool_calls %}<call>{{ call.function.name }}({{ call.function.arguments | tojson }})
        {%- endfor %}
    {%- elif message.content is not none %}<{{ message.role }}>{{ message.content }}{% endif %}
    {%- if message.reasoning_content is defined %}<think>{{ message.reasoning_content }}</think>{% endif %}
{%- endfor %}{{ ns.last }}
{%- if enable_thinking is defined and not enable_thinking %}<no-think>{% endif %}
{%- if documents %}{{ documents | length }}{% endif %}"""

LOOPS = """{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{% if m.role == 'system' %}{% continue %}
{% endif %}{% generation %}{{ m.content | upper }}{% endgeneration %}{% endfor %}
{{ strftime_now('%Y') }}{{ undefined }}"""

CHATS = [
    [{"role": "user", "content": "Hi <b>&amp;</b>"}],
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "  Hello  "}],
    [{"role": "system", "content": "S"}, {"role": "user", "content": "a\n"}, {"role": "assistant", "content": "B "}],
    [
        {"role": "user", "content": "wéather?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": "é", "y": [1, None]}}}],
        },
    ],
]
ONE_TOOL = [{"type": "function", "function": {"name": "f", "description": "<ü>", "parameters": {"type": "object"}}}]


def expected(template, chat, **variables):
    chat = [{key: value for key, value in message.items() if value is not None} for message in chat]
    return render_jinja_template([chat], chat_template=template, **{**SPECIAL, **variables})[0][0]


@pytest.mark.parametrize(
    ("template", "chat", "tools"),
    [
        *((template, chat, None) for template in (CHATML, STRICT, TOOLS, LOOPS) for chat in CHATS[:3]),
        # Templates that know no tools are in test_tool_messages.py.
        *((TOOLS, chat, tools) for chat in CHATS for tools in (None, ONE_TOOL)),
    ],
)
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}, {"documents": [{"title": "t", "text": "x"}]}])
def test_renders_as_transformers_does(template, chat, tools, prompt, kwargs):
    before = copy.deepcopy(chat)
    try:
        wanted = expected(template, chat, tools=tools, add_generation_prompt=prompt, **kwargs)
    except Exception as error:
        wanted = error
    compiled = ChatTemplate(template, SPECIAL)
    if isinstance(wanted, str):
        assert compiled.render(chat, tools=tools, add_generation_prompt=prompt, **kwargs) == wanted
    else:
        with pytest.raises(InvalidRequest) as caught:
            compiled.render(chat, tools=tools, add_generation_prompt=prompt, **kwargs)
        assert str(wanted) in str(caught.value)
    assert chat == before, "the caller's messages are not touched"


@pytest.mark.parametrize("name", ["reasoning", "thinking"])
def test_reasoning_has_several_names(name):
    """transformers knows them since a release later than the oldest that we run on."""
    template = ChatTemplate(TOOLS, SPECIAL)
    wanted = template.render([{"role": "assistant", "content": "x", "reasoning_content": "hm"}])
    assert "<think>hm</think>" in wanted
    assert template.render([{"role": "assistant", "content": "x", name: "hm"}]) == wanted


@pytest.mark.parametrize("template", [CHATML, STRICT])
@pytest.mark.parametrize("chat", CHATS[:3])
def test_goes_on_with_the_last_message_as_transformers_does(template, chat):
    try:
        wanted = expected(template, chat, continue_final_message=True, add_generation_prompt=False)
    except Exception:
        with pytest.raises(InvalidRequest):
            ChatTemplate(template, SPECIAL).render(chat, add_generation_prompt=False, continue_final_message=True)
        return
    got = ChatTemplate(template, SPECIAL).render(chat, add_generation_prompt=False, continue_final_message=True)
    assert got == wanted
    assert got.rstrip().endswith(chat[-1]["content"].strip())


def test_refuses_by_name():
    template = ChatTemplate(CHATML, SPECIAL)
    user = {"role": "user", "content": "Hi"}

    def refused(match, messages=(user,), **kwargs):
        with pytest.raises(InvalidRequest, match=match):
            template.render(messages, **kwargs)

    refused("at least one message", messages=())
    refused("'image_url'", messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
    refused("'str'", messages=[{"role": "user", "content": ["Hi"]}])
    refused("a string in 'text'", messages=[{"role": "user", "content": [{"type": "text"}]}])
    refused("got int", messages=[{"role": "user", "content": 5}])
    refused("must be objects", messages=["Hi"])
    refused("exclude each other", continue_final_message=True, add_generation_prompt=True)
    refused("with content", [{"role": "assistant"}], continue_final_message=True, add_generation_prompt=False)


@pytest.mark.parametrize("template", [CHATML, TOOLS])
@pytest.mark.parametrize("content", [None, "", "Let me see"])
def test_a_message_with_calls_cannot_be_continued(template: str, content: str | None) -> None:
    chat = [CHATS[0][0], {**CHATS[3][1], "content": content}]
    with pytest.raises(InvalidRequest, match="tool_calls") as caught:
        ChatTemplate(template, SPECIAL).render(chat, add_generation_prompt=False, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def test_a_template_that_drops_the_last_message_cannot_be_continued():
    template = ChatTemplate("{{ messages[0].content }}", SPECIAL)
    with pytest.raises(InvalidRequest, match="omits the last message"):
        template.render(CHATS[1], add_generation_prompt=False, continue_final_message=True)


def test_text_parts_become_text():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    template = ChatTemplate(CHATML, SPECIAL)
    assert template.render([{"role": "user", "content": parts}]) == template.render(
        [{"role": "user", "content": "one two"}]
    )


def test_the_templates_own_words_reach_the_client():
    with pytest.raises(InvalidRequest, match="roles must take turns, got system"):
        ChatTemplate(STRICT, SPECIAL).render([{"role": "system", "content": "x"}])
    # Errors that are no complaint of the template.
    for source in ("{{ messages[0].content + 5 }}", "{{ 1 // 0 }}", "{{ range(10000000) }}", "{{ nothing.at.all }}"):
        with pytest.raises(InvalidRequest):
            ChatTemplate(source, SPECIAL).render(CHATS[0])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ ''.format.__self__.__class__ }}",
        "{{ cycler.__init__.__globals__.os }}",
    ],
)
def test_templates_run_in_a_sandbox(source):
    try:
        rendered = ChatTemplate(source, SPECIAL).render(CHATS[0])
    except InvalidRequest:
        return
    assert rendered == "", "what is forbidden is undefined"


def test_a_broken_template_is_a_value_error():
    with pytest.raises(ValueError, match="line 2"):
        ChatTemplate("a\n{% endfor %}", SPECIAL)


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 1000 + "1" + ")" * 1000 + " }}",
        "{% if x %}" * 1000 + "{% endif %}" * 1000,
        "{% if x %}" * 120 + "{% endif %}" * 120,  # Jinja makes Python code with too many levels of indentation
        "{% for x in messages %}" * 25 + "{% endfor %}" * 25,  # and with too many nested loops
    ],
)
def test_a_template_that_is_nested_too_deeply_is_a_value_error(source):
    with pytest.raises(ValueError, match="nested too deeply"):
        ChatTemplate(source, SPECIAL)


def test_an_error_of_python_is_not_shown_to_the_client():
    """Its text could have an address, or another value of the process."""
    template = ChatTemplate("{{ messages | map('upper') + 1 }}", SPECIAL)
    with pytest.raises(InvalidRequest) as caught:
        template.render([{"role": "user", "content": "a"}])
    assert str(caught.value) == "the chat template cannot render these messages (TypeError)"


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% macro twice(n) %}{% if n %}{{ twice(n - 1) }}{{ twice(n - 1) }}{% endif %}{% endmacro %}{{ twice(60) }}",
        "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}"
        "{% macro deep(n) %}{% if n %}{% call m() %}{{ deep(n - 1) }}{% endcall %}{% endif %}{% endmacro %}"
        "{{ deep(60) }}",
        "{% for m in [1, 1] recursive %}{% if loop.depth < 60 %}{{ loop([1, 1]) }}{% endif %}{% endfor %}",
    ],
    ids=["loops", "macro", "call", "recursive loop"],
)
def test_a_template_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setattr(chat_template, "MAX_STEPS", 5_000)
    template = ChatTemplate("{{ messages[0].content }}{% if messages[0].content == 'x' %}" + source + "{% endif %}", {})
    with pytest.raises(InvalidRequest, match="takes more than 5,000 steps") as raised:
        template.render([{"role": "user", "content": "x"}])
    assert raised.value.param == "messages"
    assert template.render([{"role": "user", "content": "y"}]) == "y"


def test_each_rendering_has_all_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_STEPS", 5_000)
    template = ChatTemplate("{% for a in range(messages[0].content | int) %}.{% endfor %}", {})
    for _ in range(2):
        assert template.render([{"role": "user", "content": "5000"}]) == "." * 5000
    with pytest.raises(InvalidRequest, match="steps"):
        template.render([{"role": "user", "content": "5001"}])
