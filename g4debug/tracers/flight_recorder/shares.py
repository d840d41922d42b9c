"""Says who holds the tokens of a KV pool, from what SGLang has in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from g4debug.hooking import prefix_tree, req_kv
from g4debug.tracers.flight_recorder import admission
from g4debug.tracers.flight_recorder.work import Work, name

SHOWN = 4  # requests that are named, and nodes of the prefix cache


@dataclass(frozen=True)
class Share:
    """tokens: of the pool, as SGLang counts. behind: those of them that its window has left.

    lock_behind: of what is locked in the prefix cache, those that its window has left. Only known
    where nobody else can have locked any.
    """

    work: Work
    tokens: int
    behind: int = 0
    lock_behind: int = 0


@dataclass(frozen=True)
class LockedNode:
    """A node of the prefix cache that somebody has locked. requests: those that were matched up to
    it or beyond, by name."""

    node: prefix_tree.Locked
    requests: tuple[str, ...]

    def __str__(self) -> str:
        more = len(self.requests) - SHOWN
        whose = ", ".join(self.requests[:SHOWN]) + (f" and {more} more" if more > 0 else "")
        locks = self.node.locks
        if locks is None:
            return f"{self.node.tokens} in node {self.node.id}, with {whose} at or below it"
        return (
            f"{self.node.tokens} in node {self.node.id}, locked {locks} time{'s' * (locks != 1)}, "
            f"with {whose} at or below it"
        )


@dataclass(frozen=True)
class Shares:
    """requests: by size. evictable, locked: of the prefix cache, None if there is none.

    rest: in use, and held by nobody who is known here. sessions: how many streaming sessions keep
    KV between two turns, which is a part of ``rest`` and of ``locked``. nodes: those of the prefix
    cache that are locked below a request that has begun, by size; None if the cache does not tell.
    """

    requests: tuple[Share, ...]
    evictable: int | None
    locked: int
    free: int
    rest: int
    sessions: int = 0
    nodes: tuple[LockedNode, ...] | None = ()

    def words(self, me: Any) -> Iterator[str]:
        """Who holds how much. me: the request that asks."""
        for share in self.requests[:SHOWN]:
            if not share.tokens:
                continue
            text = f"{share.tokens} are held by {_whom(share, me)}"
            if share.work.request is not me:
                text += f" ({share.work.place.value})"
            if share.behind:
                text += f", {share.behind} of them behind its sliding window"
            yield text
        more = self.requests[SHOWN:]
        if more:
            yield f"{sum(s.tokens for s in more)} are held by {len(more)} more requests"
        if self.evictable or self.locked:
            yield (
                f"the prefix cache has {self.evictable} that it can evict, and {self.locked} that "
                "requests have locked"
            )
        for share in self.requests:
            if share.lock_behind:
                yield (
                    f"all of those by {_whom(share, me)}, {share.lock_behind} of them behind its "
                    "sliding window"
                )
        if self.locked:
            yield from self._locked()
        yield f"{self.free} are free"
        if self.sessions:
            yield f"{_sessions(self.sessions)} KV between two turns"
        if self.rest > 0:
            whom = "it is not known who holds them"
            yield f"of {self.rest} {whom}{', if no session does' if self.sessions else ''}"

    def _locked(self) -> Iterator[str]:
        if self.nodes is None:
            yield "the cache, which is in Rust, does not tell which of its nodes are locked"
            return
        if not self.nodes:
            return
        text = "of those locked, "
        if any(one.node.locks is None for one in self.nodes):
            text = (
                "the cache, which is in Rust, does not show its locks; by SGLang's rule the "
                "requests that have begun lock at most "
            )
        text += "; ".join(map(str, self.nodes[:SHOWN]))
        if len(self.nodes) > SHOWN:
            text += f"; {len(self.nodes) - SHOWN} more nodes"
        yield text

    def may_give_back(self, lacks: int) -> str:
        """Who may hold so many tokens and give them back without a step, '' if nobody."""
        if self.sessions:
            return (
                f"{_sessions(self.sessions)} memory until it is closed, by its client or after its "
                "time. No step is needed for that."
            )
        if self.rest >= lacks > 0:
            return (
                f"{self.rest} tokens belong to no request and no prefix cache that is known here. "
                "They may be lost for good: the tracer pool-leak tells that on an idle server."
            )
        return ""


def _whom(share: Share, me: Any) -> str:
    return "itself" if share.work.request is me else f"request {name(share.work.request)}"


def _sessions(count: int) -> str:
    return "an open session keeps" if count == 1 else f"each of {count} open sessions keeps"


def _between_turns(scheduler: Any, items: list[Work]) -> int:
    """How many streaming sessions have a row that none of these requests uses."""
    used = {req_kv.row(item.request) for item in items}
    slots = prefix_tree.session_slots(scheduler.tree_cache)
    return sum(0 <= req_kv.row(slot) not in used for slot in slots)


def shares(scheduler: Any, pool: str, items: list[Work]) -> Shares:
    """Of the full or the SWA pool. items: all work of the scheduler."""
    tree, page = scheduler.tree_cache, int(scheduler.page_size)
    hybrid = hasattr(scheduler.token_to_kv_pool_allocator, "full_available_size")
    sizes = prefix_tree.sizes(prefix_tree.innermost(tree), pool, hybrid)
    window = getattr(tree, "sliding_window_size", None) if pool == admission.SWA else None
    sessions = _between_turns(scheduler, items)
    begun = [w for w in items if req_kv.row(w.request) >= 0]
    alone = len(begun) == 1 and not sessions
    held = []
    for item in begun:
        request = item.request
        allocated = -(-req_kv.column([request], req_kv.ALLOCATED)[0] // page) * page
        if not allocated:
            continue
        begin = 0 if sizes is None else req_kv.protected(request) or 0
        behind = lock_behind = 0
        if pool == admission.SWA:
            in_tree, begin = begin, max(begin, req_kv.evicted(request))
            if window:
                committed = req_kv.column([request], req_kv.COMMITTED)[0]
                edge = max(0, (committed - window) // page * page)
                behind = max(0, edge - begin)
                if alone and sizes is not None:
                    lock_behind = max(0, sizes.protected - max(0, in_tree - edge))
        if allocated > begin or lock_behind:
            held.append(Share(item, max(0, allocated - begin), behind, lock_behind))
    held.sort(key=lambda share: -share.tokens)
    free = admission.available(scheduler, pool)
    cached = 0 if sizes is None else sizes.evictable + sizes.protected
    total = sum(share.tokens for share in held) + cached + free
    rest = admission.size(scheduler, pool) - total
    return Shares(
        tuple(held),
        None if sizes is None else sizes.evictable,
        0 if sizes is None else sizes.protected,
        free,
        rest,
        sessions,
        None if sizes is None else locked_nodes(prefix_tree.innermost(tree), pool, items),
    )


def locked_nodes(tree: Any, pool: str, items: list[Work]) -> tuple[LockedNode, ...] | None:
    """The locked nodes above the last ones of all requests that have begun, the largest first."""
    nodes: dict[int, prefix_tree.Locked] = {}
    below: dict[int, list[str]] = {}
    for item in items:
        last = getattr(item.request, "last_node", None)
        if last is None or req_kv.row(item.request) < 0:
            continue
        try:
            found = prefix_tree.locked_above(tree, last, pool)
        except KeyError:  # it was evicted, so this request has not locked it
            continue
        if found is None:
            return None
        for node in found:
            nodes[node.id] = node
            below.setdefault(node.id, []).append(name(item.request))
    largest = sorted(nodes.values(), key=lambda node: -node.tokens)
    return tuple(LockedNode(node, tuple(below[node.id])) for node in largest)
