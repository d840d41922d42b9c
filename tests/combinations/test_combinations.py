"""Which combination a server runs, told from SGLang's own classes, and which were run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from g4debug import backends, speculation
from g4debug.backends import phases
from g4debug.combinations import beside, run, seen
from g4debug.combinations.refusal import refusal
from g4debug.combinations.run import Run
from g4debug.combinations.seen import Combination
from g4debug.findings.record import Evidence, Finding, Location
from g4debug.findings.steps import Recorder
from g4debug.hooking import targets
from g4debug.hooking.hooks import Hooks
from g4debug.settings import Settings
from g4debug.tracers import gate as gates
from g4debug.tracers.base import Context, Tracer
from g4debug.tracers.gate import Gate
from g4debug.tracers.page_table.watch import RangeGuard
from g4debug.trapping.describe import Describer
from g4debug.trapping.trap import Trap

NEWEST = "0.5.23"
LLAMA = Combination("LlamaForCausalLM", seen.MHA, seen.NO_WINDOW, "MHATokenToKVPool")
GEMMA = Combination(
    "Gemma4ForCausalLM", seen.MHA, seen.SWA_POOL, "SWAKVPool of MHATokenToKVPool",
    ("triton", "trtllm_mha"), "FROZEN_KV_MTP", seen.ONE_PATH,
)  # fmt: skip

EAGLE3 = Combination(
    *(LLAMA.architecture, LLAMA.attention, LLAMA.window, LLAMA.pool),
    ("triton",), "EAGLE3", seen.ONE_PATH,
)  # fmt: skip
BOTH, SPLIT = ("trtllm_mha", "triton"), "triton and trtllm_mha"
PLAIN, CPU = (seen.NO_DRAFT,), {NEWEST: (targets.CPU,)}
# The real table grows, and what is not in it today may have been run tomorrow.
TABLE = (
    Run(
        "Gemma-4", GEMMA.attention, GEMMA.window, GEMMA.pool, (*BOTH, SPLIT),
        (*PLAIN, "FROZEN_KV_MTP"), {NEWEST: (targets.CPU, targets.H200)},
    ),
    Run(
        "Gemma-4", GEMMA.attention, GEMMA.window, GEMMA.pool, (SPLIT,), PLAIN, CPU,
        beside=(beside.TENSOR,),
    ),
    Run("gpt-oss", seen.SINKS, GEMMA.window, GEMMA.pool, BOTH, PLAIN, CPU),
    Run("Llama", seen.MHA, seen.NO_WINDOW, LLAMA.pool, (*BOTH, "fa3"), PLAIN, CPU),
    Run("Llama", seen.MHA, seen.NO_WINDOW, LLAMA.pool, BOTH, ("EAGLE3", "NGRAM, a tree"), CPU),
    Run("DeepSeek", seen.MLA, seen.NO_WINDOW, "MLATokenToKVPool", ("triton",), PLAIN, CPU),
)  # fmt: skip


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setattr(run, "RUNS", TABLE)


def with_(it: Combination, **fields: object) -> Combination:
    return Combination(**{**vars(it), **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "cpu", "gpu"),
    [
        (GEMMA, True, True),
        (with_(GEMMA, draft="EAGLE"), False, False),
        (with_(GEMMA, attention=seen.SINKS, draft=seen.NO_DRAFT), False, False),
        (
            with_(GEMMA, attention=seen.SINKS, draft=seen.NO_DRAFT, backends=("triton",)),
            True,
            False,
        ),
        (with_(LLAMA, backends=("triton",), draft=seen.NO_DRAFT), True, False),
        (with_(LLAMA, backends=("fa3",), draft=seen.NO_DRAFT), True, False),
        # Of one class, and not the same.
        (with_(LLAMA, backends=("fa4",), draft=seen.NO_DRAFT), False, False),
        # Each was run, and they were not run together; or the other way round.
        (with_(LLAMA, backends=("triton", "trtllm_mha"), draft=seen.NO_DRAFT), False, False),
        (with_(GEMMA, backends=("trtllm_mha", "triton")), False, False),
        (with_(GEMMA, paths=seen.TREE), False, False),
        (with_(LLAMA, backends=("triton",), draft="EAGLE3", paths=seen.ONE_PATH), True, False),
        (with_(LLAMA, backends=("triton",), draft="EAGLE3", paths=seen.TREE), False, False),
        (with_(LLAMA, backends=("triton",), draft="NGRAM", paths=seen.TREE), True, False),
        (with_(LLAMA, backends=("triton",), draft="NGRAM", paths=seen.ONE_PATH), False, False),
        (with_(GEMMA, beside=(beside.TENSOR,)), False, False),
        (with_(GEMMA, beside=(beside.TENSOR,), draft=seen.NO_DRAFT), True, False),
        (with_(GEMMA, beside=(beside.TENSOR, beside.FP8), draft=seen.NO_DRAFT), False, False),
        (with_(EAGLE3, draft_pool=LLAMA.pool), True, False),
        (with_(EAGLE3, draft_pool=GEMMA.pool), False, False),
        (with_(GEMMA, draft_pool=seen.NO_KV), True, True),
        (with_(LLAMA, backends=("triton",), draft="STANDALONE"), False, False),
        (with_(LLAMA, window=seen.CHUNKS), False, False),
        (with_(LLAMA, attention=seen.LINEAR, pool="HybridLinearKVPool"), False, False),
        (with_(LLAMA, attention=seen.MLA, pool="MLATokenToKVPool", backends=("triton",)), 1, 0),
        (with_(LLAMA, attention=seen.MLA, pool="DSATokenToKVPool"), False, False),
        (with_(LLAMA, attention=seen.ENCODER), False, False),
        # Before the weights are there.
        (Combination(), True, True),
        (Combination(attention=seen.MHA, draft=seen.NO_DRAFT), True, True),
        (Combination(attention=seen.MHA, window=seen.NO_WINDOW), True, False),
        (Combination(attention=seen.MHA, draft="EAGLE3"), True, False),
        (Combination(attention=seen.MHA, draft="EAGLE3", paths=seen.TREE), False, False),
        (Combination(attention=seen.MHA, draft="EAGLE"), False, False),
        (Combination(beside=("LoRA",)), False, False),
    ],
)
def test_what_was_run(table, found, cpu, gpu):
    assert run.was_run(found, NEWEST, on_cpu=True) == cpu
    assert run.was_run(found, NEWEST, on_cpu=False) == gpu
    assert not run.was_run(found, "0.5.99", on_cpu=True)


@pytest.mark.parametrize("release", ["0.5.12.post1", "0.5.15.post1", NEWEST])
@pytest.mark.parametrize("draft", [seen.NO_DRAFT, "FROZEN_KV_MTP"])
@pytest.mark.parametrize("backends", [("triton",), ("trtllm_mha",), GEMMA.backends])
def test_gemma_4_is_refused_on_what_no_gpu_ran_only(release, draft, backends):
    found = with_(GEMMA, draft=draft, backends=backends)
    at_start = Combination(GEMMA.architecture, seen.MHA, draft=draft)
    for on_cpu in (True, False):
        assert run.was_run(at_start, release, on_cpu)
    assert run.was_run(found, release, True)
    # Before 0.5.23 trtllm_mha does not prefill on sm90.
    never = {("0.5.12.post1", ("trtllm_mha",)), ("0.5.15.post1", ("trtllm_mha",))}
    if draft == seen.NO_DRAFT:
        never |= {("0.5.15.post1", ("triton",))}
    assert run.was_run(found, release, False) is ((release, backends) not in never)


def test_each_release_of_the_tracers_has_a_combination():
    for release, tracers in targets.RUN.items():
        for on_cpu in (True, False):
            places = {p for where in tracers.values() for p in where}
            wanted = any((p == targets.CPU) == on_cpu for p in places)
            assert bool(run.there(release, on_cpu)) == wanted, release


def layer(**fields: object) -> torch.nn.Module:
    found = type("RadixAttention", (torch.nn.Module,), {})()
    vars(found).update(fields)
    return found


def scheduler(*layers, pool="MHATokenToKVPool", arch="MHA", sinks=False, inner=None):
    model = torch.nn.ModuleList(layers)
    if sinks:
        model.register_parameter("sinks", torch.nn.Parameter(torch.zeros(2)))
    kv = type(pool, (), {})()
    if inner:
        kv.full_kv_pool, kv.swa_kv_pool = (type(inner, (), {})() for _ in range(2))
    config = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=["Some"]),
        attention_arch=SimpleNamespace(name=arch),
    )
    runner = SimpleNamespace(model=model, model_config=config, token_to_kv_pool=kv)
    return SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner))


@pytest.mark.parametrize(
    ("made", "attention", "window", "pool"),
    [
        (scheduler(layer(sliding_window_size=-1)), seen.MHA, seen.NO_WINDOW, "MHATokenToKVPool"),
        (scheduler(layer(sliding_window_size=9)), seen.MHA, seen.ONE_POOL, "MHATokenToKVPool"),
        (
            scheduler(layer(), pool="SWAKVPool", inner="A", sinks=True),
            seen.SINKS, seen.SWA_POOL, "SWAKVPool of A",
        ),
        (
            scheduler(layer(use_irope=True), pool="SWAKVPool", inner="A"),
            seen.MHA, seen.CHUNKS, "SWAKVPool of A",
        ),
        (scheduler(layer(), arch="MLA", pool="M"), seen.MLA, seen.NO_WINDOW, "M"),
        (
            scheduler(layer(), pool="HybridLinearKVPool"),
            seen.LINEAR, seen.NO_WINDOW, "HybridLinearKVPool",
        ),
        (
            scheduler(layer(attn_type=SimpleNamespace(value="encoder_only"))),
            seen.ENCODER, seen.NO_WINDOW, "MHATokenToKVPool",
        ),
        (
            scheduler(layer(is_cross_attention=True)),
            seen.ENCODER, seen.NO_WINDOW, "MHATokenToKVPool",
        ),
    ],
)  # fmt: skip
def test_the_class_of_a_model(sglang, made, attention, window, pool):
    found = seen.running(made)
    assert (found.attention, found.window, found.pool) == (attention, window, pool)


def test_sglangs_own_layers_and_algorithms_are_read(sglang):
    """The names that are read are those of the installed SGLang."""
    from sglang.srt.configs.model_config import AttentionArch
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    made = RadixAttention(2, 8, 1.0, 2, 0, sliding_window_size=7, use_irope=True)
    assert seen._attention_layers(torch.nn.ModuleList([made])) == [made]
    assert made.use_irope
    assert made.sliding_window_size == 7
    assert AttentionType.ENCODER_ONLY.value == "encoder_only"
    assert {seen.MHA, seen.MLA} <= {arch.name for arch in AttentionArch}
    for name, draft in ((None, seen.NO_DRAFT), ("EAGLE3", "EAGLE3"), ("NGRAM", "NGRAM")):
        holder = SimpleNamespace(spec_algorithm=SpeculativeAlgorithm.from_string(name))
        for width, paths in ((None, ""), (1, seen.ONE_PATH), (4, seen.TREE)):
            holder.server_args = SimpleNamespace(speculative_eagle_topk=width)
            holder.draft_worker = SimpleNamespace(primary_draft_kv_pool=SimpleNamespace())
            pool = {"EAGLE3": "SimpleNamespace", "NGRAM": seen.NO_KV}.get(draft, "")
            known = speculation.of(holder) is not None
            assert seen._draft_pool(holder) == (pool if known or not pool else seen.NO_KV)
            found = seen.running(holder)
            assert (found.draft, found.paths) == (draft, "" if name is None else paths)


@pytest.mark.parametrize(
    ("given", "pool", "names"),
    [
        ({}, None, ()),
        ({"tp_size": 1, "pp_size": 1, "kv_cache_dtype": "auto", "enable_lora": False}, None, ()),
        ({"tp_size": 2, "enable_dp_attention": True}, None, (beside.TENSOR, "DP attention")),
        ({"attn_dp_size": 2}, None, ("DP attention",)),
        ({"pp_size": 2}, None, (beside.PIPELINE,)),
        ({"attn_cp_size": 2}, None, ("context parallelism",)),
        ({"dcp_size": 2}, None, ("decode context parallelism",)),
        ({"enable_two_batch_overlap": True}, None, ("two-batch overlap",)),
        ({"enable_unified_memory": True}, None, ("a unified memory pool",)),
        ({"dllm_algorithm": "LowConfidence"}, None, ("a diffusion model's algorithm",)),
        ({"lora_paths": ["a"]}, None, ("LoRA",)),
        ({"kv_cache_dtype": "fp8_e4m3"}, None, (beside.FP8,)),
        # SGLang took it from the checkpoint.
        ({}, SimpleNamespace(dtype=torch.float8_e4m3fn), (beside.FP8,)),
        ({}, SimpleNamespace(full_kv_pool=SimpleNamespace(dtype=torch.bfloat16)), ()),
    ],
)
def test_what_else_there_is(given, pool, names):
    assert beside.beside(SimpleNamespace(**given), pool) == names
    assert beside.beside(None, pool) == (beside.NOT_READ,)


def test_a_backend_has_the_name_of_its_class_and_not_the_one_that_was_typed(sglang):
    """One class of SGLang's serves FlashAttention 3 and 4; TboAttnBackend serves what was typed."""
    from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend

    flash = FlashAttentionBackend.__new__(FlashAttentionBackend)
    for backend, name in ((flash, "fa4"), (SimpleNamespace(), "SimpleNamespace")):
        flash.fa_impl_ver = 4
        runner = SimpleNamespace(attn_backend=backend)
        given = SimpleNamespace(attention_backend="fa3")
        serving = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner), server_args=given)
        assert phases.named(serving) == (name,)
    flash.fa_impl_ver = 3
    runner.attn_backend = flash
    assert phases.named(serving) == ("fa3",)


