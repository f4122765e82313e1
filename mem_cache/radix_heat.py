"""The hottest edges of the radix cache's tree, for the live view."""

from __future__ import annotations

import heapq

from ..srt.view_parts import HotPrefix
from .radix_node import RadixNode

MAX_VISITED = 4096
"""Edges that one call looks at, which takes a few milliseconds. A larger tree is searched from the most used edges."""


def hottest(top: RadixNode | None, max_prefixes: int, max_tokens: int) -> list[HotPrefix]:
    """The edges below `top` that saved the most computation, in depth-first order.

    The heat of an edge is the number of its tokens times the number of its uses after the first. `top`: the node of a
    namespace; None: the namespace is empty.
    """
    if top is None:
        return []
    chosen = heapq.nlargest(max_prefixes, _most_used(top), key=_heat)
    # The chosen edges and those above them, each below its parent. A walk of the whole tree would take long.
    below: dict[RadixNode, dict[RadixNode, None]] = {}
    for edge in reversed(chosen):  # the stack returns the last one first
        node: RadixNode = edge
        while node is not top:
            assert node.parent is not None
            below.setdefault(node.parent, {})[node] = None
            node = node.parent
    edges: list[HotPrefix] = []
    shown = set(chosen)
    stack = [(child, 0, 0) for child in below.get(top, ())]
    while stack:
        node, depth, start = stack.pop()
        if node in shown:
            edges.append(_edge(node, depth, start, max_tokens))
            depth += 1
        end = start + len(node.tokens)
        stack += [(child, depth, end) for child in below.get(node, ())]
    return edges


def _most_used(top: RadixNode) -> list[RadixNode]:
    """Up to MAX_VISITED edges. The search goes from hot to cold: no edge is used more often than the one above it."""
    found: list[RadixNode] = []
    queue = [(-node.num_uses, place, node) for place, node in enumerate(top.children.values()) if node.num_uses > 1]
    heapq.heapify(queue)
    num_queued = len(top.children)
    while queue and len(found) < MAX_VISITED:
        node = heapq.heappop(queue)[2]
        found.append(node)
        for child in node.children.values():
            if child.num_uses > 1:
                num_queued += 1  # unique, so that nodes are never compared
                heapq.heappush(queue, (-child.num_uses, num_queued, child))
    return found


def _heat(node: RadixNode) -> int:
    return len(node.tokens) * (node.num_uses - 1)


def _edge(node: RadixNode, depth: int, start: int, max_tokens: int) -> HotPrefix:
    return HotPrefix(
        depth=depth,
        start=start,
        num_tokens=len(node.tokens),
        num_uses=node.num_uses,
        is_locked=node.lock_count > 0,
        token_ids=node.tokens[:max_tokens].tolist(),
    )
