"""Where the longest cached prefix of some tokens ends in the radix tree, and whether it still ends there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..srt.arrays import Int32Array
from .base_prefix_cache import Lookup
from .radix_node import RadixNode, common_len

if TYPE_CHECKING:  # it imports this file
    from .radix_cache import RadixCache


class RadixLookup(Lookup):
    """The length of a prefix, and the place of its end in the tree. It is current as long as that place is as it was.

    A node leaves the tree after its descendants. So the whole prefix is in the tree while the last node is, and it has
    not grown while that node has no child for the next page. The edge of a node only ever gets shorter: when it is
    split, when its end is evicted, and when the node is removed. What a node does not show, `RadixCache.num_cuts` does.
    """

    __slots__ = ("_cache", "_edge_len", "_next_key", "_num_cuts", "length", "node")

    def __init__(self, cache: RadixCache, length: int, node: RadixNode, next_key: bytes | None) -> None:
        """`node`: the last one that matches, whole or in part. `next_key`: of the child that would continue the prefix;
        None: no child can."""
        self.length = length
        self._cache = cache
        self._num_cuts = cache.num_cuts
        self.node = node
        self._edge_len = len(node.tokens)
        self._next_key = next_key

    def is_current(self) -> bool:
        return self._next_key not in self.node.children and self._is_in_tree()

    def _is_in_tree(self) -> bool:
        """Whether the prefix is in the tree and the edge of its last node is as it was."""
        return len(self.node.tokens) == self._edge_len and self._num_cuts == self._cache.num_cuts

    def end(self) -> tuple[RadixNode, int] | None:
        """The node at whose end the prefix ends, and its length. Another look-up of the same tokens may begin there.

        None if the prefix is empty, cannot grow there, or may have left the tree.
        """
        if self.length and self._next_key is not None and self._is_in_tree():
            return self.node, self.length
        return None


def find(root: RadixNode, tokens: Int32Array, namespace: str, page_size: int) -> tuple[list[RadixNode], int, int]:
    """Walk down as far as the tokens match. Has no effect on the tree.

    Returns the nodes on the path without the namespace's node, the matched length, and the matched length within the
    last node, which may match only in part.
    """
    return _walk(root.children.get(namespace_key(namespace)), tokens, 0, page_size)


def _walk(node: RadixNode | None, tokens: Int32Array, pos: int, page_size: int) -> tuple[list[RadixNode], int, int]:
    """As `find`, but only below a node at whose end the first `pos` tokens end."""
    assert tokens.dtype == np.int32
    end = len(tokens) // page_size * page_size
    path: list[RadixNode] = []
    matched_in_last = 0
    while node is not None and pos < end:
        node = node.children.get(tokens[pos : pos + page_size].tobytes())
        if node is None:
            break
        path.append(node)
        # Never 0: the key is the whole first page.
        matched_in_last = common_len(node.tokens, tokens[pos:end]) // page_size * page_size
        pos += matched_in_last
        if matched_in_last < len(node.tokens):
            break
    return path, pos, matched_in_last


def look_up(
    cache: RadixCache, root: RadixNode, tokens: Int32Array, namespace: str, earlier: RadixLookup | None
) -> RadixLookup:
    """See BasePrefixCache."""
    key = namespace_key(namespace)
    known = None if earlier is None else earlier.end()
    last, start = known or (root.children.get(key), 0)
    if last is None:
        return RadixLookup(cache, 0, root, key)
    path, length, matched_in_last = _walk(last, tokens, start, cache.page_size)
    is_whole = not path or matched_in_last == len(path[-1].tokens)
    last = path[-1] if path else last
    next_page = tokens[length : length + cache.page_size]
    is_open = is_whole and len(next_page) == cache.page_size
    return RadixLookup(cache, length, last, next_page.tobytes() if is_open else None)


def namespace_key(namespace: str) -> bytes:
    """The key of a namespace's node below the root."""
    # surrogatepass: every str is a valid namespace, and different strings give different bytes.
    return namespace.encode("utf-8", "surrogatepass")
