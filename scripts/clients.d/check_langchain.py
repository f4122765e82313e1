# requires: langchain-openai==1.7.3 langchain-tests==1.1.9 pytest==9.2.0
"""langchain-tests' standard tests of a chat model, through langchain-openai."""

from __future__ import annotations

import os
from typing import Any

from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestTercet(ChatModelIntegrationTests):
    """A small model calls a tool only if it must, so the tests may ask for `tool_choice: required`."""

    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "base_url": os.environ["TERCET_URL"] + "/v1",
            "api_key": "-",
            "model": os.environ["TERCET_MODEL"],
            "temperature": 0,
            "max_tokens": 256,
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
