"""Forwards that write KV, on SGLang's real pools, allocator and backend, with kv-writes armed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from real_backend import LAYERS, Rig
from served_rows import Serving, row_of

from g4debug.dumps import reading
from g4debug.trapping.trap import TrapError

ARMED = {"G4DEBUG_TRACE": "kv-writes"}
NEW = {"decode": 1, "target_verify": 4, "extend": 10}


class Writing(Serving):
    """Requests that were admitted through the hooks, and forwards that write their last tokens."""

    def new_rig(self):
        return self.rig_class()

    rig_class = Rig

    def made(self, mode="decode"):
        batch = self.rig.batch(mode, self.rig.requests[1:], self.backend)
        new = NEW[mode]
        if mode == "extend":
            lengths = torch.tensor([r.tokens for r in self.rig.requests[1:]])
            batch.extend_prefix_lens = lengths - new
            batch.extend_start_loc = torch.arange(len(lengths)) * new
        return batch

    def forward(self, mode="decode", spoil=None, layers=None):
        """``spoil(batch)`` acts when the metadata are ready, as they are written to."""
        batch = self.made(mode)
        self.backend.init_forward_metadata(batch)
        pool = self.rig.pool
        if hasattr(pool, "set_swa_loc"):  # up to 0.5.13 ModelRunner.forward does this
            pool.set_swa_loc(pool.translate_loc_from_full_to_swa(batch.out_cache_loc))
        if spoil is not None:
            spoil(batch)
        return self.write(batch, layers)

    def write(self, batch, layers=None):
        for layer in self.rig.layers if layers is None else layers:
            n = len(batch.out_cache_loc)
            q, k, v = torch.randn(n, 16), torch.randn(n, 1, 8), torch.randn(n, 1, 8)
            self.backend.forward(q, k, v, layer, batch)
        return batch

    def found(self, mode="decode", spoil=None, layers=None):
        with pytest.raises(TrapError) as error:
            self.forward(mode, spoil, layers)
        return error.value.finding, reading.read(error.value.path)

    def metadata(self):
        """Of some forward: the attention itself does not matter."""
        self.backend.init_forward_metadata(self.made("extend"))
        return self.backend.forward_metadata

    def right(self, rid, position):
        return int(self.row(rid)[position])

    def row_of(self, rid):
        return row_of(self.requests[rid])

    def full_layers(self):
        return [x for x in self.rig.layers if not LAYERS[x.layer_id]]

    def sliding_layers(self):
        return [x for x in self.rig.layers if LAYERS[x.layer_id]]


def swa_loc(it):
    """The tensor with the sliding layers' locations, as this release has it."""
    pool = it.rig.pool
    return (
        pool.swa_loc if hasattr(pool, "swa_loc") else it.backend.forward_metadata.swa_out_cache_loc
    )


def put(at, value):
    def spoil(batch):
        batch.out_cache_loc = batch.out_cache_loc.clone()
        batch.out_cache_loc[at] = value

    return spoil


def scheduled(it, cached=()):
    """What the confirmations ask of SGLang's scheduler."""
    tree = SimpleNamespace(
        root_node=SimpleNamespace(
            children={
                0: SimpleNamespace(children={}, value=torch.tensor(list(cached), dtype=torch.int64))
            }
        )
    )
    it.ledger.holders.scheduler = SimpleNamespace(
        req_to_token_pool=it.rig.req_to_token, tree_cache=tree, running_batch=None, last_batch=None
    )