def judging(**settings: object) -> Gate:
    recorder, told = Recorder(1), Settings(**{"mode": "raise", **settings})  # type: ignore[arg-type]
    trap = Trap(told, lambda *a: None)  # type: ignore[arg-type,return-value]
    tracers = [Tracer("page-table", "", lambda c: None), Tracer("a", "", print, judges=False)]
    return Gate(Context("steps", Hooks(), told, recorder, trap), tracers, on_cpu=True)


@pytest.mark.parametrize("mode", ["raise", "contain"])
def test_what_was_never_run_is_refused_with_both_ways_on(monkeypatch, sglang, table, mode):
    found = with_(LLAMA, draft="EAGLE", backends=("triton",), paths=seen.ONE_PATH)
    monkeypatch.setattr(gates, "running", lambda scheduler: found)
    with pytest.raises(SystemExit) as error:
        judging(mode=mode).after_scheduler(None, SimpleNamespace())
    said = str(error.value)
    assert "LlamaForCausalLM (MHA, no window, MHATokenToKVPool) on triton, draft EAGLE" in said
    assert len(said) < 650
    assert f"G4DEBUG_MODE={mode} could harm" in said
    assert "G4DEBUG_MODE=log" in said
    assert "G4DEBUG_NOT_RUN_ON_THIS_RELEASE=1" in said


