"""The settings that models with recurrent layers change."""

from __future__ import annotations

import dataclasses

from ..server_args import ServerArgs
from .model_config import ModelConfig


def with_model_limits(args: ServerArgs, config: ModelConfig) -> ServerArgs:
    """The same settings, without a prefix cache if the model has recurrent layers: a state serves one request.

    Raises ValueError for a setting that needs a prefix cache.
    """
    if config.delta_net is None or args.disable_radix_cache:
        return args
    try:
        return dataclasses.replace(args, disable_radix_cache=True)
    except ValueError as error:
        raise ValueError(
            f"the model has recurrent layers, so its requests share no prefixes, as with --disable-radix-cache: {error}"
        ) from None
