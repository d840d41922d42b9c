"""Requests that were admitted through the hooks, as a scheduler's batch has them.

The pools, the allocator, the request table and the backend are SGLang's own (real_backend.py); the
requests are namespaces that have what the ledger and the tracers read of SGLang's (releases.py).
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from real_backend import PAGE, Rig
from releases import Request, kv_of

from g4debug import plugin
from g4debug.dumps import reading
from g4debug.trapping.trap import TrapError

TOKENS = {"a": 50, "b": 100, "c": 61}
ARMED = {"G4DEBUG_TRACE": "page-table,kv-allocator"}


class Serving:
    """Requests that were admitted through the hooks, as a scheduler's batch has them."""

    def __init__(self, cached=0):
        self.ledger = plugin.in_force.ledger
        self.rig = self.new_rig()
        self.backend = self.rig.backend()  # before requests come, as in a server
        self.requests = {}
        for rid, tokens in TOKENS.items():
            self.admit(rid, tokens, cached)
        self.name_rows()
        self.protect()

    def name_rows(self):
        """The recorder knows the request of each row."""
        plugin.in_force.recorder._rids = {row_of(r): r.rid for r in self.requests.values()}

    def new_rig(self):
        return Rig()

    def admit(self, rid, tokens, cached):
        request = Request(
            rid=rid, session=None, cache_protected_len=cached,
            kv_committed_len=tokens, kv_allocated_len=tokens, retraction_count=0,
        )  # fmt: skip
        row = self.rig.next_row()
        request.put(req_pool_idx=row)
        self.ledger.allocating = self.ledger.batch = SimpleNamespace(
            reqs=[request], seq_lens_cpu=torch.tensor([tokens]),
            req_to_token_pool=self.rig.req_to_token,
        )  # fmt: skip
        assert self.rig.admit(rid, tokens).req_pool_idx == row
        self.ledger.requests[rid] = self.requests[rid] = request

    def protect(self):
        table = self.rig.req_to_token.req_to_token
        self.ledger.owners.protect(list(self.requests.values()), table)

    def cache(self, tokens, lent=0):
        """The prefix cache holds so many tokens of each request, of which it lent the first."""
        root = SimpleNamespace(children={}, parent=None)
        tree = SimpleNamespace(root_node=root)
        for number, request in enumerate(self.requests.values()):
            whole = kv_of(request).kv_allocated_len // PAGE * PAGE
            value = it_row(self, request, min(tokens, whole))
            root.children[number] = SimpleNamespace(children={}, value=value, parent=root)
            request.last_node = root.children[number]
            request.put(cache_protected_len=lent)
        self.protect()
        for request in self.requests.values():
            request.put(cache_protected_len=len(request.last_node.value))
        self.protect()
        self.ledger.holders.scheduler = SimpleNamespace(
            req_to_token_pool=self.rig.req_to_token, tree_cache=tree, running_batch=None,
            last_batch=None,
        )  # fmt: skip

    def row(self, rid):
        return self.rig.req_to_token.req_to_token[row_of(self.requests[rid])]

    def write(self, victim, column, page):
        """Let the victim's row name a page."""
        cells = self.row(victim)[column * PAGE : (column + 1) * PAGE]
        cells.copy_(torch.arange(page * PAGE, (page + 1) * PAGE))

    def forward(self, mode="decode"):
        batch = self.rig.batch(mode, self.rig.requests[1:], self.backend)
        self.backend.init_forward_metadata(batch)
        return self.rig.forward(self.backend, batch)

    def found(self, mode="decode"):
        with pytest.raises(TrapError) as error:
            self.forward(mode)
        return error.value.finding, reading.read(error.value.path)


def row_of(request):
    return kv_of(request).req_pool_idx


def it_row(it, request, tokens):
    return it.rig.req_to_token.req_to_token[row_of(request), :tokens].to(torch.int64)


def release(it, rid, tokens=None):
    """What release_kv_cache does without a prefix cache, called through its hooks."""

    def free(request, tree_cache):
        n = kv_of(request).kv_committed_len
        it.rig.allocator.free(it_row(it, request, n) if tokens is None else tokens)

    in_release(it, rid, free)


def in_release(it, rid, call):
    """``call(request, None)`` in the place of release_kv_cache, through its hooks."""
    for entry in reversed(plugin.in_force.hooks._entries["cache.release"]):
        call = (lambda e, nxt: lambda *a, **k: e.around(nxt, *a, **k))(entry, call)
    call(it.requests[rid], None)


def tracer_of(it):
    """The tracer kv-allocator."""
    return next(e.__self__ for e, _ in it.ledger.listeners if hasattr(e.__self__, "_ran"))


def late(it, monkeypatch):
    """Indices are far away, as on CUDA, and arrive when they are waited for: the copies sent."""
    copies = []

    def sent():
        copies.append(SimpleNamespace(query=lambda: False, synchronize=lambda: None))
        return copies[-1]

    monkeypatch.setattr(it.ledger, "is_far", lambda indices: True)
    monkeypatch.setattr(it.ledger.transport, "_event", sent)
    return copies


def running(it):
    tracer = tracer_of(it)
    for rid, request in it.requests.items():
        tracer._ran[rid] = (row_of(request), 0)
