"""Driven by test_admission.py: each refusal of SGLang's is foretold, with the pool that refuses.

SGLang's own requests, batches, allocators and prefix cache serve requests that are drawn, without a
model (tests/versions/served.py). Before SGLang's ``PrefillAdder`` is asked for the first request of
a round, ``admission`` is: both must agree. A server that stands must be called a deadlock, and one
that is called a deadlock must stand. Where parked-chunk is named for it, what it gives back must be
enough for another step.

``drive_admissions.py EXAMPLES [SEED]`` prints ``RESULT`` and how often what came up. With
``fixed`` behind that, all servers have one pool, and ignore-eos-admission is in force: none stands.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "versions"))

import served

from g4debug.fixes import ignore_eos_admission, parked_chunk
from g4debug.hooking import prefix_tree
from g4debug.tracers.flight_recorder import admission, reasons, shares
from g4debug.tracers.flight_recorder.work import Place, Work

PAGE = served.PAGE
PrefillAdder: Any = None  # SGLang's own, where ``admission`` looks for it
found: Counter[str] = Counter()
FIXED = "fixed" in sys.argv


class Scheduler:
    """What ``admission`` reads of a scheduler."""

    page_size, max_prefill_tokens, new_token_ratio = PAGE, 1 << 20, 0.3
    is_mixed_chunk, priority_scheduling_preemption_threshold = False, 0
    schedule_policy = "fcfs"

    def __init__(self, server: served.Server) -> None:
        self.server = server
        self.tree_cache, self.token_to_kv_pool_allocator = server.tree, server.allocator
        self.chunked_prefill_size = served.CHUNK

    @property
    def running_batch(self) -> Any:
        return self.server.running or SimpleNamespace(reqs=[], batch_is_full=False)

    @property
    def waiting_queue(self) -> list[Any]:
        return self.server.waiting

    def get_num_allocatable_reqs(self, running: int) -> int:
        return served.ROWS - 2 - running

    def work(self) -> list[Work]:
        running = [Work(r, Place.RUNS) for r in self.running_batch.reqs if not r.finished()]
        chunk = self.server.chunked
        chunks = [] if chunk is None else [Work(chunk, Place.CHUNK)]
        return running + chunks + [Work(r, Place.QUEUE) for r in self.server.waiting]


def compare(scheduler: Scheduler) -> type:
    """SGLang's PrefillAdder, which compares its first decision of a round with ours."""

    class Comparing(PrefillAdder):  # type: ignore[misc]
        def add_chunked_req(self, request: Any) -> Any:
            return self._compared(request, Place.CHUNK, super().add_chunked_req, request)

        def add_one_req(self, request: Any, *args: Any, **kwargs: Any) -> Any:
            if self.can_run_list:
                return super().add_one_req(request, *args, **kwargs)
            return self._compared(
                request, Place.QUEUE, super().add_one_req, request, *args, **kwargs
            )

        def _compared(self, request: Any, place: Place, add: Any, *args: Any, **kwargs: Any) -> Any:
            told = admission.refusal(scheduler, Work(request, place))
            result = add(*args, **kwargs)
            taken = any(r is request for r in self.can_run_list)
            maybe = told.by_lock and "up to" in told.words  # the tree in Rust does not say it
            assert taken == (not told.pool) or maybe, (taken, told)
            found[f"{place.name} {'taken' if taken else told.pool}"] += 1
            if told.by_lock:
                found["by its own prefix"] += 1
            return result

    return Comparing


def fixed() -> type:
    """SGLang's PrefillAdder with the fix around it."""

    class Fixed(PrefillAdder):  # type: ignore[misc]
        def add_one_req(self, request: Any, *args: Any, **kwargs: Any) -> Any:
            add = PrefillAdder.add_one_req
            before = len(self.can_run_list)
            result = ignore_eos_admission.around_add(add, self, request, *args, **kwargs)
            if result.name == "NO_TOKEN" and not before and self.can_run_list == [request]:
                found["admitted by the fix"] += 1
                found["admitted after a retraction"] += bool(request.output_ids)
            return result

    return Fixed


def check_locked(server: served.Server, items: list[Work], idle: bool) -> None:
    """What the named nodes hold is what SGLang counts as locked: on an idle server all of it.

    Else a request may be in flight that is in no batch of ``items``.
    """
    hybrid = server.hybrid
    for pool in ("full", "swa") if hybrid else ("full",):
        sizes = prefix_tree.sizes(server.tree, pool, hybrid)
        nodes = shares.locked_nodes(server.tree, pool, items)
        if sizes is None or nodes is None:
            continue
        assert sum(n.node.tokens for n in nodes) <= sizes.protected, (pool, nodes, sizes)
        if pool == "full":
            locks = [(n.node.locks, len(n.requests)) for n in nodes]
            assert all(count is None or count >= least for count, least in locks), nodes
        if idle:
            assert sum(n.node.tokens for n in nodes) == sizes.protected, (pool, nodes, sizes)
            found["idle, with locks"] += bool(nodes)
        found[f"nodes locked: {pool}"] += len(nodes)


