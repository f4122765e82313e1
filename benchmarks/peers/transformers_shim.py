"""Runs `transformers serve` for a benchmark, with the same arguments, in a Python that has transformers.

The /v1/completions of `transformers serve` accepts only text and refuses `ignore_eos`. This shim makes it accept token
ids and honour `ignore_eos`. Everything else, from batching to streaming, is unchanged.
"""

from __future__ import annotations

from typing import Any

from transformers.cli.serving import completion
from transformers.cli.transformers import app

_NO_TOKEN = -1
"""As end token, this id lets no sequence end early."""


class Completions(completion.CompletionHandler):
    """Handler of /v1/completions for a streamed request whose `prompt` is a list of token ids."""

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        model_id, model, processor = self._resolve_model(body)
        manager = self.generation_state.get_manager(model_id, use_cb=True)
        config = self._build_generation_config(body, model.generation_config, use_cb=True)
        if body.get("ignore_eos"):
            config.eos_token_id = _NO_TOKEN
        manager.init_cb(model, config)
        inputs = {"input_ids": body["prompt"]}
        return self._streaming(request_id, model, processor, model_id, inputs, config, manager)


if __name__ == "__main__":
    module: Any = completion
    module.CompletionHandler = Completions  # `serve` uses the class in this module
    app()
