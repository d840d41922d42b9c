"""The parts said to be innocent: never more than was checked, in any combination of tracers."""

from __future__ import annotations

import dataclasses
import os
import socket
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from g4debug.backends import adapters
from g4debug.findings.status import Checked, Limit, TracerStatus
from g4debug.findings.steps import Recorder
from g4debug.settings import Settings
from g4debug.tracers.flight_recorder.completed_steps import REMEMBERED, Waited
from g4debug.tracers.flight_recorder.coredump import ENABLE, core_dump, ends_the_process
from g4debug.tracers.flight_recorder.coverage import (
    GUARDED,
    SUBJECTS,
    Death,
    innocence,
)
from g4debug.tracers.flight_recorder.tracer import FlightRecorder

COUNTED = {
    "page-table": "tables",
    "kv-allocator": "hand-outs",
    "pool-leak": "pages of the full pool",
    "spec-lifecycle": "hand-overs",
    "kv-integrity": "checksums of pages",
    "kv-writes": "locations",
    "prefix-cache": "pages handed out",
}


BOTH = "Page tables and the hand-outs and frees of KV pages"
LAST = 41  # the step of the last check


def part(name, count=7, **more):
    checked = (Checked(COUNTED[name], count, LAST),) if count and name in COUNTED else ()
    mode = "raise" if name in COUNTED else ""
    return TracerStatus(name, **{"mode": mode, "checked": checked, **more})


def death(**more):
    values = {"step": 42, "finished": 41, "replays": 0, "cuda": True, "backends": {}}
    return Death(**(values | more))


def said(tracers, **more):
    return innocence(death(**more), tracers)


ALL = [part(name) for name in (*COUNTED, "ledger", "step-recorder")]


def but(**changes):
    """All parts, some of them changed or left out (None)."""
    named = {name.replace("_", "-"): change for name, change in changes.items()}
    found = []
    for one in ALL:
        change = named.get(one.name, {})
        if change is not None:
            found.append(part(one.name, **change))
    return found


def test_all_is_well():
    assert said(ALL) == [
        f"{BOTH} are innocent up to step 41; look at the kernel.",
        "Counted last: the full pool in step 41; every page was somebody's then. Pages that were "
        "lost after that were not looked for.",
        "Checked, and nothing found: page-table: 7 tables (the last in step 41); kv-allocator: "
        "7 hand-outs (the last in step 41); pool-leak: 7 pages of the full pool (the last in step "
        "41); "
        "spec-lifecycle: 7 hand-overs (the last in step 41); kv-integrity: 7 checksums of pages "
        "(the last in step 41); kv-writes: 7 locations (the last in step 41); prefix-cache: 7 "
        "pages handed out (the last in step 41).",
        "Step 42 may not have been finished. The guard runs in front of the kernel, and what it "
        "left in host memory was read after the error: it names no bad cell. Whether the guard had "
        "run by then is not known.",
    ]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"count": 0}, "No pool was counted, so pages may be lost, or be free and in use at once."),
        (
            {
                "checked": (
                    Checked("censuses", 3, 40),
                    Checked("pages of the full pool", 30, 40),
                    Checked("pages of the swa pool", 20, 33),
                )
            },
            "Counted last: the full pool in step 40 and the swa pool in step 33; every page was "
            "somebody's then. Pages that were lost after that were not looked for.",
        ),
    ],
)
def test_lost_pages_are_innocent_only_of_what_was_counted(change, told):
    lines = said(but(pool_leak=change))
    assert lines[1] == told
    assert "Page tables and the hand-outs and frees of KV pages are innocent" in lines[0]


def test_without_a_census_nothing_is_said_of_lost_pages():
    lines = said(but(pool_leak=None))
    assert not any("ounted" in line for line in lines)
    assert "lost pages (pool-leak is not armed)" in lines[-1]


