"""Tree of reused prefixes and the tokens that they saved."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from octavo.block_manager import Digest
from octavo.scheduler import Sequence

MOST_PAGES = 16_384  # pages of all prefixes


@dataclass(slots=True)
class ReusedPrefix:
    salt: bytes
    tokens: array[int]
    num_hits: int = 0


class ReusedPrefixes:
    def __init__(self, page_size: int, *, most_pages: int = MOST_PAGES) -> None:
        self._page_size = page_size
        self._most_tokens = most_pages * page_size
        self._latest: OrderedDict[Digest, ReusedPrefix] = OrderedDict()
        self._num_tokens = 0

    def __iter__(self) -> Iterator[ReusedPrefix]:
        return iter([ReusedPrefix(p.salt, p.tokens, p.num_hits) for p in self._latest.values()])

    def add(self, sequence: Sequence, num_hit: int) -> None:
        assert sequence.table is not None
        last = sequence.table.digests[num_hit // self._page_size - 1]
        prefix = self._latest.get(last)
        if prefix is None:
            prefix = ReusedPrefix(sequence.salt, array("I", sequence.tokens[:num_hit]))
            self._latest[last] = prefix
            self._num_tokens += num_hit
            while self._num_tokens > self._most_tokens and len(self._latest) > 1:
                self._num_tokens -= len(self._latest.popitem(last=False)[1].tokens)
        else:
            self._latest.move_to_end(last)
        prefix.num_hits += 1


@dataclass(frozen=True, slots=True)
class ReuseNode:
    """Tokens ``[start, end)`` that several prefixes share."""

    parent: int | None
    start: int
    end: int
    tokens: tuple[int, ...]
    num_hits: int

    @property
    def tokens_saved(self) -> int:
        return self.num_hits * (self.end - self.start)


@dataclass(slots=True, eq=False)
class _Node:
    parent: _Node | None
    start: int
    end: int
    tokens: array[int]
    num_hits: int = 0
    children: dict[bytes, _Node] = field(default_factory=dict)

    @property
    def saved(self) -> int:
        return self.num_hits * (self.end - self.start)


class ReuseTree:
    def __init__(self, prefixes: list[ReusedPrefix], page_size: int, *, preview: int) -> None:
        self._preview = preview
        nodes = [node for root in _grow(prefixes, page_size) for node in _compressed(root, preview)]
        self._nodes = sorted(nodes, key=lambda node: -node.saved)

    def best(self, most: int) -> list[ReuseNode]:
        """Return the nodes that saved the most tokens, with their ancestors."""
        chosen = self._choose(most)
        listed: list[ReuseNode] = []
        index: dict[_Node, int] = {}
        waiting = sorted((node for node in chosen if node.parent is None), key=lambda node: node.saved)
        while waiting:
            node = waiting.pop()
            index[node] = len(listed)
            above = None if node.parent is None else index[node.parent]
            own = tuple(node.tokens[: self._preview])
            listed.append(ReuseNode(above, node.start, node.end, own, node.num_hits))
            children = (child for child in node.children.values() if child in chosen)
            waiting += sorted(children, key=lambda node: node.saved)
        return listed

    def _choose(self, most: int) -> set[_Node]:
        chosen: set[_Node] = set()
        for node in self._nodes:
            if len(chosen) == most:
                break
            missing = {above for above in _upwards(node) if above not in chosen}
            if len(chosen) + len(missing) <= most:
                chosen |= missing
        return chosen


def _grow(prefixes: list[ReusedPrefix], page_size: int) -> list[_Node]:
    roots: dict[tuple[bytes, bytes], _Node] = {}
    for prefix in prefixes:
        node: _Node | None = None
        for start in range(0, len(prefix.tokens), page_size):
            tokens = prefix.tokens[start : start + page_size]
            fresh = _Node(node, start, start + page_size, tokens)
            if node is None:
                node = roots.setdefault((prefix.salt, tokens.tobytes()), fresh)
            else:
                node = node.children.setdefault(tokens.tobytes(), fresh)
            node.num_hits += prefix.num_hits
    return list(roots.values())


def _compressed(root: _Node, preview: int) -> list[_Node]:
    nodes, waiting = [], [root]
    while waiting:
        node = waiting.pop()
        while len(node.children) == 1:
            (child,) = node.children.values()
            if child.num_hits < node.num_hits:
                break
            node.end, node.children = child.end, child.children
            if len(node.tokens) < preview:
                node.tokens = node.tokens + child.tokens
        for child in node.children.values():
            child.parent = node
        nodes.append(node)
        waiting += node.children.values()
    return nodes


def _upwards(node: _Node) -> Iterator[_Node]:
    at: _Node | None = node
    while at is not None:
        yield at
        at = at.parent
