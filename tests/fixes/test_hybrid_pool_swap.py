"""hybrid-pool-swap: SGLang's HybridAttnBackend, its views and its graph capture's own swap."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import real_hybrid
from sglang_of import sglang_of

from g4debug.fixes import hybrid_pool_swap
from g4debug.fixes.hybrid_pool_swap import FIX, still_broken
from g4debug.hooking import targets

POOLS = dummy, target, other = SimpleNamespace(name="dummy"), object(), object()


@pytest.fixture
def hybrid_class(sglang, monkeypatch):
    return real_hybrid.unpatched(monkeypatch)


def build(hybrid_class, prefill=None, decode=None, fixed=True):
    inner = [b or real_hybrid.with_pool(dummy) for b in (prefill, decode)]
    return real_hybrid.build(hybrid_class, dummy, *inner, fixed)


def pools(backend):
    return [b.token_to_kv_pool for b in (backend, backend.prefill_backend, backend.decode_backend)]


def test_without_the_fix_the_inner_backends_keep_the_dummy(hybrid_class):
    backend = build(hybrid_class, fixed=False)
    backend.token_to_kv_pool = target
    assert pools(backend) == [target, dummy, dummy]


def test_a_swap_reaches_both_and_comes_back(hybrid_class):
    backend, bystander = build(hybrid_class), build(hybrid_class)
    backend.token_to_kv_pool = target
    assert pools(backend) == [target] * 3
    backend.token_to_kv_pool = other
    assert pools(backend) == [other] * 3
    backend.token_to_kv_pool = dummy
    assert pools(backend) == [dummy] * 3
    assert pools(bystander) == [dummy] * 3


def test_a_backend_that_was_there_before_the_fix_has_its_pool(hybrid_class):
    early = build(hybrid_class, fixed=False)
    build(hybrid_class)
    assert pools(early) == [dummy] * 3


def test_an_inner_backend_without_a_pool_is_left_alone(hybrid_class):
    plain = SimpleNamespace(needs_cpu_seq_lens=False)
    backend = build(hybrid_class, decode=plain)
    backend.token_to_kv_pool = target
    assert backend.prefill_backend.token_to_kv_pool is target
    assert vars(plain) == {"needs_cpu_seq_lens": False}


def test_a_hybrid_inside_a_hybrid(hybrid_class):
    inside = build(hybrid_class)
    backend = build(hybrid_class, decode=inside)
    backend.token_to_kv_pool = target
    assert pools(inside) == [target] * 3


def test_a_pool_that_nobody_set_is_an_attribute_error(hybrid_class):
    build(hybrid_class)
    with pytest.raises(AttributeError, match="HybridAttnBackend has no token_to_kv_pool yet"):
        _ = hybrid_class.__new__(hybrid_class).token_to_kv_pool


needs_views = pytest.mark.skipif(
    not targets.matches(">=0.5.13"), reason="the views of 0.5.12 swap the ForwardBatch's pool"
)


@needs_views
@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("fixed", [False, True])
def test_sglangs_own_views(hybrid_class, fixed, error):
    """Nested as in a draft forward within the graph capture, which swaps by hand."""
    from sglang.srt.speculative.frozen_kv_mtp_utils import (
        frozen_kv_target_view,
        target_kv_pool_view,
    )

    backend = build(hybrid_class, fixed=fixed)
    batch = SimpleNamespace(spec_info="mine")
    context = SimpleNamespace(target_token_to_kv_pool=target)
    seen = []

    def forward():
        with target_kv_pool_view(batch, context, backend):
            seen.append(pools(backend))
            if error:
                raise error

    def capture():
        saved, backend.token_to_kv_pool = backend.token_to_kv_pool, target
        try:
            with frozen_kv_target_view(batch, context, backend):
                assert batch.spec_info is None
            seen.append(pools(backend))
            forward()
            seen.append(pools(backend))
        finally:
            backend.token_to_kv_pool = saved

    if error:
        with pytest.raises(error):
            capture()
    else:
        capture()
    inner = target if fixed else dummy
    assert seen == [[target, inner, inner]] * (2 if error else 3)
    assert pools(backend) == [dummy] * 3
    assert batch.spec_info == "mine"


def test_it_is_needed_from_0_5_13_on(sglang):
    assert targets.matches(FIX.needs) == still_broken() == targets.matches(">=0.5.13")


VIEW = "def target_kv_pool_view(b, c, draft_attn_backend):\n    {swap}\n"
CLASS = "class HybridAttnBackend:\n    def __init__(self, r):\n        {init}\n    {more}\n"
SWAPS = "draft_attn_backend.token_to_kv_pool = c.pool"
HOLDS = "self.token_to_kv_pool = r.pool"


@pytest.mark.parametrize(
    ("swap", "init", "more", "broken"),
    [
        (SWAPS, HOLDS, "", True),
        (SWAPS, HOLDS, "def token_to_kv_pool(self): ...", False),
        (SWAPS, "pass", "", False),
        ("draft_attn_backend.show(c.pool)", HOLDS, "", False),
    ],
)
def test_the_probe(tmp_path, swap, init, more, broken):
    texts = {
        hybrid_pool_swap.VIEWS: VIEW.format(swap=swap),
        hybrid_pool_swap.HYBRID.rpartition(".")[0]: CLASS.format(init=init, more=more),
    }
    files = {dotted.replace(".", "/") + ".py": text for dotted, text in texts.items()}
    with sglang_of(tmp_path, files):
        assert still_broken() is broken


def test_the_hook_is_on_the_constructor(arm, hybrid_class):
    """As a server would load it; 0.5.12 is not in ``needs``, so there it is refused."""
    if not targets.matches(FIX.needs):
        with pytest.raises(SystemExit, match=r"G4DEBUG_FIX_HYBRID_POOL_SWAP=1: .*written for"):
            arm(G4DEBUG_FIX_HYBRID_POOL_SWAP="1")
        return
    arm()
    backend = build(hybrid_class, fixed=False)
    backend.token_to_kv_pool = target
    assert pools(backend) == [target] * 3
