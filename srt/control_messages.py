"""The messages that change the engine as a whole while it runs, and the replies to them."""

from __future__ import annotations

from .adapters import AdapterReply, LoadAdapterReq, UnloadAdapterReq
from .pause_messages import ContinueReq, PauseReply, PauseReq
from .profile_messages import ProfileReply, StartProfileReq, StopProfileReq
from .weight_messages import UpdateWeightsReply, UpdateWeightsReq

ControlQuestion = (
    PauseReq | ContinueReq | StartProfileReq | StopProfileReq | UpdateWeightsReq | LoadAdapterReq | UnloadAdapterReq
)
ControlReply = PauseReply | ProfileReply | UpdateWeightsReply | AdapterReply
