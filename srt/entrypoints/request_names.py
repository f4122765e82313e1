"""The random names and the time that the answer of one HTTP request contains.

They follow from a nonce. So another server process that has the nonce can write the same answer (`saved_streams.py`).
"""

from __future__ import annotations

import hashlib
import os
import time

from starlette.types import Scope

_NAMES = "tercet.names"


class RequestNames:
    """Draws the names of one request. The same nonce gives the same names, in the order of the calls."""

    def __init__(self, nonce: bytes | None = None, began_s: float | None = None) -> None:
        """`nonce`: None for a random one. `began_s`: when the request began, in seconds since 1970; None for now."""
        self.nonce = os.urandom(16) if nonce is None else nonce
        self.began_s = time.time() if began_s is None else began_s
        self._num_drawn = 0

    def hex(self) -> str:
        """The next name: 32 hexadecimal digits."""
        self._num_drawn += 1
        return hashlib.blake2b(self._num_drawn.to_bytes(8, "little"), key=self.nonce, digest_size=16).hexdigest()

    @property
    def created(self) -> int:
        """When the request began, in whole seconds since 1970."""
        return int(self.began_s)


def names_of(scope: Scope) -> RequestNames:
    """The names of an HTTP request. All parts of its handler share them."""
    names: RequestNames | None = scope.get(_NAMES)
    if names is None:
        names = scope[_NAMES] = RequestNames()
    return names


def set_names(scope: Scope, names: RequestNames) -> None:
    """Gives a request the names of an earlier one."""
    scope[_NAMES] = names
