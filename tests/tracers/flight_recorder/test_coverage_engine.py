"""The parts that a dead engine's dump calls innocent, on real schedulers with a dying device."""

from __future__ import annotations

import re
from pathlib import Path

import installed_plugin
import pytest
from real_engine import ENGINE, Run, WhenAsked, drive

from g4debug.hooking import targets

pytestmark = [*ENGINE, pytest.mark.once("what it tests is the same code on every release")]
HERE = Path(__file__).parent
DIE_AT = 9
# Behind it SGLang changes what a forward still reads, so page-table judges all under overlap, too.
BARRIER = targets.path("scheduler.war_barrier") is not None


def free() -> tuple[str, str, str]:
    """Where this release's pages come back: the site, the method and its file."""
    site = "pool.free" if targets.path("pool.release") is None else "pool.release"
    module, _, name = targets.path(site).rsplit(".", 2)
    return site, name, f"{module.rpartition('.')[2]}.py"


def dying(folder: Path, mode: str, **environ: str) -> Run:
    """Run the engine with the plugin ``dying`` until its device is dead."""
    installed_plugin.install(folder / "site", "dying", "dying:register")
    environ = {"PYTHONPATH": installed_plugin.path(folder / "site", HERE), **environ}
    return drive(folder, str(HERE / "drive_dying.py"), mode, DIE_AT=str(DIE_AT), **environ)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    dumps = folder / "core"
    dumps.mkdir()
    core = {
        "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1",
        "CUDA_COREDUMP_FILE": str(dumps / "cuda_coredump_%h.%p.%t"),
    }
    armed = {"SGLANG_TRTLLM_MHA_DEBUG": "1"}
    return WhenAsked(
        all=lambda: dying(folder / "all", "mtp", **armed, **core, G4DEBUG_LEAK_STEPS="3"),
        plain=lambda: dying(folder / "plain", "plain", **armed),
        some=lambda: dying(folder / "some", "mtp", G4DEBUG_TRACE="page-table,flight-recorder"),
        alone=lambda: dying(folder / "alone", "mtp", G4DEBUG_TRACE="flight-recorder"),
        lost=lambda: dying(
            folder / "lost", "mtp", **armed, PUT_BACK=f"PagedTokenToKVPoolAllocator.{free()[1]}"
        ),
        wrapped=lambda: dying(
            folder / "wrapped", "mtp", **armed, WRAP="PagedTokenToKVPoolAllocator.alloc_decode"
        ),
        guilty=lambda: dying(
            folder / "guilty",
            "mtp",
            **armed,
            G4DEBUG_MODE="log",
            G4DEBUG_FAULTS="seed=1;page-alias=1*on@mode=target_verify@step=4",
        ),
    )


def death(run: Run):
    """The flight recorder's record and what it says, sentence by sentence; the step of the end."""
    assert run.status != 0
    assert "IT LIVES" not in run.log
    step = int(re.findall(r"THE DEVICE DIES IN STEP (\d+)", run.log)[0])
    (record,) = [r for r in run.dumps if r.finding.check == "flight-recorder"]
    assert record.finding.kind == "cuda-error", record.finding.headline
    assert record.finding.location.step == step
    return record, record.finding.cause.split("\n"), step


def test_with_everything_armed_tables_and_pages_are_innocent(runs):
    record, lines, step = death(runs["all"])
    # Without overlap scheduling the draft of the step before may still have been running: nobody
    # had waited for it. With overlap the step before was launched, and nobody had waited for it.
    assert lines[0] == (
        "Page tables and the hand-outs and frees of KV pages are innocent up to step "
        f"{step - 2}; look at the kernel."
    )
    assert lines.pop(1).startswith(("Counted last: the full pool in step ", "No pool was counted"))
    assert lines[1].startswith("Checked, and nothing found: page-table: ")
    for tracer in ("page-table", "kv-allocator", "pool-leak", "spec-lifecycle"):
        status = next(t for t in record.tracers if t.name == tracer)
        assert status.sound, status.state
        for checked in status.checked:
            assert f"{checked.count:,} {checked.what} (the last in step {checked.step})" in lines[1]
    assert lines[2] == (
        f"Steps {step - 1} to {step} may not have been finished. The guard runs in front of the "
        "kernel, and what it left in host memory was read after the error: it names no bad cell. "
        "Whether the guard had run by then is not known."
    )
    assert lines[3] == (
        "Not looked at: what is in the KV pages (kv-integrity is not armed); where KV is written "
        "(kv-writes is not armed)."
    )
    assert re.fullmatch(
        r"CUDA core dump: none yet; the driver was told to write it to /.*/core/"
        r"cuda_coredump_%h\.%p\.%t",
        lines[4],
    )
    assert len(lines) == 5
    assert [r.finding.check for r in runs["all"].dumps] == ["flight-recorder"]