def test_replays_are_told_with_what_cannot_be_seen_in_them():
    captured = (Checked("tables captured in CUDA graphs", 24, 0), Checked("steps", 41, 41))
    lines = said(but(page_table={"checked": captured}), replays=30)
    assert "up to step 41 (30 of them CUDA-graph replays); look at the kernel." in lines[0]
    assert (
        "page-table: 24 tables captured in CUDA graphs (the last in step 0), 41 steps" in lines[2]
    )
    assert lines[-1].startswith("Not looked at: rows as short as padding in CUDA-graph replays")


def test_another_exception_is_no_kernels():
    assert said(ALL, cuda=False)[0].endswith("up to step 41; look at HISTORY.")


def test_phases_without_a_guard():
    backends = {"prefill": "aiter", "verify": "aiter", "decode": "trtllm_mha"}
    lines = said(ALL, backends=backends)
    assert lines[0].startswith(
        "Page tables of trtllm_mha and the hand-outs and frees of KV pages are innocent up to step "
        "41"
    )
    assert lines[-1] == (
        "Not looked at: the page tables of prefill and verify (attention backend aiter)."
    )


def test_both_halves_of_a_split_backend_are_guarded():
    backends = {"prefill": "triton", "verify": "triton", "decode": "trtllm_mha"}
    lists = (Checked("token lists captured in CUDA graphs", 24, 0), Checked("steps", 41, 41))
    lines = said(but(page_table={"checked": lists}), backends=backends, replays=30)
    assert lines[0].startswith(
        "Page tables and the hand-outs and frees of KV pages are innocent up to step 41"
    )
    assert not any("attention backend" in line for line in lines)
    assert lines[-1].startswith("Not looked at: rows as short as padding in CUDA-graph replays")


REFUSED = (
    Limit(
        "nothing that the attention backend triton hands to its kernels is judged", "never run", 0
    ),
    Limit("nothing that attention reads in prefill is judged", "it runs on TritonAttnBackend", 0),
    Limit("nothing that attention reads in verify is judged", "it runs on TritonAttnBackend", 0),
)


def test_a_backend_with_an_adapter_that_is_not_judged_here_is_not_innocent():
    """As on a GPU on which it was never run: trtllm_mha alone is judged, and that in full."""
    backends = {"prefill": "triton", "verify": "triton", "decode": "trtllm_mha"}
    lines = said(but(page_table={"limits": REFUSED}), backends=backends)
    assert lines[0].startswith(
        "Page tables of trtllm_mha and the hand-outs and frees of KV pages are innocent up to step "
        "41"
    )
    assert "page-table is limited: nothing that the attention backend triton hands" in lines[-1]
    (told,) = said(but(page_table={"limits": REFUSED}))[:1]  # it is not known what runs where
    assert told.startswith("No page table that was checked named a page outside of its pool")
    ranges = (*REFUSED, Limit("ranges only", "pages change hands", 0))
    lines = said(but(page_table={"limits": ranges}), backends=backends)
    assert lines[0].startswith("No page table of trtllm_mha named a page outside of its pool")


