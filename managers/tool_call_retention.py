"""Retention after a tool call: the client runs the tool and comes back with its result, so the prefix will be needed.

Only the process that reads the text of an answer knows that it is a tool call. By then the scheduler has forgotten the
request, so the message names the tokens of its prefix.
"""

from __future__ import annotations

from ..srt.io_struct import RetainReq, pack_ids
from ..srt.server_args import ServerArgs
from .generation import Generation


def tool_call_retention_s(server_args: ServerArgs) -> float:
    """Seconds for which the prefix of a tool call is retained; 0: not at all."""
    if not server_args.honours_retention:
        return 0.0
    return min(server_args.tool_call_retention_s, server_args.max_retention_s)


def retention_of(generation: Generation, server_args: ServerArgs) -> RetainReq | None:
    """What retains the prefix of a sample that ended in a tool call. None: its request has said for how long itself."""
    seconds, request = tool_call_retention_s(server_args), generation.request
    if not seconds or request is None or request.options.retention_seconds is not None:
        return None
    token_ids = request.input_ids + pack_ids(generation.output_ids)
    return RetainReq(generation.key, token_ids, request.options, seconds)
