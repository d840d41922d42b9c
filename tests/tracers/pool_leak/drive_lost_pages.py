"""Driven by test_lost_pages.py: requests that are drawn, and one page that is lost.

Hypothesis draws what requests come, when they are aborted, what the prefix cache evicts, and how a
page is lost then. SGLang's own requests, batches, allocators and prefix cache serve them without a
model (tests/versions/served.py), each example in a fork. SGLang's check of an idle server and our
census must agree: both are silent before, and both tell after.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TESTS = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TESTS / "versions"), str(TESTS / "tracers" / "prefix_cache")]
os.environ["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE"] = "1"  # a row that is lost raises, too

import drive_cases  # noqa: E402
import drive_ledger  # noqa: E402
import served  # noqa: E402
from hypothesis import HealthCheck, Phase, assume, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from g4debug.hooking import req_kv, targets  # noqa: E402

PAGE = served.PAGE
# How pages come to a pool's free list -> how many of what is given are a page.
FREES = {"free": PAGE, "free_segment": PAGE, "free_page_ids": 1}
Load = drive_cases.Load
Way = Callable[[Load], None]
WAYS: dict[str, Way] = {
    name: drive_cases.CASES[name]
    for name in (
        "lost_full_page", "lost_swa_page", "lost_protected", "lost_evicted", "lost_free",
        "lost_short_node", "lost_tombstone", "row_kept",
    )
}  # fmt: skip
IN_PYTHON = ("lost_short_node", "lost_tombstone")  # these need nodes in Python


def way(function: Way) -> Way:
    WAYS[function.__name__] = function
    return function


# --- what else can lose a page -------------------------------------------------------------------


def lose_of_a_free(load: Load, inner: Any) -> None:
    """The next free of a pool loses one page on its way into the free list."""
    lost: list[int] = []

    def losing(real: Any, unit: int) -> Any:
        def free(indices: Any, *args: Any, **kwargs: Any) -> Any:
            pages = indices // unit
            if not lost and len(indices) and int(pages.max()) > 0:
                lost.append(int(pages[pages > 0][0]))
                indices = indices[pages != lost[0]]
                if not len(indices):
                    return None
            return real(indices, *args, **kwargs)

        return free

    for name, unit in FREES.items():
        if hasattr(inner, name):
            setattr(inner, name, losing(getattr(inner, name), unit))
    load.until(lambda: lost)


@way
def lost_in_a_free_full(load: Load) -> None:
    lose_of_a_free(load, load.server.allocator.full_attn_allocator)


@way
def lost_in_a_free_swa(load: Load) -> None:
    lose_of_a_free(load, load.server.allocator.swa_attn_allocator)


@way
def lost_mapping(load: Load) -> None:
    """A page that is live loses its SWA page: nobody knows any more which one to free."""
    request = load.until(lambda: load.running(1))
    page = load.page_of(request, load.own(request)[-1])
    load.server.allocator.full_to_swa_index_mapping[page * PAGE : (page + 1) * PAGE] = 0


@way
def lost_row(load: Load) -> None:
    """A request's row is given back, and its pages are not."""
    request = load.until(lambda: load.running(1))
    kv = served.kv_of(request)
    kv.kv_allocated_len = kv.kv_committed_len = int(req_kv.protected(request) or 0)


# --- SGLang's own check ---------------------------------------------------------------------------


def sglangs(server: served.Server) -> list[str]:
    """What SGLang's check of an idle server says; it is SGLang's own code."""
    given = {
        "tree_cache": server.tree, "token_to_kv_pool_allocator": server.allocator,
        "req_to_token_pool": server.rows, "is_hybrid_swa": True, "is_hybrid_ssm": False,
        "enable_hisparse": False, "hisparse_coordinator": None, "page_size": PAGE,
        "full_tokens_per_layer": served.FULL, "swa_tokens_per_layer": served.SWA,
        "max_total_num_tokens": served.FULL, "session_controller": SimpleNamespace(sessions={}),
        "last_batch": None, "running_batch": None, "get_last_batch": lambda: None,
        "get_running_batch": lambda: None, "scheduler_stage_metrics": None,
        "count_req_pool_leak_warnings": 0, "count_memory_leak_warnings": 0,
    }  # fmt: skip
    given["disaggregation_mode"] = served.first(
        "sglang.srt.disaggregation.utils.DisaggregationMode"
    ).NULL
    base = "sglang.srt.managers"
    try:
        observer = served.first(
            f"{base}.scheduler_components.pool_stats_observer.SchedulerPoolStatsObserver"
        )
    except LookupError:
        mixin = served.first(f"{base}.scheduler_runtime_checker_mixin.SchedulerRuntimeCheckerMixin")
        stats = checker = mixin()
        vars(checker).update(given)
    else:
        stats = observer(**served.accepted(observer, **given))
        kind = served.first(
            f"{base}.scheduler_components.invariant_checker.SchedulerInvariantChecker"
        )
        checker = kind(**served.accepted(kind, **given, pool_stats_observer=stats))
    leaked, said = checker._check_all_pools(stats.get_pool_stats())
    said = said if leaked else []
    try:
        checker._check_req_pool()
    except Exception as e:
        said.append(str(e))
    return said


