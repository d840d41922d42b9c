"""``SGLANG_TRTLLM_MHA_DEBUG=watch``: what it arms, what it refuses, and how many hooks it puts."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import releases

from g4debug import discovery, plugin
from g4debug.findings.steps import Recorder
from g4debug.hooking.hooks import Hooks
from g4debug.hooking.roles import Role
from g4debug.settings import Settings, SettingsError
from g4debug.tracers.base import Context
from g4debug.tracers.pool_leak import watch as counting
from g4debug.trapping.describe import Describer
from g4debug.trapping.trap import Trap

SWITCH = "SGLANG_TRTLLM_MHA_DEBUG"
PARTS = ("flight-recorder", "page-table", "pool-leak")


def test_the_tracers_of_which_watch_arms_a_part_are_found_by_their_files():
    assert discovery.watching() == PARTS
    assert all(discovery.load_watch(name).id == name for name in PARTS)
    assert not any(discovery.load_watch(name).ledger for name in PARTS)
    with pytest.raises(KeyError, match=r"kv-writes has no watch\.py"):
        discovery.load_watch("kv-writes")


@pytest.mark.parametrize("text", ["watch", " Watch "])
def test_no_finding_may_stop_the_server(text):
    settings = Settings.from_environ({SWITCH: text})
    assert settings.watch
    assert settings.mode == "contain"
    assert settings.tracers == PARTS
    assert Settings.from_environ({SWITCH: text, "G4DEBUG_MODE": "log"}).mode == "log"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"G4DEBUG_MODE": "raise"}, "no finding stops the server"),
        ({"G4DEBUG_TRACE": "kv-writes"}, "has no part that watch arms; valid: flight-recorder"),
    ],
)
def test_a_contradiction_is_refused(more, says):
    with pytest.raises(SettingsError, match=says):
        Settings.from_environ({SWITCH: "watch", **more})


def test_an_unknown_word_names_watch():
    with pytest.raises(SettingsError, match="or watch"):
        Settings.from_environ({SWITCH: "wach"})


def hooked(tmp_path, **settings):
    """(site -> how many wrappers, the ledger): what would be put there, and is not."""
    settings = Settings(debug_dir=tmp_path, cpu=True, **settings)
    hooks, recorder = Hooks(), Recorder(settings.steps)
    trap = Trap(settings, Describer(recorder), recorder.status)
    tracers = plugin.chosen(settings)
    ledger, _ = plugin._arm(settings, hooks, recorder, trap, tracers, (), Role())
    return {site: len(hooks.owners(site)) for site in hooks.sites}, ledger


def test_watch_puts_fewer_hooks_than_1(tmp_path, sglang):
    watch, ledger = hooked(tmp_path, debug="watch", mode="contain")
    armed, books = hooked(tmp_path, debug=True)
    assert ledger is None
    assert books is not None
    assert set(watch) < set(armed)
    # No allocator, no free, no insert into the prefix cache, no draft, no write.
    assert not [s for s in watch if s.startswith(("pool.", "swa.", "kv.", "tree."))]
    assert 2 * sum(watch.values()) < sum(armed.values())
    if not releases.is_newest():
        return  # docs/tracers.md has the numbers of that one
    page = (Path(__file__).parents[2] / "docs" / "tracers.md").read_text()
    told = re.search(
        r"(\d+) wrappers at (\d+) functions of SGLang ([\d.]+), where `=1` puts (\d+) at (\d+)",
        " ".join(page.split()),
    )
    assert told is not None
    counted = (sum(watch.values()), len(watch), releases.newest(), sum(armed.values()), len(armed))
    assert told.groups() == tuple(map(str, counted))


# --- the counts at idle -----------------------------------------------------------------------


class Tree:
    """SGLang's figures of its prefix cache."""

    root_node = object()

    def __init__(self, evictable=0, protected=0):
        self.evictable, self.protected = evictable, protected

    def evictable_size(self):
        return self.evictable

    def protected_size(self):
        return self.protected


def server(free=640, rows=4, total=640, tree=None, **arguments):
    """A scheduler that is idle, with its counts alone: no page of it is read."""
    given = {"pp_size": 1, "dcp_size": 1, "disaggregation_mode": "null", **arguments}
    return SimpleNamespace(
        is_fully_idle=lambda: True,
        page_size=64,
        tree_cache=tree or Tree(),
        token_to_kv_pool_allocator=SimpleNamespace(
            size=total, page_size=64, available_size=lambda: free
        ),
        req_to_token_pool=SimpleNamespace(size=4, free_slots=list(range(rows))),
        server_args=SimpleNamespace(speculative_eagle_topk=1, enable_unified_memory=False, **given),
    )


@pytest.fixture
def idle(tmp_path, monkeypatch):
    monkeypatch.setattr("g4debug.tracers.pool_leak.servers.CACHES", ("Tree",))
    settings = Settings(debug="watch", mode="contain", debug_dir=tmp_path)
    context = Context.alone("pool-leak", settings)
    found = counting.IdleCounts(context)
    context.recorder.step = 5
    told = []
    monkeypatch.setattr(context.trap, "report", lambda finding, *more: told.append(finding))
    return found, context, told


def test_counts_that_add_up_are_told_of_once_for_each_idle_time(idle):
    counts, context, told = idle
    for _ in range(3):
        counts.before_idle(server(free=576, tree=Tree(evictable=64)))
    assert not told
    assert context.status.tallies["counts"].count == 2


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"free": 512}, "leaked"),
        ({"free": 704}, "double"),
        ({"free": 576, "tree": Tree(protected=64)}, "locked"),
        ({"rows": 3}, "row"),
        ({"rows": 5}, "row-repeated"),
    ],
)
def test_a_difference_is_reported_when_it_is_seen_twice(idle, wrong, kind):
    counts, _, told = idle
    counts.before_idle(server(**wrong))
    assert not told
    counts.before_idle(server(**wrong))
    assert [finding.kind for finding in told] == [kind]
    counts.before_idle(server(**wrong))
    assert len(told) == 1


def test_a_difference_that_goes_away_is_not_reported(idle):
    counts, _, told = idle
    counts.before_idle(server(free=512))
    counts.before_idle(server())
    assert not told


def test_sglangs_own_check_confirms_the_first_look(idle):
    counts, _, told = idle
    counts.before_idle(server(free=512))
    counts.at_idle_error()
    assert [finding.kind for finding in told] == ["leaked"]


def test_a_server_whose_counts_mean_something_else_is_not_judged(idle):
    counts, context, told = idle
    context.recorder.step = 0
    counts.before_idle(server(free=512))
    context.recorder.step = 5
    for _ in range(2):
        counts.before_idle(server(free=512))
    assert context.status.is_off
    assert not told


def test_disaggregation_is_not_judged(idle):
    counts, context, told = idle
    for _ in range(2):
        counts.before_idle(server(free=512, disaggregation_mode="decode"))
    assert context.status.is_off
    assert not told