def test_the_guarded_backends_are_those_with_an_adapter():
    assert set(GUARDED) == {adapter.name for adapter in adapters()}


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        (
            {"page_table": {"limits": (Limit("ranges only", "why", 0),)}},
            "No page table named a page outside of its pool up to step 41. Whether the pages were "
            "the right ones was not checked, or not always.",
        ),
        (
            {"kv_allocator": None},
            "Page tables are innocent up to step 41; the KV allocators were not checked, or not "
            "always.",
        ),
        (
            {"ledger": {"limits": (Limit("x", "y", 0),)}},
            "Page tables are innocent up to step 41; the KV allocators were not checked, or not "
            "always.",
        ),
        (
            {"page_table": {"off": "the device is lost", "off_step": 42}},
            "The KV allocators are innocent up to step 41; page tables were not checked, or not "
            "always.",
        ),
        (
            {"page_table": {"dead": ("attn.trtllm_mha.layer_page_table: f is there instead",)}},
            "The KV allocators are innocent up to step 41; page tables were not checked, or not "
            "always.",
        ),
        (
            {"page_table": {"limits": (Limit("its hook poll is off", "it failed", 3),)}},
            "The KV allocators are innocent up to step 41; page tables were not checked, or not "
            "always.",
        ),
        (
            {"page_table": {"count": 0}},
            "The KV allocators are innocent up to step 41; page tables were not checked, or not "
            "always.",
        ),
        (  # one table was checked, and nothing after that
            {"page_table": {"checked": (Checked("tables", 1, 3), Checked("steps", 41, 41))}},
            f"{BOTH} are innocent up to step 3; look at the kernel.",
        ),
        (
            {"page_table": None, "kv_allocator": {"off": "why"}},
            "Neither page tables nor KV pages were checked, so either may be guilty.",
        ),
    ],
)
def test_it_says_no_more_than_was_checked(changes, verdict):
    lines = said(but(**changes))
    assert lines[0] == verdict
    if "innocent up to step 3;" not in verdict:
        assert lines[-1].startswith("Not looked at: ")


def test_graphs_without_a_guard_are_not_innocent():
    lines = said(ALL, replays=30)
    assert lines[0] == (
        "The KV allocators are innocent up to step 41 (30 of them CUDA-graph replays); page tables "
        "were not checked, or not always."
    )
    assert lines[-1] == "Not looked at: 30 replays of CUDA graphs, in which there is no guard."


def test_before_the_first_step_was_waited_for_nothing_is_known():
    lines = said(ALL, finished=0, step=1)
    assert lines[0] == "Nothing is known to be innocent: the device had finished no step yet."
    assert "Step 1 may not have been finished." in lines[3]


def test_the_flight_recorder_alone_says_nothing():
    assert said([TracerStatus("flight-recorder", mode="raise"), part("step-recorder")]) == []


LIMITS = st.sampled_from([(), (Limit("ranges only", "w", 0),), (Limit("its hook f is off", "w"),)])
PARTS = st.fixed_dictionaries(
    {
        name: st.none()
        | st.fixed_dictionaries(
            {
                "count": st.integers(0, 3),
                "limits": LIMITS,
                "off": st.sampled_from(["", "why"]),
                "dead": st.sampled_from([(), ("a site: why",)]),
            }
        )
        for name in (*COUNTED, "ledger", "step-recorder")
    }
)


@given(PARTS, st.integers(0, 50), st.integers(0, 3))
def test_innocence_needs_a_sound_tracer_that_has_checked(states, finished, behind):
    tracers = [part(name, **s) for name, s in states.items() if s is not None]
    lines = said(tracers, finished=finished, step=finished + behind)
    armed = {t.name: t for t in tracers}
    if not set(armed) & set(SUBJECTS):
        assert lines == []
        return

    def sound(name, count=True):
        found = armed.get(name)
        return found is not None and found.sound and bool(found.checked or not count)

    tables, pages = sound("page-table"), sound("kv-allocator") and sound("ledger", False)
    claims = [x for x in lines if "innocent up to" in x]
    assert len(claims) == (bool(finished) and (tables or pages))
    for claim in claims:
        assert f"up to step {min(finished, LAST) if tables else finished}" in claim
        guiltless = claim.partition(" innocent ")[0]
        assert ("Page tables" in guiltless) is tables
        assert ("KV pages" in guiltless or "KV allocators" in guiltless) is pages
    # Whatever is not sound is named among what was not looked at.
    rest = next((x for x in lines if x.startswith("Not looked at: ")), "")
    for name in SUBJECTS:
        if not sound(name):
            assert name in rest


# -- which step the device has finished ----------------------------------------------------------


class Result:
    def __init__(self, replay, copied=False):
        self.can_run_cuda_graph = replay
        self.copy_done = object() if copied else None


