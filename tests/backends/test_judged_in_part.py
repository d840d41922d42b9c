"""What the line at start claims of each backend is what is judged of it then."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from test_fa3 import It as Tables
from test_flashinfer import MLA
from test_flashinfer import It as Lists

from g4debug.backends import adapter, adapters, phases
from g4debug.backends.base import PHASES

pytestmark = pytest.mark.usefixtures("sglang")
MIXED, MUX = {"enable_mixed_chunk": True}, {"enable_pdmux": True}
DLLM = {"dllm_algorithm": "LowConfidence"}
CHUNKS, ENCODES = {"is_local_attention_model": True}, {"is_encoder_decoder": True}
# Features of a server: adapter, arguments, fields of the backend, of the model's config, the
# model's window -> the phases in which some forwards are not judged.
FEATURES = [
    ("fa3", {}, {}, {}, None, ""),
    ("fa3", MIXED, {}, {}, None, "prefill"),
    ("fa3", MUX, {}, {}, None, "prefill"),
    ("fa3", DLLM, {}, {}, None, "prefill"),
    ("fa3", {}, {"topk": 4}, {}, None, "verify draft"),
    ("fa3", {}, {"topk": 1}, {}, None, ""),
    ("fa3", {}, {"_kv_shard_pool": object()}, {}, None, "prefill decode verify draft"),
    ("fa3", {}, {"is_prefill_aware_swa": True}, {}, None, "decode"),
    ("fa3", {}, {"use_mla": True}, {}, None, "prefill"),
    ("fa3", {}, {}, CHUNKS, None, "prefill decode verify draft"),
    ("fa3", {}, {}, ENCODES, None, "prefill decode verify draft"),
    ("flashinfer", {}, {}, {}, 3, ""),
    ("flashinfer", MIXED, {}, {}, None, ""),
    ("flashinfer", MUX, {}, {}, None, "prefill"),
    ("flashinfer", {}, {"is_multimodal": True}, {}, 3, "prefill"),
    ("flashinfer", {}, {"is_multimodal": True}, {}, None, ""),
    ("flashinfer", {}, {"enable_deterministic": True}, {}, 3, "prefill"),
    ("flashinfer", {}, {"use_paged": True}, {}, 3, "prefill"),
    ("flashinfer", {}, {"decode_uses_dequant_workspace": True}, {}, None, "decode"),
    ("flashinfer", {}, {"prefill_uses_dequant_workspace": True}, {}, None, "prefill"),
    ("flashinfer", {}, {"enable_mis": True}, {}, None, "prefill decode"),
    ("flashinfer_mla", {}, {}, {}, None, ""),
    ("flashinfer_mla", {}, {"enable_chunk_kv": True}, {}, None, "prefill"),
    ("flashmla", {}, {"_kv_shard_pool": object()}, {}, None, "prefill decode"),
    ("trtllm_mla", {}, {"enable_chunk_kv": True}, {}, None, "prefill"),
    ("torch_native", {}, {}, {}, None, ""),
    ("torch_native", {}, {}, ENCODES, None, "prefill decode"),
    ("torch_native", {}, {"swa": True}, {}, None, "prefill decode"),
    ("triton", MIXED, {}, {}, 3, ""),
    ("triton", {}, {"enable_deterministic": True}, {}, 3, "prefill"),
    ("triton", {}, {}, CHUNKS, None, "prefill decode verify draft"),
    ("trtllm_mha", MIXED, {}, {}, None, ""),
    ("trtllm_mha", {}, {}, CHUNKS, None, "prefill decode verify draft"),
]


class Guard:
    """Remembers what an adapter says at start."""

    def __init__(self):
        self.parts, self.said = {}, []

    def judged_in_part(self, backends, phases=PHASES):
        for backend in backends:
            self.parts.setdefault(id(backend), set()).update(phases)

    def not_guarded(self, what, why):
        self.said.append((what, why))


@pytest.mark.parametrize(("name", "args", "fields", "config", "window", "partly"), FEATURES)
def test_the_line_says_which_phases_are_judged_in_part(name, args, fields, config, window, partly):
    backend, guard, of = SimpleNamespace(fa_impl_ver=3, **fields), Guard(), adapter(name)
    backend.sliding_window_size = window
    swa = SimpleNamespace(swa_kv_pool=object()) if fields.get("swa") else SimpleNamespace()
    runner = SimpleNamespace(
        server_args=SimpleNamespace(**args), model_config=SimpleNamespace(**config),
        sliding_window_size=window, token_to_kv_pool=swa, page_size=4,
    )  # fmt: skip
    of.learn(backend, runner, guard)
    scheduler = SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(attn_backend=backend)),
        draft_worker=SimpleNamespace(draft_attn_backend=backend),
    )
    served = phases.of(scheduler, {id(backend): of}, guard.parts)
    assert " ".join(p.name for p in served if p.in_part and p.guarded) == partly
    line = phases.line(served)
    assert ("all guarded" in line) is (not partly and len(of.phases) == 4)
    # MLA's fetched prefix is the one thing that a limit tells only when it comes.
    assert bool(guard.said) is (bool(partly) and not {"use_mla", "enable_chunk_kv"} & fields.keys())


def test_each_adapter_is_asked():
    assert {name for name, *_ in FEATURES} == {a.name for a in adapters()}


FA3 = {
    "prefill": {"mode": "EXTEND"}, "decode": {"mode": "DECODE"}, "mixed": {"mode": "MIXED"},
    "verify": {"mode": "TARGET_VERIFY", "spec_info": object()},
    "draft": {"mode": "DECODE", "spec_info": object()},
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "args"), [({}, {}), ({"topk": 4}, {}), ({"_kv_shard_pool": 1}, {}), ({}, MIXED)]
)
def test_of_fa3_just_what_the_line_leaves_out_is_not_judged(fields, args, tmp_path):
    it = Tables(tmp_path)
    vars(it.backend).update(fields)
    runner = SimpleNamespace(server_args=SimpleNamespace(disable_overlap_schedule=True, **args))
    it.tracer.after_backend_init(adapter("fa3"), it.backend, runner)
    told = set(it.tracer.in_part.get(id(it.backend), ()))
    left_out = set()
    for phase, how in FA3.items():
        if phase == "mixed" and not args:
            continue
        before = it.counted()
        it.forward(**how)
        if it.counted() == before:
            left_out.add("prefill" if phase == "mixed" else phase)
    assert told == left_out


@pytest.mark.parametrize(
    ("of", "fields"),
    [
        (None, {}),
        (None, {"is_multimodal": True}),
        (None, {"decode_uses_dequant_workspace": True}),
        (None, {"prefill_uses_dequant_workspace": True}),
        (None, {"enable_mis": True}),
        (MLA, {}),
    ],
)
def test_of_flashinfer_just_what_the_line_leaves_out_is_not_judged(of, fields, tmp_path):
    it = Lists(tmp_path, of or adapter("flashinfer"), sliding=of is None)
    vars(it.backend).update(fields)
    it.tracer.in_part.clear()
    window = 3 if of is None else None
    runner = SimpleNamespace(
        server_args=SimpleNamespace(disable_overlap_schedule=True), sliding_window_size=window
    )
    it.tracer.after_backend_init(it.of, it.backend, runner)
    told = set(it.tracer.in_part.get(id(it.backend), ()))
    ragged = not (fields.keys() & {"is_multimodal", "enable_mis"}) and of is None
    left_out = set()
    for phase, how in (("decode", {}), ("prefill", {"mode": "EXTEND", "ragged": ragged})):
        before, each = it.counted(), 2 if of is None else 1
        it.plan(**how).attend()
        if it.counted() - before < each:
            left_out.add(phase)
    assert told == left_out
