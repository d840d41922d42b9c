"""Which layers of a prefill pass our hook, on SGLang's real TritonAttnBackend."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from real_backend import PAGE
from real_triton import WIDE, TritonRig
from triton_forward import TOKENS, batch_of, prepared

from g4debug.backends import adapter, aside, triton
from g4debug.dumps import reading
from g4debug.tracers.page_table import token_check
from g4debug.trapping.trap import TrapError

DEBUG = {"G4DEBUG_TRACE": "page-table"}
FAR = 640_000_000


@pytest.fixture
def hooked(monkeypatch):
    """The numbers of the layers that passed the hook."""
    seen = []
    triton = adapter("triton")
    real = type(triton).hand_over

    def spy(self, backend, layer, *args):
        seen.append(layer.layer_id)
        return real(self, backend, layer, *args)

    monkeypatch.setattr(type(triton), "hand_over", spy)
    return seen


def run(rig, backend, batch):
    """One forward. As SGLang does, each layer asks the backend for its method."""
    name = "forward_decode" if batch.forward_mode.is_decode() else "forward_extend"
    new = len(batch.out_cache_loc)
    for layer in rig.layers:
        q, kv = torch.zeros(new, layer.tp_q_head_num * WIDE), torch.zeros(new, 1, WIDE)
        getattr(backend, name)(q, kv, kv, layer, batch, save_kv_cache=True)


def prefills(rig, backend, batch, n):
    for _ in range(n):
        backend.init_forward_metadata(batch)
        run(rig, backend, batch)


def copied(backend):
    """A copy, whose page size 0.5.12's backends do not have: nobody has built it."""
    twin = copy.copy(backend)
    twin.page_size = PAGE
    return twin


def layers(rig):
    return [layer.layer_id for layer in rig.layers]


def ready(arm, hooked):
    """A rig whose backend has had its first prefills, after which hooks may step aside."""
    arm(**DEBUG)
    return first_prefills(hooked)


def watched(arm, hooked):
    """The same with ``watch``, and the folder of its dumps."""
    dumps = arm(SGLANG_TRTLLM_MHA_DEBUG="watch")
    return *first_prefills(hooked), dumps


def first_prefills(hooked):
    rig = TritonRig()
    backend = rig.backend()
    rig.requests = [rig.admit(f"r{n}", n) for n in TOKENS]
    batch = batch_of(rig, "extend", rig.requests, backend)
    prefills(rig, backend, batch, aside.FIRST)
    assert hooked == layers(rig) * aside.FIRST
    hooked.clear()
    return rig, backend, batch


def until_all_judged(rig):
    """The layers of a forward up to the one that finds that both lists were judged."""
    kinds, found = set(), []
    for layer in rig.layers:
        found.append(layer.layer_id)
        kind = layer.sliding_window_size > -1
        if kind in kinds and len(kinds) == 2:
            return found
        kinds.add(kind)
    raise AssertionError("the rig has too few layers")


def test_after_the_first_prefills_the_hook_steps_aside_in_all_but_one_of_some(arm, hooked):
    rig, backend, batch = ready(arm, hooked)
    some, every = until_all_judged(rig), layers(rig)
    assert len(some) < len(every)
    prefills(rig, backend, batch, 2 * aside.EVERY)
    expected = []
    for n in range(aside.FIRST + 1, aside.FIRST + 2 * aside.EVERY + 1):
        expected += every if n % aside.EVERY == 0 else some
    assert hooked == expected


def test_each_prefill_s_lists_are_judged(arm, hooked):
    rig, backend, batch = ready(arm, hooked)
    prefills(rig, backend, batch, 3)
    backend.init_forward_metadata(batch)
    backend.forward_metadata.kv_indices[3] = FAR
    with pytest.raises(TrapError) as error:
        run(rig, backend, batch)
    assert error.value.finding.kind == "out-of-range"


def test_watch_judges_all_lists_of_a_prefill_before_its_first_layer(arm, hooked):
    rig, backend, batch, dumps = watched(arm, hooked)
    with mock.patch.object(token_check, "reference", wraps=token_check.reference) as judged:
        prefills(rig, backend, batch, 2 * aside.EVERY)
    assert hooked == layers(rig) * 2  # of those that are numbered so
    assert judged.call_count == 2 * 2 * aside.EVERY  # the list of each kind, once in each prefill
    assert not list(dumps.glob("*.pt"))


@pytest.mark.parametrize("kind", ["kv_indices", "window_kv_indices"])
def test_watch_tells_a_bad_list_of_a_prefill_that_no_layer_asks_about(arm, hooked, kind):
    rig, backend, batch, dumps = watched(arm, hooked)
    note = triton.Triton.note

    def spoilt(self, backend, *args, **kwargs):
        note(self, backend, *args, **kwargs)
        getattr(backend.forward_metadata, kind)[3] = FAR

    with mock.patch.object(triton.Triton, "note", spoilt):
        prefills(rig, backend, batch, 1)
    assert not hooked
    (path,) = dumps.glob("*.pt")
    assert reading.read(path).finding.kind == "out-of-range"
    assert int(getattr(backend.forward_metadata, kind)[3]) == 0  # what the kernel got