class Server:
    """run_batch and process_batch_result as SGLang calls them, with the hooks on them."""

    def __init__(self, algorithm=None, overlap=False):
        self.recorder = Recorder(4)
        args = SimpleNamespace(speculative_algorithm=algorithm)
        self.recorder.attach(SimpleNamespace(server_args=args, enable_overlap=overlap))
        self.waited = Waited(self.recorder)

    def run(self, replay=False, copied=False):
        self.recorder.count()
        return self.waited.launched(Result(replay, copied), "scheduler", "batch")

    def process(self, result, mode="decode"):
        forward_mode = SimpleNamespace(
            is_decode=lambda: mode == "decode", is_extend=lambda: mode == "extend"
        )
        batch = SimpleNamespace(forward_mode=forward_mode)
        assert self.waited.processed("returned", "scheduler", batch, result) == "returned"


def test_a_step_is_finished_when_its_result_was_processed():
    server = Server()
    assert server.waited.last == 0
    first = server.run()
    assert server.waited.last == 0
    server.process(first, "extend")
    assert server.waited.last == 1
    server.process(server.run(replay=True))
    server.run(replay=True)
    assert (server.waited.last, server.waited.replays) == (2, 1)


def test_with_overlap_the_step_that_is_processed_is_not_the_last_one():
    server = Server()
    first, second = server.run(), server.run()
    server.process(first)
    assert server.waited.last == 1
    third = server.run()
    server.process(second)
    assert server.waited.last == 2
    server.process(third)
    assert server.waited.last == 3


def test_a_draft_may_run_behind_the_tokens():
    server = Server("FROZEN_KV_MTP")
    for finished in (0, 1, 2):
        server.process(server.run())
        assert server.waited.last == finished


def test_with_overlap_a_result_is_copied_behind_the_draft():
    """And SGLang waits for that copy, so the whole step is finished."""
    server = Server("FROZEN_KV_MTP", overlap=True)
    first, second = server.run(copied=True), server.run(copied=True)
    server.process(first)
    assert server.waited.last == 1
    server.run(copied=True)
    server.process(second)
    assert server.waited.last == 2


@pytest.mark.parametrize(("overlap", "copied"), [(True, False), (False, True)])
def test_a_result_that_was_copied_in_another_way_says_nothing_of_the_draft(overlap, copied):
    server = Server("FROZEN_KV_MTP", overlap)
    for finished in (0, 1, 2):
        server.process(server.run(copied=copied))
        assert server.waited.last == finished


def test_what_was_not_waited_for_does_not_count():
    server = Server()
    server.process(server.run(), "idle")
    server.process(object())  # a result that no run_batch returned
    assert server.waited.last == 0
    lost = server.run()
    running = [server.run() for _ in range(REMEMBERED)]
    server.process(lost)
    assert server.waited.last == 0
    server.process(running[0])
    assert server.waited.last == 3


# -- the core dump -------------------------------------------------------------------------------

ON = {"CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1"}


def test_a_core_dump_of_this_process_is_named(tmp_path):
    named = {**ON, "CUDA_COREDUMP_FILE": f"{tmp_path}/[a]*/core_%h.%p.%t"}
    folder = tmp_path / "[a]*"
    folder.mkdir()
    host = socket.gethostname()
    ours = folder / f"core_{host}.123.1700000000"
    for path in (ours, folder / f"core_{host}.1234.17", folder / "core_x.12.17"):
        path.write_text("")
    assert core_dump(named, 123, since=0) == f"CUDA core dump: {ours}"
    # An older one is of another process that had this number.
    assert core_dump(named, 123, since=ours.stat().st_mtime + 1).startswith("CUDA core dump: none")
    for name, is_ours in ((host, True), ("other", False)):
        newer = folder / f"core_{name}.123.18"
        newer.write_text("")
        os.utime(newer, (ours.stat().st_mtime + 9,) * 2)
        # Another host may have the same folder, and a process with this number.
        assert core_dump(named, 123, since=0) == f"CUDA core dump: {newer if is_ours else ours}"
        newer.unlink()


