# requires: inspect_ai==0.3.285 openai==3.54.0 pytest==9.2.0
"""Inspect, a framework of evaluations: options, schemas, tools, whole evaluations, streams, and /v1/responses."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pydantic
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, Model, ModelOutput, ResponseSchema, get_model
from inspect_ai.scorer import choice, includes
from inspect_ai.solver import basic_agent, multiple_choice
from inspect_ai.tool import Tool, tool
from inspect_ai.util import json_schema

URL, NAME = os.environ["TERCET_URL"] + "/v1", os.environ["TERCET_MODEL"]


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int


@tool
def add() -> Tool:
    async def execute(x: int, y: int) -> int:
        """Add two numbers.

        Args:
            x: First number.
            y: Second number.
        """
        return x + y

    return execute


def model(config: GenerateConfig | None = None, **settings: Any) -> Model:
    config = GenerateConfig(temperature=0, max_tokens=60).merge(config or GenerateConfig())
    name = f"openai-api/tercet/{NAME}"
    return get_model(name, base_url=URL, api_key="-", config=config, memoize=False, **settings)


def answer(of: Model, text: str, **options: Any) -> ModelOutput:
    return asyncio.run(of.generate(text, **options))


def test_options() -> None:
    config = GenerateConfig(
        num_choices=2, seed=3, top_p=0.9, frequency_penalty=0.1, presence_penalty=0.1, stop_seqs=["zzz"],
        logprobs=True, top_logprobs=2, logit_bias={5: -10},
    )  # fmt: skip
    output = answer(model(config), "Name three colours.")
    assert len(output.choices) == 2 and output.usage is not None and output.usage.output_tokens > 0
    assert output.choices[0].logprobs is not None and output.choices[0].logprobs.content


def test_object_by_schema() -> None:
    schema = ResponseSchema(name="person", json_schema=json_schema(Person), strict=True)
    output = answer(model(GenerateConfig(response_schema=schema)), "Ada is 36 years old. Who is it?")
    assert Person.model_validate_json(output.completion)


def test_tool_call() -> None:
    output = answer(model(), "Add 1 and 2.", tools=[add()], tool_choice="any")
    assert output.message.tool_calls and output.message.tool_calls[0].function == "add"


def test_evaluation_by_choice(tmp_path: Path) -> None:
    samples = [Sample("Which is a colour?", choices=["red", "dog"], target="A")]
    task = Task(dataset=samples, solver=multiple_choice(), scorer=choice())
    (log,) = eval(task, model=model(), log_dir=str(tmp_path), display="none")
    assert log.status == "success", log.error


def test_evaluation_of_an_agent(tmp_path: Path) -> None:
    solver = basic_agent(tools=[add()], message_limit=6)
    task = Task(dataset=[Sample("Add 1 and 2.", target="3")], solver=solver, scorer=includes())
    (log,) = eval(task, model=model(), log_dir=str(tmp_path), display="none")
    assert log.status == "success", log.error


def test_stream() -> None:
    assert answer(model(stream=True), "Name three colours.").completion


def test_responses() -> None:
    assert answer(model(responses_api=True), "Name three colours.").completion
