"""A plugin for SGLang: how long the scheduler is in g4debug's hooks, site by site.

It wraps what g4debug puts around each of SGLang's functions. From the moment a hook is entered the
time is its site's, while SGLang's own function runs it is SGLang's again, and so on inward. So a
site's time belongs to our code alone, its waiting included. Where SGLang's function launches a
step, what our code does after it is told apart (``BEHIND``), because the device works then.
Starting and stopping the clock takes about a microsecond for each call, which counts as ours.

An idle scheduler goes round its loop as fast as it can, and our hooks with it. That costs nobody
anything, so only rounds in which a batch is run, or its result processed, are counted.

``gate.py`` writes the figures on SIGUSR2: ``clock``, site -> [calls, seconds].

With the variable BENCHMARK_PROFILE, a folder, cProfile runs while our code runs, and its record
since the last SIGUSR2 is written there. It makes our code slower, so the figures are then only for
comparing functions with each other.
"""

from __future__ import annotations

import cProfile
import os
import threading
import time
from pathlib import Path
from typing import Any

from served import gate

FIRST = "scheduler.recv_requests"  # a round of the scheduler's loop begins with it
PROFILE = "BENCHMARK_PROFILE"
LAUNCH = "scheduler.run_batch"
WORK = (LAUNCH, "scheduler.process_result")
BEHIND = f"{LAUNCH}, behind the launch"
spent: dict[str, list[float]] = {}
_round: dict[str, list[float]] = {}  # of the round that is not over yet
_owners: list[str] = [""]  # '': SGLang's time
_since = 0.0
_profile: cProfile.Profile | None = None
_profiles = 0  # files written


def register() -> None:
    from g4debug import plugin
    from g4debug.hooking.hooks import Around, Hooks

    assert plugin.in_force is None, "g4debug was loaded first"
    compose, facts = Hooks._compose, gate.facts
    mine = threading.get_ident()

    def timed(hooks: Hooks, site: str) -> Around:
        whole = compose(hooks, site)
        built: tuple[Any, Any] = (None, None)

        def hook(original: Around, *args: Any, **kwargs: Any) -> Any:
            nonlocal built
            if threading.get_ident() != mine:
                return whole(original, *args, **kwargs)
            if built[0] is not original:  # a chain of hooks remembers the function that it is for
                built = original, _as("", original, BEHIND if site == LAUNCH else "")
            if site == FIRST:
                _end_of_round()
            return _as(site, whole)(built[1], *args, **kwargs)

        return hook

    def told(scheduler: Any) -> dict[str, Any]:
        _write_profile()
        return {**facts(scheduler), "clock": dict(spent)}

    if os.environ.get(PROFILE):
        global _profile
        _profile = cProfile.Profile(builtins=True)
    Hooks._compose = timed  # type: ignore[method-assign]
    gate.facts = told
    gate.register()


def _as(owner: str, function: Any, then: str = "") -> Any:
    """``function``, while it runs the time is ``owner``'s.

    then: whose it is afterwards, '' for whose it was before.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        _turn(owner)
        _owners.append(owner)
        try:
            return function(*args, **kwargs)
        finally:
            _turn(then or _owners[-2])
            _owners.pop()
            if then:
                _owners[-1] = then
                _round.setdefault(then, [0, 0.0])[0] += 1
            if owner:
                _round[owner][0] += 1

    return run


def _turn(next_owner: str) -> None:
    """Add the time since the last turn to its owner's."""
    global _since
    if _profile is not None:
        _profile.disable()
    now = time.perf_counter()
    if owner := _owners[-1]:
        _round.setdefault(owner, [0, 0.0])[1] += now - _since
    _since = now
    if _profile is not None and next_owner:
        _profile.enable()


def _write_profile() -> None:
    global _profiles
    if _profile is not None:
        _profile.dump_stats(Path(os.environ[PROFILE]) / f"{_profiles:03}.prof")
        _profile.clear()
        _profiles += 1


def _end_of_round() -> None:
    if any(site in _round for site in WORK):
        for site, (calls, seconds) in _round.items():
            total = spent.setdefault(site, [0, 0.0])
            total[0] += calls
            total[1] += seconds
    _round.clear()
