"""KV events: what the tiers of the KV cache store and drop, as routers read it (vLLM's and SGLang's wire format).

A message has three frames: topic, sequence number (8 bytes, big-endian), and a batch in msgpack. A batch is an array
`[time, events, rank]`, and each event is a map with its `type`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

MEDIUM_DEVICE = "GPU"
"""The readers' name for the memory of the model's device, also if it is a CPU."""
MEDIUM_HOST = "CPU_PINNED"
"""The lower tier in host memory. SGLang's router reads no other name for it."""
MEDIUM_DISK = "DISK"
"""The lower tier in files."""
_MAX_MESSAGES = 2**31 - 1
"""A socket can keep no more for a reader. A replay may have room for twice the batches of `buffer_steps`."""
_ExtraKeys = list[list[str] | None]


class BlockStored(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Successive blocks of a prefix are in a medium."""

    block_hashes: list[int]
    parent_block_hash: int | None
    """The hash of the block before the first one; None: the first one begins a prompt."""
    token_ids: list[int]
    """Of all blocks, `block_size` for each."""
    block_size: int
    lora_id: int | None = None
    """The number of the LoRA adapter that computed them. A number never stands for another adapter."""
    medium: str = MEDIUM_DEVICE
    lora_name: str | None = None
    extra_keys: _ExtraKeys | UnsetType = UNSET
    """One entry for each block, if they depend on more than their tokens: the name of the adapter, and for a block that
    begins a prompt the cache salt. Null: neither."""
    cache_salt: str | UnsetType = UNSET
    session_id: str | UnsetType = UNSET
    """The session of the request that has stored them, if it has one. Others may use them, too."""


class BlockRemoved(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Blocks are no longer in a medium. On the device, those that follow them in a prompt are gone, too, or will be
    named next."""

    block_hashes: list[int]
    medium: str = MEDIUM_DEVICE


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True, gc=False):
    """All media are empty. The contents of files are published again."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """The events of one turn of the scheduler."""

    ts: float
    """Unix time in seconds."""
    events: list[KVEvent]
    data_parallel_rank: int | None = 0


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The JSON of --kv-events-config, with the names and defaults of vLLM and SGLang."""

    enable_kv_cache_events: bool | None = None
    """None: yes, if `publisher` is zmq."""
    publisher: Literal["zmq", "null"] | None = None
    """None: zmq, if `enable_kv_cache_events` is true."""
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: Annotated[int, Meta(ge=1, le=_MAX_MESSAGES // 2)] = 10_000
    """Number of batches that can be replayed."""
    hwm: Annotated[int, Meta(ge=1, le=_MAX_MESSAGES)] = 100_000
    """Messages that wait for a slow reader. It misses further ones, which the sequence numbers show."""
    topic: str = ""

    @property
    def is_on(self) -> bool:
        if self.publisher is None:
            return bool(self.enable_kv_cache_events)
        return self.publisher == "zmq" and self.enable_kv_cache_events is not False

    def described(self, block_size: int) -> dict[str, Any]:
        """The description in /server_info."""
        host, port = _host_and_port(self.endpoint)
        described: dict[str, Any] = {
            "publisher": "zmq",
            "endpoint_host": host,
            "endpoint_port_base": port,
            "topic": self.topic,
            "block_size": block_size,
            "dp_size": 1,
        }
        if self.replay_endpoint is not None:
            described["replay_endpoint_port_base"] = _host_and_port(self.replay_endpoint)[1]
        return described


def read_config(text: str | None) -> KVEventsConfig | None:
    """The config in the value of --kv-events-config. None: nothing is published. Raises ValueError."""
    if text is None:
        return None
    try:
        config = msgspec.json.decode(text, type=KVEventsConfig)
    except msgspec.ValidationError as error:
        keys = ", ".join(KVEventsConfig.__struct_fields__)
        raise ValueError(f'--kv-events-config: {error}; keys: {keys}; "publisher" is "zmq" or "null"') from None
    except msgspec.DecodeError as error:
        raise ValueError(f"--kv-events-config: must be JSON, got {text!r}: {error}") from None
    for name in ("endpoint", "replay_endpoint"):
        address = getattr(config, name)
        if address is not None and not address.startswith(("ipc://", "tcp://")):
            raise ValueError(f"--kv-events-config: {name} must begin with tcp:// or ipc://, got {address!r}")
        if address is not None and address.startswith("tcp://"):
            _host_and_port(address)
    if config.publisher is None and config.enable_kv_cache_events is None and msgspec.json.decode(text):
        raise ValueError('--kv-events-config: without "publisher": "zmq" nothing is published')
    return config if config.is_on else None


def _host_and_port(address: str) -> tuple[str, int | None]:
    """Of `tcp://HOST:PORT`; no port for `ipc://PATH`. Raises ValueError."""
    scheme, _, rest = address.partition("://")
    if scheme == "ipc":
        return rest, None
    host, _, port = rest.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"--kv-events-config: an endpoint must be tcp://HOST:PORT or ipc://PATH, got {address!r}")
    return host, int(port)
