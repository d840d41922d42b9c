"""A fault that can never fire in this server is told at its start, with what the server lacks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from g4debug import discovery
from g4debug.combinations import seen
from g4debug.combinations.seen import Combination
from g4debug.faults.fitting import idle, install

FAULT = discovery.load("fault", "page-oob")
LLAMA = Combination(
    "Llama", seen.MHA, seen.NO_WINDOW, "MHATokenToKVPool", ("trtllm_mha",), seen.NO_DRAFT
)
GEMMA = replace(LLAMA, window=seen.SWA_POOL, pool="SWAKVPool of A", draft="FROZEN_KV_MTP")


@pytest.mark.parametrize(
    ("asks", "ranks", "found", "lacks"),
    [
        (("a draft",), 1, LLAMA, "draft"),
        (("a draft", "a SWA pool"), 1, LLAMA, "draft and no SWA pool"),
        (("a draft", "a SWA pool", "page tables"), 1, GEMMA, ""),
        (("page tables",), 1, LLAMA, ""),
        (("page tables",), 1, replace(LLAMA, backends=("triton",)), "page tables"),
        (("page tables",), 1, replace(LLAMA, backends=("torch_native",)), "page tables"),
        (("a draft", "a SWA pool", "page tables"), 1, Combination(), ""),  # nothing is known
        ((), 2, GEMMA, "2 tensor-parallel ranks"),
    ],
)
def test_what_a_server_lacks(sglang, asks, ranks, found, lacks):
    told = dict(idle([replace(FAULT, asks=asks, ranks=ranks)], found, ranks=1))
    assert told == ({FAULT.id: lacks} if lacks else {})


def test_it_is_told_when_the_scheduler_is_there(sglang, caplog, monkeypatch):
    from types import SimpleNamespace

    from g4debug.faults import base
    from g4debug.faults.grammar import parse
    from g4debug.hooking.hooks import Hooks

    hooks = Hooks()
    install(base.install_all(parse("rank-divergence=on"), hooks), hooks)
    scheduler = SimpleNamespace(server_args=SimpleNamespace(tp_size=1))
    (after,) = [e.after for e in hooks._entries["scheduler.init"] if e.after is not None]
    assert after("result", scheduler) == "result"
    assert caplog.messages == [
        "g4debug: the fault rank-divergence can never fire in this server, which has no 2 "
        "tensor-parallel ranks"
    ]