# --- one example ----------------------------------------------------------------------------------

# (what, how much, how much more): a request comes, rounds go by, one is aborted, pages are evicted
OPERATION = st.tuples(
    st.sampled_from(("come", "come", "rounds", "rounds", "abort", "evict")),
    st.integers(0, 255),
    st.integers(0, 255),
)
LIFE = st.lists(OPERATION, min_size=4, max_size=24)


def live(load: Load, operations: list[tuple[str, int, int]]) -> None:
    server = load.server
    for number, (what, much, more) in enumerate(operations):
        if what == "come" and len(server.waiting) < 6:
            shared, own = [much % 3] * (1 + more % 140), [10 + much % 80] * (1 + much % 60)
            load.server.come(f"x{number}", shared + own, 1 + more % 60)
        elif what == "abort" and server.running is not None and server.running.reqs:
            server.aborted.add(server.running.reqs[much % len(server.running.reqs)].rid)
        elif what == "evict":
            params = served.first("sglang.srt.mem_cache.base_prefix_cache.EvictParams")
            tokens = PAGE * (1 + much % 8)
            server.tree.evict(params(num_tokens=tokens, swa_num_tokens=PAGE * (1 + more % 8)))
        for _ in range(1 + much % 9 if what == "rounds" else 1):
            server.round(lambda: load.rng.randint(1, served.DRAFT))


def ours(load: Load) -> str:
    """What a census of an idle server says, '' if nothing."""
    load.drain()
    books = load.books
    books.scheduler.running_batch = books.scheduler.last_batch = None
    books.leak.check(books.scheduler, idle=True)
    return ""


def example(
    books: drive_ledger.Books,
    args: argparse.Namespace,
    name: str,
    life: Any,
    seed: int,
    armed: bool,
) -> dict[str, Any]:
    """What is said before a page is lost and after that, by our tracers if armed, or by SGLang."""
    from g4debug.trapping.trap import TrapError

    server = served.Server(args.spec, True, args.spec, args.core or None)
    books.serve(server)
    load = Load(books, server, seed)
    if not armed:
        for tracer in (books.swa, books.cache, books.leak):
            tracer.context.trap.report = lambda *args, **kwargs: None  # type: ignore[method-assign]

    def told(run: Callable[[], Any]) -> str:
        try:
            run()
            load.drain()
            return ours(load) if armed else " ".join(sglangs(server))
        except TrapError as e:
            return f"{e.finding.check} {e.finding.kind}: {e.finding.headline}"

    before = told(lambda: live(load, life))
    live(load, life)
    try:
        after = told(lambda: WAYS[name](load))
    except (AssertionError, RuntimeError) as e:
        if armed:
            raise
        after = f"it dies: {e!r}"  # SGLang, of what is broken
    return {"before": before, "after": after}


def forked(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = json.dumps(run())
        except RuntimeError as e:
            text = json.dumps({"full" if "out of memory" in str(e) else "died": repr(e)})
        except BaseException:
            text = json.dumps({"died": traceback.format_exc()[-2500:]})
        with os.fdopen(write, "w") as out:
            out.write(text)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        found: dict[str, Any] = json.loads(answer.read() or '{"died": "without a word"}')
    os.waitpid(pid, 0)
    return found


def agree(books: drive_ledger.Books, name: str, args: argparse.Namespace) -> Counter[str]:
    """How often SGLang and our tracers told it. Raises AssertionError if SGLang is alone."""
    tally: Counter[str] = Counter()

    @settings(
        max_examples=args.examples, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate],
    )  # fmt: skip
    @given(life=LIFE, seed=st.integers(0, 1 << 16))
    def one(life: Any, seed: int) -> None:
        said = {}
        for who, armed in (("ours", True), ("sglang", False)):
            found = forked(partial(example, books, args, name, life, seed, armed))
            assume("full" not in found)  # more requests than the pools are for
            assert "died" not in found, found["died"]
            assert not found["before"], f"nothing was lost: {found['before']}"
            said[who] = found["after"]
        assert not said["sglang"] or said["ours"], f"{name}: SGLang is alone: {said}"
        tally["sglang"] += bool(said["sglang"])
        tally[said["ours"].partition(":")[0] or "nothing"] += 1

    one()
    return tally


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--core", default="")
    parser.add_argument("--spec", action="store_true")
    parser.add_argument("--ways", default="", help="only these, with commas")
    parser.add_argument("--examples", type=int, default=8, help="of each way to lose a page")
    args = parser.parse_args()
    served.without_kernels()
    served.fast_kernels()
    books = drive_ledger.Books(Path(tempfile.mkdtemp(prefix="g4debug-lost-")), None, "")
    books.fault = "the examples'"  # so that it does not compare its books itself
    native = args.core != "python" and targets.path("scheduler.war_barrier") is not None
    ways = [name for name in WAYS if not (native and name in IN_PYTHON)]
    if args.ways:
        ways = args.ways.split(",")
    count = {name: agree(books, name, args) for name in ways}
    print("RESULT", json.dumps(count), flush=True)


if __name__ == "__main__":
    random.seed(0)
    main()
    sys.exit(0)
