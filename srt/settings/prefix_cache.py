"""Settings: the prefix cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from .setting import Setting


@dataclass(frozen=True, kw_only=True)
class PrefixCacheSettings:
    """The settings of the prefix cache."""

    TITLE: ClassVar[str] = "The prefix cache"

    radix_eviction_policy: Annotated[
        Literal["value", "lru", "lfu", "fifo", "mru", "filo"],
        Setting(
            "Order in which cached prefixes are evicted; value: by the last use, the cost of computing them again and "
            "retention; lru: least recently used first; lfu: least often used first; fifo: oldest first; mru: most "
            "recently used first; filo: newest first"
        ),
    ] = "value"
    max_retention_s: Annotated[
        float, Setting("Maximum of retention_seconds in a request; 0: requests cannot ask for retention")
    ] = 3600.0
    tool_call_retention_s: Annotated[
        float,
        Setting(
            "Seconds of retention for a request that ends in a tool call, at most --max-retention-s; 0: none. It needs "
            "--radix-eviction-policy value"
        ),
    ] = 60.0
    max_retained_share: Annotated[
        float, Setting("Share of the KV pool that retention may cover; beyond it, the oldest retentions end")
    ] = 0.5
    max_saved_states: Annotated[
        int | None,
        Setting(
            "Maximum number of states of recurrent layers that the prefix cache keeps; default: 256, or fewer if they "
            "would take more than 1 GiB on a CPU, or 8 GiB or a tenth of the memory on a GPU, but at least 8"
        ),
    ] = None
    disable_radix_cache: Annotated[bool, Setting("Cache and share no prefixes")] = False
    kv_events_config: Annotated[
        str | None,
        Setting(
            "Publish KV events for routers: the blocks that the KV pool, host memory and files store and remove. JSON "
            "with the keys of vLLM and SGLang: "
            '{"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558", "topic": ""}'
        ),
    ] = None
    enable_hierarchical_cache: Annotated[
        bool, Setting("Also keep the KV of ended requests in host memory, in files, or in both")
    ] = False
    hicache_size: Annotated[
        float | None,
        Setting(
            "GB (2**30 bytes) of host memory for KV; without --hicache-storage-dir, it must be larger than the KV "
            "pool; default: none, or 1 with --hicache-storage-dir"
        ),
    ] = None
    hicache_storage_dir: Annotated[
        str | None, Setting("Folder for KV files, which survive a restart and which several servers may share")
    ] = None
    hicache_storage_size: Annotated[
        float,
        Setting(
            "Maximum GB (2**30 bytes) of all files in --hicache-storage-dir, of all servers; the least recently used "
            "files are removed first; less if the disk is nearly full"
        ),
    ] = 16.0