@pytest.mark.long("an engine for each way to know less")
@pytest.mark.skipif(BARRIER, reason="with SGLang's barrier, ranges are not all that is checked")
def test_where_only_ranges_were_checked_it_says_no_more(runs):
    record, lines, step = death(runs["plain"])
    assert lines[0] == (
        f"No page table named a page outside of its pool up to step {step - 2}. Whether the pages "
        "were the right ones was not checked, or not always."
    )
    assert "innocent" not in record.finding.cause
    assert "page-table is limited: ranges only (with overlap scheduling, " in lines[-1]
    assert "spec-lifecycle is off" not in lines[-1]  # it follows the sampled tokens


@pytest.mark.long("an engine for each way to know less")
@pytest.mark.skipif(not BARRIER, reason="only ranges are checked with overlap scheduling")
def test_with_overlap_scheduling_and_no_draft_all_is_innocent(runs):
    _, lines, step = death(runs["plain"])
    assert lines[0] == (
        "Page tables and the hand-outs and frees of KV pages are innocent up to step "
        f"{step - 2}; look at the kernel."
    )
    assert "is limited" not in lines[-1]
    assert "spec-lifecycle is off" not in lines[-1]  # it follows the sampled tokens


@pytest.mark.long("an engine for each way to know less")
def test_a_tracer_that_was_not_armed_is_not_looked_at(runs):
    _, lines, step = death(runs["some"])
    assert lines[0] == (
        f"Page tables are innocent up to step {step - 2}; the KV allocators were not checked, or "
        "not always."
    )
    assert "who got and gave back which page (kv-allocator is not armed)" in lines[-1]
    assert "lost pages (pool-leak is not armed)" in lines[-1]


@pytest.mark.long("an engine for each way to know less")
def test_the_flight_recorder_alone_vouches_for_nothing(runs):
    record, _, _ = death(runs["alone"])
    assert record.finding.cause == "not known: no tracer reported anything before"


def test_a_hook_that_was_lost_takes_the_innocence_with_it(runs):
    """And no finding that follows from it is believed: the server lives until its device dies."""
    record, _, _ = death(runs["lost"])
    assert "innocent" not in record.finding.cause
    ledger = next(t for t in record.tracers if t.name == "ledger")
    site, name, file = free()
    gone = f"{site}: PagedTokenToKVPoolAllocator.{name} ({file}:"
    assert ledger.dead[0].startswith(gone)
    told = [x for x in runs["lost"].log.splitlines() if "hooks do not run any more" in x]
    assert len(told) == 1
    assert gone in told[0]
    states = {t.name: t.state for t in record.tracers}
    assert states["kv-allocator"].startswith("off since step ")
    assert [r.finding.check for r in runs["lost"].dumps] == ["flight-recorder"]


@pytest.mark.long("an engine for each way to know less")
def test_a_wrapper_outside_of_ours_is_named_and_nobody_vouches_for_what_it_changes(runs):
    """A monkeypatch at run time, which leads to our hook by its closure alone."""
    record, lines, step = death(runs["wrapped"])
    assert lines[0] == (
        f"Page tables are innocent up to step {step - 2}; the KV allocators were not checked, or "
        "not always."
    )
    site = "pool.alloc_decode"
    assert (
        "ledger is limited: changes behind its hooks are not checked (plugin dying wraps it "
        f"at {site})"
    ) in lines[-1]
    (other,) = record.others
    assert (other.site, other.side, other.who) == (site, "outside", "plugin dying")
    assert other.function.startswith("over.meddling (dying.py:")
    assert record.plugins["dying"] == "allowed: dying:register, of dying 0"
    assert f"plugin dying at {site}: over.meddling (dying.py:" in runs["wrapped"].log
    assert all(not t.dead for t in record.tracers)


def test_a_finding_before_is_the_suspect_and_nobody_is_innocent(runs):
    record, _, _ = death(runs["guilty"])
    assert "page-table" in [r.finding.check for r in runs["guilty"].dumps]
    assert "did not stop the server (log mode): g4debug: page-table in " in record.finding.cause
    assert "innocent" not in record.finding.cause
