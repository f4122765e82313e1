"""`transformers serve` for a benchmark: run by the Python that has transformers, with the same arguments.

Its /v1/completions takes text alone and refuses `ignore_eos`. Here it takes token ids and honours `ignore_eos`; all the
rest, from batching to streaming, is its own.
"""

from __future__ import annotations

from typing import Any

from transformers.cli.serving import completion
from transformers.cli.transformers import app

_NO_TOKEN = -1
"""As the end of a sequence: none ends early."""


class Completions(completion.CompletionHandler):
    """/v1/completions, streamed: `prompt` is a list of token ids."""

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
    module.CompletionHandler = Completions  # `serve` takes it from there
    app()
