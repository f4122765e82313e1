# requires: langchain-openai==1.7.3 langchain-tests==1.1.9 pytest==9.2.0
"""langchain-tests' standard tests of a chat model, through langchain-openai."""

from __future__ import annotations

import os
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestTercet(ChatModelIntegrationTests):
    """A small model calls a tool only if it must, so the tests may ask for `tool_choice: required`."""

    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        """Greedy, with penalties, because a small model otherwise repeats a word until the limit of tokens."""
        return {
            "base_url": os.environ["TERCET_URL"] + "/v1",
            "api_key": "-",
            "model": os.environ["TERCET_MODEL"],
            "temperature": 0,
            "frequency_penalty": 0.5,
            "extra_body": {"repetition_penalty": 1.05},
            "max_tokens": 512,
            "stream_usage": True,
        }

    @property
    def supports_image_inputs(self) -> bool:
        return False

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def has_tool_choice(self) -> bool:
        return True

    @pytest.mark.parametrize("model", [{}, {"output_version": "v1"}], indirect=True)
    @pytest.mark.xfail(reason="test_agent_loop offers a tool without requiring it; 135M parameters never call one")
    def test_agent_loop(self, model: BaseChatModel) -> None:
        super().test_agent_loop(model)

    @pytest.mark.xfail(
        reason="test_unicode_tool_call_integration: the model replaces the Japanese name in the call by English words"
    )
    def test_unicode_tool_call_integration(self, model: BaseChatModel) -> None:  # type: ignore[override]
        super().test_unicode_tool_call_integration(model)
