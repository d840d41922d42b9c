"""A verify of SGLang's real TritonAttnBackend, with our kernels and with SGLang's own."""

from __future__ import annotations

import pytest
import releases
import torch
from real_triton import SERVER, WIDE, TritonRig, sglangs
from triton_forward import batch_of, prepared

from g4debug.fixes.paths import verify_attention as path
from g4debug.fixes.paths.kernels import verify_attention as kernels
from g4debug.hooking import targets

pytestmark = [
    pytest.mark.skipif(not targets.matches(path.FIX.needs), reason="SGLang asks no other kernel"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]
ON = {"G4DEBUG_FIX_VERIFY_ATTENTION": "1"}


@pytest.fixture
def launched(monkeypatch):
    """The windows of the verifies that our kernels computed."""
    seen = []
    real = kernels.verify_attention

    def spy(*args):
        seen.append(args[13])
        real(*args)

    monkeypatch.setattr(kernels, "verify_attention", spy)
    return seen


@pytest.fixture
def rig(arm):
    arm(**ON)
    made = TritonRig()
    releases.configure(**SERVER, device="cpu")
    return made


def outputs(rig, backend, batch, seed=0):
    """Of each layer, on keys and values that are drawn."""
    g = torch.Generator().manual_seed(seed)
    new, found = len(batch.out_cache_loc), []
    for layer in rig.layers:
        for kept in rig.pool.get_kv_buffer(layer.layer_id):
            kept.copy_(torch.randn(kept.shape, generator=g))
        q = torch.randn(new, layer.tp_q_head_num * WIDE, generator=g)
        k, v = (torch.randn(new, 1, WIDE, generator=g) for _ in "kv")
        found.append(backend.forward_extend(q, k, v, layer, batch).clone())
    return torch.stack([x.view(-1) for x in found])


def test_a_verify_is_what_sglang_s_own_kernel_makes_it(rig, launched):
    backend, batch = prepared(rig, "target_verify")
    backend.extend_attention_fwd = sglangs("extend_attention_fwd")
    ours = outputs(rig, backend, batch)
    windows = [layer.sliding_window_size for layer in rig.layers]
    assert launched == windows
    assert len(set(windows)) == 2
    backend.use_verify_splitkv = False
    theirs = outputs(rig, backend, batch)
    assert len(launched) == len(windows)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["extend", "decode"])
def test_other_forwards_run_sglang_s_own_code(rig, launched, mode):
    backend, batch = prepared(rig, mode)
    backend.extend_attention_fwd = sglangs("extend_attention_fwd")
    call = backend.forward_extend if mode == "extend" else backend.forward_decode
    layer, new = rig.layers[0], len(batch.out_cache_loc)
    call(torch.zeros(new, layer.tp_q_head_num * WIDE), torch.zeros(new, 1, WIDE),
         torch.zeros(new, 1, WIDE), layer, batch)  # fmt: skip
    assert launched == []


def test_what_the_kernels_do_not_compute_goes_to_sglang_s_own(rig, launched):
    backend = rig.backend()
    requests = [rig.admit(f"r{n}", n) for n in (5, 9)]
    batch = batch_of(rig, "target_verify", requests, backend)
    backend.init_forward_metadata(batch)
    called = []

    def theirs(*args, **kwargs):
        called.append(kwargs)

    backend.extend_attention_fwd = theirs
    layer, new = rig.layers[0], len(batch.out_cache_loc)
    arguments = (torch.zeros(new, layer.tp_q_head_num * WIDE), torch.zeros(new, 1, WIDE),
                 torch.zeros(new, 1, WIDE), layer, batch)  # fmt: skip
    backend.forward_extend(*arguments, sinks=torch.zeros(layer.tp_q_head_num))
    layer.logit_cap = 30.0
    backend.forward_extend(*arguments)
    assert (len(called), launched) == (2, [])


def test_without_the_switch_nothing_is_put_there(arm):
    arm()
    assert TritonRig().backend().use_verify_splitkv is False


def test_a_gpu_that_was_not_measured_is_left_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert path.gpu_limit() == "they were measured on Hopper only, and this is sm100"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert path.gpu_limit() == ""