@pytest.mark.parametrize("way", [{"mode": "log"}, {"not_run_on_this_release": True}])
def test_both_ways_on_start_and_the_status_says_it(sglang, capsys, way):
    gate = judging(**way)
    gate.after_scheduler(None, scheduler(layer(use_irope=True)))
    status = gate.context.recorder.status
    (limit,) = status.part("page-table").record().limits
    assert limit.what == "it may be wrong"
    assert "this server runs Some (MHA, chunked windows (irope), " in capsys.readouterr().err
    assert status.serves.startswith("Some (MHA, ")
    finding = Finding("page-table", "page-oob", "site", "headline", Location(), "", "")
    record = Describer(gate.context.recorder)(finding, Evidence())
    assert record.geometry["serves"] == status.serves


WHOLE = with_(LLAMA, backends=("triton",), draft=seen.NO_DRAFT)


@pytest.mark.parametrize(
    ("lacks", "what"),
    [
        ({}, ""),
        ({"attention": ""}, "the kind of attention"),
        ({"window": ""}, "the windows"),
        ({"pool": ""}, "the KV pool"),
        ({"backends": ()}, "the attention backends"),
        ({"draft": ""}, "the draft"),
        ({"draft": "EAGLE3", "draft_pool": LLAMA.pool}, "whether the draft has one path"),
        ({"draft": "EAGLE3", "paths": seen.ONE_PATH}, "the draft's KV pool"),
    ],
)
def test_what_is_not_known_of_a_whole_server_is_refused(monkeypatch, table, lacks, what):
    monkeypatch.setattr(targets, "sglang_version", lambda: NEWEST)
    found = with_(WHOLE, **lacks)
    if found.attention:  # where there is a pool, that is known, too
        assert refusal(found, Settings(), on_cpu=True) == ""
    said = refusal(found, Settings(mode="raise"), on_cpu=True, whole=True)
    assert (f"Not known of it: {what}. " in said and "G4DEBUG_MODE=log" in said) is bool(what)