def test_without_the_drivers_variable_nothing_is_said(tmp_path):
    assert core_dump({"CUDA_COREDUMP_FILE": str(tmp_path)}, 1, 0) == ""
    assert core_dump({"CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "0"}, 1, 0) == ""


def test_the_drivers_own_name_is_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = f"core_1700000000_{socket.gethostname()}_77.nvcudmp"
    (tmp_path / name).write_text("")
    assert core_dump(ON, 77, 0).endswith(f"/{name}")
    assert core_dump(ON, 78, 0) == (
        f"CUDA core dump: none yet; the driver was told to write it to {tmp_path}/"
        "core_%t_%h_%p.nvcudmp"
    )


@pytest.mark.parametrize(
    ("mode", "folder", "goes"),
    [("autopsy", None, True), ("keep", None, False), ("autopsy", "/crashes", False)],
)
def test_a_core_dump_is_said_to_go_only_if_it_goes(tmp_path, monkeypatch, mode, folder, goes):
    told = {**ON, "CUDA_COREDUMP_FILE": f"{tmp_path}/g4debug-core-%h-0a-%p-%t.nvcudmp"}
    monkeypatch.setattr(os, "environ", told)
    made = FlightRecorder.__new__(FlightRecorder)
    settings = dataclasses.replace(Settings(), core=mode, cpu=False)
    made.context = SimpleNamespace(settings=settings)
    args = SimpleNamespace(crash_dump_folder=folder)
    made.recorder = SimpleNamespace(scheduler=SimpleNamespace(server_args=args))
    made.armed_at = 0
    (line,) = made._core_dump()
    assert line.startswith("CUDA core dump: none yet")
    assert ("It is removed" in line) == goes


def test_sglangs_own_switch_is_understood(sglang, tmp_path, monkeypatch):
    """SGLang turns SGLANG_CUDA_COREDUMP=1 into the driver's variables, in its own environment."""
    from sglang.srt.debug_utils import cuda_coredump

    for name in ("CUDA_ENABLE_COREDUMP_ON_EXCEPTION", "CUDA_COREDUMP_FILE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("SGLANG_CUDA_COREDUMP_DIR", str(tmp_path / "core"))
    monkeypatch.setattr(os, "environ", os.environ.copy())
    cuda_coredump._inject_env()
    core = tmp_path / "core" / f"cuda_coredump_{socket.gethostname()}.5.17"
    core.write_text("")
    assert core_dump(os.environ, 5, 0) == f"CUDA core dump: {core}"


def test_sglangs_results_can_be_followed(sglang):
    """Weakly, because they hold device memory."""
    from sglang.srt.managers.scheduler import EmbeddingBatchResult, GenerationBatchResult

    server = Server()
    for cls in (GenerationBatchResult, EmbeddingBatchResult):
        result = cls.__new__(cls)
        server.recorder.count()
        server.waited.launched(result, "scheduler", "batch")
        server.process(result)
    assert server.waited.last == 2


def test_a_core_dump_without_skip_abort_costs_ours() -> None:
    flags = "CUDA_COREDUMP_GENERATION_FLAGS"
    assert ends_the_process(ON)
    assert ends_the_process({**ON, flags: "skip_global_memory"})
    assert not ends_the_process({**ON, flags: "skip_global_memory, skip_abort"})
    assert not ends_the_process({flags: ""})


def test_a_crash_in_a_test_waits_for_a_core_dump_only_if_that_test_asked(arm):
    """Arming tells the CUDA driver in the environment. With no driver here, each crash in a later
    test of this process would wait 8 s for a core dump that never comes."""
    assert ENABLE not in os.environ
    arm(SGLANG_TRTLLM_MHA_DEBUG="1", G4DEBUG_MODE="log")
    assert os.environ[ENABLE] == "1"


def test_what_that_one_has_told_the_driver_is_gone():
    assert ENABLE not in os.environ
