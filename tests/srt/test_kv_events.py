"""The setting --kv-events-config, and the description of the publisher that routers read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tercet.srt.kv_events import read_config
from tercet.srt.server_args import ServerArgs


@pytest.mark.parametrize(
    ("text", "is_on"),
    [
        ("{}", False),
        ('{"publisher": "zmq"}', True),
        ('{"publisher": "null"}', False),
        ('{"enable_kv_cache_events": true}', True),
        ('{"enable_kv_cache_events": false, "publisher": "zmq"}', False),
        ('{"enable_kv_cache_events": true, "publisher": "zmq", "topic": "kv@a@b", "hwm": 5}', True),
    ],
)
def test_when_it_is_on(text: str, is_on: bool) -> None:
    assert (read_config(text) is not None) == is_on


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "malformed"),
        ('{"publisher": "kafka"}', "publisher"),
        ('{"endpoints": "tcp://*:1"}', "unknown field `endpoints`"),
        ('{"buffer_steps": 0}', "buffer_steps"),
        ('{"buffer_steps": 1073741824}', "buffer_steps"),
        ('{"hwm": 2147483648}', "hwm"),
        ('{"endpoint": "http://a"}', "must begin with tcp:// or ipc://"),
        ('{"endpoint": "tcp://*"}', "must be tcp://HOST:PORT"),
        ('{"endpoint": "tcp://*:0"}', "must be tcp://HOST:PORT"),
        ('{"endpoint": "tcp://*:65536"}', "must be tcp://HOST:PORT"),
        ('{"endpoint": "tcp://*:zmq"}', "must be tcp://HOST:PORT"),
        ('{"endpoint": "tcp://:5557"}', "must be tcp://HOST:PORT"),
        ('{"replay_endpoint": "tcp://*:70000"}', "must be tcp://HOST:PORT"),
        ('{"endpoint": "tcp://*:5557"}', "nothing is published"),
    ],
)
def test_a_wrong_config_is_a_mistake_of_the_user(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"--kv-events-config: .*{message}"):
        ServerArgs(model_path="m", kv_events_config=text)


def test_it_needs_the_prefix_cache() -> None:
    with pytest.raises(ValueError, match="needs the prefix cache"):
        ServerArgs(model_path="m", kv_events_config='{"publisher": "zmq"}', disable_radix_cache=True)


@pytest.mark.parametrize(
    ("addresses", "shown"),
    [
        (
            {"endpoint": "tcp://*:1", "replay_endpoint": "tcp://*:65535"},
            {"endpoint_host": "*", "endpoint_port_base": 1, "replay_endpoint_port_base": 65535},
        ),
        (
            {"endpoint": "ipc:///tmp/e", "replay_endpoint": "ipc:///tmp/r"},
            {"endpoint_host": "/tmp/e", "endpoint_port_base": None, "replay_endpoint_port_base": None},
        ),
        ({"endpoint": "tcp://router:6000"}, {"endpoint_host": "router", "endpoint_port_base": 6000}),
    ],
)
def test_how_server_info_describes_it(addresses: dict[str, str], shown: dict[str, Any]) -> None:
    config = read_config(json.dumps({"publisher": "zmq", **addresses}))
    assert config is not None
    assert config.described(64) == {"publisher": "zmq", "topic": "", "block_size": 64, "dp_size": 1, **shown}