@pytest.mark.parametrize("mode", ["raise", "contain"])
@pytest.mark.parametrize("fails", ["running", "refusal"])
def test_a_failure_of_the_gate_is_a_refusal(monkeypatch, sglang, mode, fails):
    def failing(*args, **kwargs):
        raise ValueError("of the gate")

    monkeypatch.setattr(gates, fails, failing)
    gate = judging(mode=mode)
    hook = gate.context.isolate(gate.after_scheduler, keeps=True)
    with pytest.raises(SystemExit) as error:
        hook("result", SimpleNamespace())
    said = str(error.value)
    assert said.startswith("g4debug: what this server runs cannot be told")
    assert "ValueError: of the gate" in said
    assert "G4DEBUG_MODE=log" in said
    assert "G4DEBUG_NOT_RUN_ON_THIS_RELEASE=1" in said
    for way in ({"mode": "log"}, {"not_run_on_this_release": True}):
        gate = judging(**way)
        assert gate.after_scheduler("result", SimpleNamespace()) == "result"
        (limit,) = gate.context.recorder.status.part("page-table").record().limits
        assert limit.what == "it may be wrong"


def test_what_fails_before_the_weights_are_there_is_asked_again(monkeypatch, sglang):
    monkeypatch.setattr(gates, "planned", lambda *args: 1 / 0)
    gate = judging()
    gate.before_runner(None, SimpleNamespace())
    with pytest.raises(SystemExit):
        gate.after_scheduler(None, SimpleNamespace())


