"""Servers on which a kernel gets other indices than SGLang's books have: not judged, and told.

The backends, pools and allocators are SGLang's own; what such a server would hand over is made up.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from real_backend import PAGE, Rig
from real_triton import TritonRig
from served_rows import Serving, release, running, tracer_of
from triton_forward import run
from writing import Writing, put

from g4debug import plugin
from g4debug.tracers.pool_leak.tracer import PoolLeakTracer

ARGUMENTS = {"enable_unified_memory": True, "dcp_size": 2}
OF_A_FORWARD = {**ARGUMENTS, "enable_dp_attention": True, "attn_cp_size": 2}


def with_argument(rig, name):
    """The class of a rig on a server with this argument."""

    class Started(rig):
        def runner(self, draft=False):
            made = super().runner(draft)
            setattr(made.server_args, name, OF_A_FORWARD[name])
            return made

    return Started


def status(name):
    (found,) = [t for t in plugin.in_force.recorder.status.records() if t.name == name]
    return found


@pytest.mark.parametrize("argument", OF_A_FORWARD)
@pytest.mark.parametrize("rig", [Rig, TritonRig])
def test_page_table_does_not_judge_what_is_handed_over(arm, rig, argument):
    folder = arm(G4DEBUG_TRACE="page-table")
    it = with_argument(rig, argument)()
    backend = it.backend()
    requests = [it.admit(f"r{n}", n) for n in (50, 100)]
    batch = it.batch("decode", requests, backend)
    backend.init_forward_metadata(batch)
    metadata = backend.forward_metadata
    if rig is TritonRig:
        metadata.kv_indices.copy_(metadata.kv_indices.flip(0))
        run(it, backend, batch)
    else:
        pages = it.pool.full_kv_pool.k_buffer[0].shape[0] // PAGE
        metadata.page_table = pages - 1 - metadata.page_table
        for layer in it.layers:
            table = backend._get_layer_page_table(layer, batch)
            assert table.dtype == torch.int32
    assert not list(folder.glob("*.pt"))
    (limit,) = status("page-table").limits
    assert limit.what.startswith("nothing that the attention backend tr")
    assert "this tracer was never run so" in limit.why
    assert not [c for c in status("page-table").checked if c.count]


@pytest.mark.parametrize("argument", OF_A_FORWARD)
def test_kv_writes_does_not_judge_where_it_writes(arm, argument):
    arm(G4DEBUG_TRACE="kv-writes")
    it = Writing.__new__(Writing)
    it.rig_class = with_argument(Rig, argument)
    it.__init__()
    it.forward("decode", put(1, it.right("a", 0)), it.full_layers())
    for entry in plugin.in_force.hooks._entries["scheduler.init"]:
        if entry.owner == "kv-writes":
            entry.around(lambda *args: None, SimpleNamespace())
    assert "this tracer was never run so" in status("kv-writes").off


@pytest.mark.parametrize("argument", [*ARGUMENTS, "pp_size"])
def test_the_allocators_are_not_judged(arm, argument):
    folder = arm(G4DEBUG_TRACE="kv-allocator,pool-leak")
    it = Serving()
    running(it)
    arguments = SimpleNamespace(**{argument: ARGUMENTS.get(argument, 2)}, speculative_eagle_topk=1)
    tracer_of(it).before_scheduler_init(SimpleNamespace(), arguments, None)
    it.write("b", 5, it.rig.page("a", 1))
    release(it, "b")  # frees a page of a, which still runs
    assert not list(folder.glob("*.pt"))
    assert "this tracer was never run so" in status("kv-allocator").off
    (leaks,) = [
        e.before.hook.__self__
        for e in plugin.in_force.hooks._entries["scheduler.on_idle"]
        if e.owner == "pool-leak" and e.before is not None
    ]
    assert isinstance(leaks, PoolLeakTracer)
    cache = type("SWARadixCache", (), {})()
    assert not leaks._is_usable(SimpleNamespace(tree_cache=cache, server_args=arguments))
    assert "this tracer was never run so" in status("pool-leak").off