def test_watch_tells_within_some_prefills_of_a_list_that_is_changed_before_a_layer(arm, hooked):
    rig, backend, batch, dumps = watched(arm, hooked)
    for n in range(aside.FIRST + 1, aside.EVERY + 1):
        assert not list(dumps.glob("*.pt"))
        backend.init_forward_metadata(batch)
        if n == aside.EVERY:
            backend.forward_metadata.kv_indices[3] = FAR
        run(rig, backend, batch)
    assert hooked == layers(rig)
    assert len(list(dumps.glob("*.pt"))) == 1


@pytest.mark.parametrize("mode", ["decode", "target_verify"])
def test_a_decode_and_a_verify_pass_the_hook_at_each_layer(arm, hooked, mode):
    arm(**DEBUG)
    rig = TritonRig()
    backend, batch = prepared(rig, mode)
    prefills(rig, backend, batch, 2 * aside.FIRST)
    assert hooked == layers(rig) * 2 * aside.FIRST


def test_a_decode_behind_a_prefill_finds_the_hooks_in_place(arm, hooked):
    rig, backend, batch = ready(arm, hooked)
    prefills(rig, backend, batch, 1)
    assert "forward_extend" in vars(backend)
    hooked.clear()
    decode = batch_of(rig, "decode", rig.requests, backend)
    backend.init_forward_metadata(decode)
    assert "forward_extend" not in vars(backend)
    run(rig, backend, decode)
    assert hooked == layers(rig)


def test_other_metadata_in_the_middle_of_a_forward_keep_the_hook_for_good(arm, hooked):
    """In a forward in which each layer has the hook; who changes them knowingly says so."""
    arm(**DEBUG)
    rig = TritonRig()
    backend, batch = prepared(rig, "extend")
    half = len(rig.layers) // 2
    whole, rest = rig.layers[:half], rig.layers[half:]
    rig.layers = whole
    run(rig, backend, batch)
    backend.forward_metadata = copy.copy(backend.forward_metadata)
    backend.forward_metadata.kv_indices = backend.forward_metadata.kv_indices.clone()
    backend.forward_metadata.window_kv_indices = backend.forward_metadata.window_kv_indices.clone()
    rig.layers = rest
    run(rig, backend, batch)
    rig.layers = whole + rest
    hooked.clear()
    prefills(rig, backend, batch, 2 * aside.FIRST)
    assert hooked == layers(rig) * 2 * aside.FIRST


def test_who_gives_a_backend_other_metadata_gets_them_judged(arm, hooked):
    rig, backend, batch = ready(arm, hooked)
    prefills(rig, backend, batch, 1)
    other = copy.copy(backend.forward_metadata)
    other.kv_indices = other.kv_indices.clone()
    other.kv_indices[3] = FAR
    backend.forward_metadata = other
    aside.come_back(backend)
    with pytest.raises(TrapError):
        run(rig, backend, batch)


def test_a_copy_of_a_backend_computes_with_its_own_metadata(arm, hooked):
    rig, backend, batch = ready(arm, hooked)
    prefills(rig, backend, batch, 1)
    twin = copied(backend)
    assert "forward_extend" in vars(twin)
    twin.init_forward_metadata(batch)
    assert "forward_extend" not in vars(twin)
    prefills(rig, twin, batch, aside.FIRST + 1)
    assert vars(twin)["forward_extend"].__self__ is twin


def test_a_step_begins_with_the_hooks_in_place(arm, hooked):
    rig, backend, batch = ready(arm, hooked)
    prefills(rig, backend, batch, 1)
    hooked.clear()
    aside.step()
    run(rig, backend, batch)
    assert hooked[: len(layers(rig))] == layers(rig)


@pytest.mark.parametrize("who", ["a wrapper around our hook", "an attribute of the backend"])
def test_nobody_else_is_left_out(arm, hooked, who):
    rig, backend, batch = ready(arm, hooked)
    calls = []
    function = type(backend).forward_extend

    def theirs(*args, **kwargs):
        calls.append(args)
        return function(*args, **kwargs)

    if who == "an attribute of the backend":
        backend.forward_extend = theirs.__get__(backend)
        prefills(rig, backend, batch, 3)
    else:
        with mock.patch.object(type(backend), "forward_extend", theirs):
            prefills(rig, backend, batch, 3)
    assert len(calls) == len(rig.layers) * 3
    assert hooked == layers(rig) * 3


def test_a_class_that_inherits_keeps_its_own_method(arm, hooked):
    rig, backend, batch = ready(arm, hooked)
    calls = []

    class Theirs(type(backend)):
        def forward_extend(self, *args, **kwargs):
            calls.append(args)
            return super().forward_extend(*args, **kwargs)

    theirs = copied(backend)
    theirs.__class__ = Theirs
    prefills(rig, theirs, batch, aside.FIRST + 2)
    assert len(calls) == len(hooked) == len(rig.layers) * (aside.FIRST + 2)


def test_a_site_that_others_hook_has_no_function_to_call_in_its_place(arm, hooked):
    ready(arm, hooked)
    from g4debug import plugin

    hooks = plugin.in_force.hooks
    assert hooks.own("attn.triton.extend", "page-table") is not None
    assert hooks.own("attn.triton.extend", "somebody else") is None
    assert hooks.own("nowhere", "page-table") is None