def example(seed: int) -> None:
    from sglang.srt.managers import schedule_policy

    dice = random.Random(seed)
    served.FULL = PAGE * dice.choice([24, 40, 60])
    served.SWA = PAGE * dice.choice([8, 10, 14, 26])
    served.CHUNK = PAGE * dice.choice([2, 4, 6, 12])
    served.ROWS = dice.choice([4, 12, 12])
    radix = dice.random() < 0.6
    core = dice.choice([None, "python"])
    hybrid = dice.random() < 0.7 and not FIXED
    server = served.Server(
        spec=False, radix=radix, overlap=dice.random() < 0.5, core=core, hybrid=hybrid
    )
    scheduler = Scheduler(server)
    schedule_policy.PrefillAdder = fixed() if FIXED else compare(scheduler)
    shared = [dice.randrange(4, 90) for _ in range(300)]
    came = idle = 0
    claimed = None
    for _ in range(120):
        if came < 12 and dice.random() < 0.4:
            most = min(served.FULL - 3 * PAGE, served.CONTEXT - 60, 320)
            length = dice.randrange(5, most)
            head = shared[: dice.choice([0, 64, 130, length])][:length]
            prompt = head + [dice.randrange(4, 90) for _ in range(length - len(head))]
            output = dice.randrange(1, 40)
            if not hybrid and dice.random() < 0.3:  # what a scheduler cuts a long answer to
                output = served.FULL - -(-length // PAGE) * PAGE - PAGE - 1
            server.come(f"r{came}", prompt, output)
            server.waiting[-1].sampling_params.ignore_eos = dice.random() < 0.5
            came += 1
            idle = 0
        first = server.waiting[0] if server.waiting else None
        full = first and admission.refusal(scheduler, Work(first, Place.QUEUE)).pool == "rows"
        try:
            did = server.round(lambda: 1)
        except (AssertionError, RuntimeError) as e:
            if isinstance(e, AssertionError) and "Refusal" in str(e):
                raise
            found[f"ended: {type(e).__name__}"] += 1  # SGLang's own bugs at such pools
            return
        if full:
            assert any(r is first for r in server.waiting), first.rid
            found["QUEUE rows"] += 1
        items = scheduler.work()
        check_locked(server, items, did == "idle")
        assert claimed is None or did == "idle", (claimed, did)
        idle = idle + 1 if did == "idle" and items else 0
        if idle:
            first = items[0]
            if server.waiting and first.place is Place.QUEUE:
                assert first.request is server.waiting[0]
            reason = reasons.of(scheduler, first, items, steps=False)
            if idle == 2 and reason.deadlock and not FIXED:
                claimed = reason
            if idle >= 3:
                assert not FIXED, reason
                assert reason.deadlock, reason
                assert reason.verdict.startswith("A deadlock"), reason
                found[f"stands: {first.place.name}"] += 1
                if reason.like:
                    found[reason.like[:16]] += 1
                if reason.fix == "parked-chunk":
                    lacks = admission.refusal(scheduler, first).lacks
                    held = shares.shares(scheduler, admission.SWA, items).requests
                    if all(s.behind < lacks for s in held if s.work is first):
                        found["behind the window is only what it has locked"] += 1
                    parked_chunk.give_back(server.tree, server.allocator, first.request)
                    assert server.round(lambda: 1) != "idle", reason
                    found["parked-chunk helps"] += 1
                elif first.place is Place.CHUNK:
                    found[f"no fix: {reason.line}"] += 1
                if not hybrid:
                    assert reason.fix == "ignore-eos-admission", reason
                    found["stands: single pool"] += 1
                return
        elif did != "idle" and server.waiting and server.running is not None:
            reasons.of(scheduler, items[-1], items, steps=True)
    found["served"] += 1


def main() -> None:
    global PrefillAdder
    served.without_kernels()
    served.fast_kernels()
    from sglang.srt.managers import schedule_policy

    PrefillAdder = schedule_policy.PrefillAdder
    args = SimpleNamespace(disaggregation_mode="null", pp_size=1)
    ignore_eos_admission.arguments = lambda: args
    begin = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    for seed in range(begin, begin + int(sys.argv[1])):
        try:
            example(seed)
        except BaseException:
            print("SEED", seed, flush=True)
            raise
    print("RESULT", json.dumps(dict(sorted(found.items()))), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)