def test_watch_is_refused_nowhere_and_corrects_nothing_there(sglang):
    gate = judging(mode="contain", debug="watch")
    guard = RangeGuard(gate.context)
    guard.mailbox((0, "full"), torch.zeros(1))  # as when a CUDA graph is captured
    assert guard.trap.corrects.tolist() == [1]
    gate.after_scheduler(None, scheduler(layer(use_irope=True)))
    record = gate.context.recorder.status.part("page-table").record()
    assert not guard.contain
    assert guard.trap.corrects.tolist() == [0]  # a guard in such a graph reads it
    assert record.mode == "log"
    assert [limit.what for limit in record.limits] == ["it may be wrong"]


def test_a_server_that_only_keeps_records_is_never_refused(sglang):
    gate = judging()
    gate.tracers = []
    gate.after_scheduler(None, scheduler(layer(use_irope=True)))


@pytest.mark.parametrize("release", [NEWEST])
def test_the_message_names_what_was_run_with_such_a_model(monkeypatch, table, release):
    monkeypatch.setattr(targets, "sglang_version", lambda: release)
    said = refusal(with_(LLAMA, draft="EAGLE"), Settings(), on_cpu=True)
    assert "such a model was run with no draft on trtllm_mha, triton, fa3; EAGLE3 on " in said
    said = refusal(with_(GEMMA, beside=("LoRA",)), Settings(), on_cpu=True)
    assert "draft FROZEN_KV_MTP (one path), with LoRA. That was never run" in said
    assert "no draft with tensor parallelism on triton and trtllm_mha" in said
    said = refusal(with_(LLAMA, attention=seen.LINEAR), Settings(), on_cpu=True)
    assert "run were Gemma-4 (MHA, windows in an SWA pool); " in said
    assert refusal(with_(GEMMA), Settings(), on_cpu=False) == ""


def test_what_a_gpu_ran_is_judged_there_by_its_adapters():
    """The gate would open, and page-table or spec-lifecycle stay closed behind it."""
    closed = []
    for one in run.RUNS:
        for release, places in one.at.items():
            if not targets.ran_on(places, False):
                continue
            closed += [
                (release, name)
                for name in " and ".join(one.backends).split(" and ")
                if not targets.ran_on(backends.adapter(name).run.get(release, ()), False)
            ]
            closed += [
                (release, worker.name)
                for worker in speculation.adapters()
                if worker.name in one.drafts and release in worker.run
                if not targets.ran_on(worker.run[release], False)
            ]
    assert not closed
