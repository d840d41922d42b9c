"""Driven by test_parked_of_release.py: small servers that are drawn, without and with parked-chunk.

SGLang's own requests, batches, allocators and prefix cache serve them, without a model (served.py).
Up to where the server without the fix stands, or ends a request for want of pages, the one with it
must run the same batches. Nobody may stand there behind a parked prompt.

``drive_parked.py EXAMPLES [SEED]`` prints ``RESULT`` and how often what came up.
"""

from __future__ import annotations

import functools
import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import served

from g4debug.hooking import targets

PAGE, ROUNDS, STANDS = served.PAGE, 600, 8  # rounds in a row in which nothing runs
KILLED = "killed"
found: Counter[str] = Counter()


class Hooks:
    """Puts the fix around this SGLang's functions, or takes it away."""

    def __init__(self) -> None:
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.managers.schedule_policy import PrefillAdder

        from g4debug.fixes import parked_chunk

        args = SimpleNamespace(
            disaggregation_mode="null", pp_size=1, enable_hierarchical_cache=False
        )
        parked_chunk.arguments = lambda: args
        self.sites = [
            (PrefillAdder, "add_chunked_req", parked_chunk.around_add_chunked),
            (ScheduleBatch, "check_decode_mem", parked_chunk.around_check),
            (ScheduleBatch, "prepare_for_extend", self.before(parked_chunk.before_prepare)),
        ]
        self.plain = [getattr(owner, name) for owner, name, _ in self.sites]
        self.server: Server | None = None
        retracts = ScheduleBatch.retract_decode

        @functools.wraps(retracts)
        def retract_decode(*args: Any, **kwargs: Any) -> Any:
            result = retracts(*args, **kwargs)
            if result[2] and self.server:  # the last request that decodes is ended
                self.server.ran.append(KILLED)
            return result

        ScheduleBatch.retract_decode = retract_decode

    @staticmethod
    def before(hook: Callable[..., None]) -> Callable[..., Any]:
        def around(call_next: Callable[..., Any], *args: Any) -> Any:
            hook(*args)
            return call_next(*args)

        return around

    def put(self, on: bool) -> None:
        for (owner, name, around), plain in zip(self.sites, self.plain, strict=True):
            setattr(owner, name, self.wrapped(around, plain) if on else plain)

    def run(self, on: bool, kind: dict[str, Any], *given: Any) -> tuple[Server, str]:
        """A server of that kind, with the fix or without it, and how it ended."""
        self.put(on)
        self.server = Server(**kind)
        return self.server, run(self.server, *given)

    @staticmethod
    def wrapped(around: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: around(plain, *args, **kwargs)


class Server(served.Server):
    """A server that notes which batches it runs."""

    def __init__(self, **kind: Any) -> None:
        super().__init__(**kind)
        self.ran: list[Any] = []
        self.waits = 0  # rounds in which a prompt was parked

    def before_run(self, batch: Any) -> None:
        self.ran.append(([r.rid for r in batch.reqs], batch.seq_lens.tolist()))
        self.waits += self.parked


def run(server: Server, arrivals: dict[int, tuple[list[int], int]], seed: int) -> str:
    """Serve these. How that ended: served, stands (behind a parked prompt), queue, goes on, or
    an error."""
    idle, dice = 0, random.Random(seed)
    for turn in range(ROUNDS):
        if turn in arrivals:
            server.come(f"r{turn}", *arrivals[turn])
            idle = 0
        try:
            did = server.round(lambda: dice.randint(1, served.DRAFT))
        except (AssertionError, RuntimeError) as e:  # SGLang's own bugs at such pools
            return f"ended: {type(e).__name__}"
        idle = idle + 1 if did == "idle" else 0
        if idle >= STANDS and (server.chunked is not None or server.waiting):
            return "stands" if server.chunked is not None else "queue"
        if idle and turn > max(arrivals) and not server.waiting and server.chunked is None:
            return "served"
    return "goes on"


def emptied(server: Server, *case: Any) -> None:
    """A server that has served all gives all of its pages back, and none twice."""
    for _ in range(4):
        assert server.round(lambda: 1) == "idle", case
    if server.tree.supports_swa() and hasattr(server.tree, "evict") and case[1]["radix"]:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        server.tree.evict(EvictParams(num_tokens=served.FULL, swa_num_tokens=served.SWA))
        server.tree.sanity_check()
    free = (server.allocator.full_available_size(), server.allocator.swa_available_size())
    assert free == (served.FULL, served.SWA), (free, case)


def example(hooks: Hooks, seed: int) -> None:
    dice = random.Random(seed)
    served.FULL = PAGE * 60
    served.SWA = PAGE * dice.choice([7, 8, 10, 14])
    served.CHUNK = PAGE * dice.choice([2, 4, 6])
    kind = {
        "spec": dice.random() < 0.5, "radix": dice.random() < 0.8, "overlap": dice.random() < 0.7,
        "core": dice.choice([None, "python", "rust"]),
    }  # fmt: skip
    if targets.matches("<0.5.15"):  # served.py has no overlap and no speculation for these
        kind |= {"spec": False, "overlap": False}
    shared = [dice.randrange(4, 90) for _ in range(300)]
    arrivals, turn = {}, 0
    for _ in range(10):
        head = shared[: dice.choice([0, 64, 130, 200, 260])]
        own = [dice.randrange(4, 90) for _ in range(dice.randrange(5, 180))]
        arrivals[turn] = ([*head, *own], dice.randrange(1, 60))
        turn += dice.choice([1, 5, 30, 60])
    plain, how = hooks.run(False, kind, arrivals, seed)
    fixed, ended = hooks.run(True, kind, arrivals, seed)
    same = plain.ran.index(KILLED) if KILLED in plain.ran else len(plain.ran)
    assert fixed.ran[:same] == plain.ran[:same], (seed, kind, how, ended)
    assert ended != "stands", (seed, kind, how)
    if ended == "served":
        emptied(fixed, seed, kind)
    name = "radix" if kind["radix"] else "no radix"
    found[f"{name}: {how}, with the fix {ended}"] += 1
    found["parked, and served"] += how == "served" and plain.waits > 0
    if how != "stands":
        found["spared"] += plain.ran.count(KILLED) > fixed.ran.count(KILLED)
        found["more ended"] += plain.ran.count(KILLED) < fixed.ran.count(KILLED)


def main() -> None:
    examples = int(sys.argv[1])
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    served.without_kernels()
    served.fast_kernels()
    hooks = Hooks()
    for number in range(examples):
        example(hooks, seed + number)
    result = {"release": str(targets.sglang_version()), "found": found}
    print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
    sys.exit(0)
