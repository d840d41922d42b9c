"""triton-decode-window: SGLang's TritonAttnBackend and its kernels, and Gemma-4's own mask."""

from __future__ import annotations

import pytest
import torch
from real_backend import WINDOW, replay_graph
from real_triton import TritonRig, listed
from sglang_of import sglang_of

from g4debug.backends.triton import decode_keys
from g4debug.fixes import triton_decode_window
from g4debug.fixes.base import state_of
from g4debug.fixes.triton_decode_window import FIX, still_broken, whole_window

FIXED = {"G4DEBUG_FIX_TRITON_DECODE_WINDOW": "1"}
BOTH = pytest.mark.parametrize("fixed", [False, True])


@pytest.fixture
def rig(arm):
    def build(fixed: bool) -> TritonRig:
        arm(**(FIXED if fixed else {}))
        return TritonRig()

    return build


def by_the_model(query: int) -> list[int]:
    """The keys that Hugging Face's mask lets a query of a sliding layer see."""
    from transformers.masking_utils import sliding_window_causal_mask_function

    seen = sliding_window_causal_mask_function(WINDOW)
    return [k for k in range(query + 20) if seen(0, 0, torch.tensor(query), torch.tensor(k))]


@BOTH
@pytest.mark.parametrize("tokens", [WINDOW - 1, WINDOW, WINDOW + 1, 60])
def test_a_decode_reads_what_a_prefill_of_the_same_token_reads(rig, fixed, tokens):
    """By SGLang's own kernels, and by the definition of the model."""
    rig = rig(fixed)
    backend, request = rig.backend(), rig.admit("r", tokens)
    prefill = rig.keys(backend, "extend", request)
    assert prefill == [by_the_model(query) for query in range(tokens - 10, tokens)]
    (decode,) = rig.keys(backend, "decode", request)
    lost = 0 if fixed or tokens < WINDOW else 1
    assert decode == prefill[-1][lost:]
    assert len(decode) == min(tokens, WINDOW) - lost
    assert decode_keys(backend) == WINDOW - (not fixed)  # what a tracer has to expect
    (full,) = rig.keys(backend, "decode", request, layer=2)
    assert full == list(range(tokens))


def decode_lists(rig, backend, requests, how):
    """The positions that the window's list of a decode names for each request."""
    batch = rig.batch("decode", requests, backend)
    if how == "eager":
        backend.init_forward_metadata(batch)
    else:
        replay_graph(backend, batch)
    return [listed(rig, backend, request, row) for row, request in enumerate(requests)]


@BOTH
@pytest.mark.parametrize("how", ["eager", "replay"])
def test_eager_and_in_a_graph_for_rows_of_all_lengths(rig, fixed, how):
    rig = rig(fixed)
    backend = rig.backend()
    requests = [rig.admit(f"r{n}", n) for n in (1, WINDOW - 1, WINDOW, WINDOW + 1, 60)]
    if how == "replay":
        rig.capture(backend, len(requests))
    got = decode_lists(rig, backend, requests, how)
    wanted = [by_the_model(request.tokens - 1) for request in requests]
    if not fixed:
        wanted = [keys[max(0, len(keys) - WINDOW + 1) :] for keys in wanted]
    assert got == wanted
    assert backend.sliding_window_size == WINDOW - 1


def test_the_graphs_list_has_room_for_rows_that_are_all_longer_than_the_window(rig):
    rig = rig(True)
    backend = rig.backend()
    requests = [rig.admit(f"r{n}", 60 + n) for n in range(3)]
    rig.capture(backend, len(requests))
    assert len(backend.cuda_graph_window_kv_indices) == 3 * WINDOW
    got = decode_lists(rig, backend, requests, "replay")
    assert [len(keys) for keys in got] == [WINDOW] * 3


@pytest.mark.parametrize("mode", ["extend", "target_verify"])
def test_a_prefill_and_a_verify_are_left_as_they_are(rig, mode):
    """Their lists have the keys before the first query, and the kernel's mask knows the window."""
    rig = rig(True)
    backend, request = rig.backend(), rig.admit("r", 90)
    batch = rig.batch(mode, [request], backend)
    if mode == "target_verify":
        batch.spec_info = verify_input(request)
    backend.init_forward_metadata(batch)
    first = int(batch.seq_lens[0]) - (10 if mode == "extend" else 0)
    assert listed(rig, backend, request) == list(range(first - WINDOW + 1, first))


def verify_input(request):
    from types import SimpleNamespace

    return SimpleNamespace(
        draft_token_num=4, num_tokens_per_req=4, custom_mask=torch.ones(4 * (request.tokens + 4))
    )


def test_an_exception_leaves_the_backend_as_it_was(rig):
    rig = rig(True)
    backend, request = rig.backend(), rig.admit("r", 60)
    batch = rig.batch("decode", [request], backend)
    batch.seq_lens = None
    with pytest.raises((TypeError, AttributeError)):
        backend.init_forward_metadata(batch)
    assert backend.sliding_window_size == WINDOW - 1
    with whole_window(backend), whole_window(backend):
        assert backend.sliding_window_size == decode_keys(backend) == WINDOW
    assert backend.sliding_window_size == WINDOW - 1


@pytest.mark.parametrize("radius", [None, -1, 0])
def test_a_model_without_sliding_layers(rig, radius):
    backend = rig(True).backend()
    backend.sliding_window_size = radius
    with whole_window(backend):
        assert backend.sliding_window_size == radius
    assert decode_keys(backend) is None


def test_off_unless_its_switch_is_on(arm):
    arm(G4DEBUG_FIXES="all")
    assert state_of("triton-decode-window") == "off"
    assert FIX.purpose == "experiment"
    assert still_broken() is True


def test_by_its_switch(arm):
    arm(**FIXED)
    assert state_of("triton-decode-window") == "applied"


CUT = "window_kv_lens = torch.minimum(\n    seq_lens,\n    torch.tensor({size}),\n)\n{more}\n"


@pytest.mark.parametrize(
    ("size", "more", "broken"),
    [
        ("sliding_window_size", "", True),
        ("sliding_window_size", "update(self.sliding_window_size + 1)", False),
        ("keys", "", False),
    ],
)
def test_the_probe(tmp_path, size, more, broken):
    file = triton_decode_window.MODULE.replace(".", "/") + ".py"
    with sglang_of(tmp_path, {file: CUT.format(size=size, more=more)}):
        assert still_broken() is broken
