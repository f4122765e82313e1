"""The tenant of a request: the name under which the engine counts and shares its service.

The name is, in this order:

1. With several API keys: the key, as `key-1` for the first one, `key-2` for the second one, and so on. The header and
   the field have no effect then, so no client can pose as another one. The text of a key appears nowhere.
2. Otherwise the header `x-tenant`, which a gateway can set for its users. One API key for all names nobody.
3. Otherwise the field of the body: `tenant` of /generate, `metadata.user_id` of /v1/messages, `user` of the other
   endpoints. In /generate, each prompt of a list may have its own.
4. Otherwise the empty name.

Without several keys, the server trusts the names that its clients give. The Python engines have neither keys nor
headers: there the field or argument `tenant` is the name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.types import Scope

from ...managers.request_registry import Prompt
from ..tenant_names import tenant_name

HEADER = b"x-tenant"
_KEY_TENANT = "tercet.key_tenant"
_KEY_DIGEST = "tercet.key_digest"


def note_key(scope: Scope, index: int, key_digest: bytes, num_keys: int) -> None:
    """A request has the API key of this index. If there are several keys, it is the tenant of the request."""
    scope[_KEY_DIGEST] = key_digest
    if num_keys > 1:
        scope[_KEY_TENANT] = f"key-{index + 1}"


def key_of(scope: Scope) -> str | None:
    """The API key of a request, as `key-1`; None unless there are several keys."""
    of_key: str | None = scope.get(_KEY_TENANT)
    return of_key


def owner_of(scope: Scope) -> str:
    """Who owns what a request begins: a digest of its API key; "" without keys.

    It does not depend on the other keys, so it outlives their changes.
    """
    digest: bytes = scope.get(_KEY_DIGEST, b"")
    return digest.hex()[:32]


def tenant_headers(scope: Mapping[str, Any]) -> list[tuple[bytes, bytes]]:
    """The headers of a request that name its tenant, without all others."""
    return [(name, value) for name, value in scope["headers"] if name == HEADER]


def tenant_of(scope: Scope) -> str | None:
    """The tenant that the key or the header of an HTTP request names. None: the fields of its body name it."""
    of_key = key_of(scope)
    if of_key is not None:
        return of_key
    for name, value in scope["headers"]:
        if name == HEADER and value.strip():
            return tenant_name(_text_of(value.strip()))
    return None


def _text_of(value: bytes) -> str:
    """Gateways send UTF-8, so that a name is the same in the header and in a body. Other bytes are Latin-1."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def with_tenant(scope: Scope, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    """The prompts of an HTTP request, with its tenant. Before, `options.tenant` is the field of the body."""
    tenant = tenant_of(scope)
    if tenant is None:
        return prompts
    return [
        dataclasses.replace(prompt, options=msgspec.structs.replace(prompt.options, tenant=tenant))
        for prompt in prompts
    ]
