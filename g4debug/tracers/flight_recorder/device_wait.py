"""Tells that the main thread waits for the device, and for nothing else, and for how long already.

A loop that stands says by itself nothing about why. A call into PyTorch or into the driver may
compile (NVRTC, PTX), load a module or wait for a lock, behind no frame of Python. Where SGLang's
scheduler waits for the result of a step, all that has been launched, and the device computes it or
hangs. Only such places are known here. Everywhere else it is not known what the thread does.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Sequence

SCHEDULER = "sglang/srt/managers/"
LOOP = re.compile(r" event_loop\w*$")
SYNCHRONIZES = re.compile(r"torch/cuda/(?:streams|__init__)\.py:\d+ synchronize$")
# The fault ``delayed-step`` is made to look like a call into the driver that does not come back.
STAND_IN = re.compile(r"g4debug/faults/delayed_step\.py:\d+ stall$")
# A line of Python that does nothing but fetch a tensor of the device.
FETCHES = re.compile(r"\s*(?:[\w., ]+ = )?[\w.]+\.(?:tolist|item|cpu|synchronize)\(\)\s*")


class DeviceWait:
    """Is asked about the main thread again and again, while the event loop makes no round."""

    def __init__(self) -> None:
        self._place: tuple[int, tuple[str, ...]] | None = None
        self._since = 0.0

    def seconds(self, number: int, places: Sequence[str], now: float) -> float:
        """For how long it has been seen in this one wait; 0 if it is in none.

        number: of the round. places: the main thread's frames, as of ``report.main_thread``.
        now: seconds.
        """
        place = (number, tuple(places))
        if not is_wait(places):
            self._place = None
        elif place != self._place:
            self._place, self._since = place, now
        return 0.0 if self._place is None else now - self._since

    def forget(self) -> None:
        """What was seen before says nothing about now."""
        self._place = None


def is_wait(places: Sequence[str]) -> bool:
    """True if the main thread waits for the device in a place of SGLang's scheduler."""
    if not places:
        return False
    if STAND_IN.fullmatch(places[-1]):
        return True
    loop = next((n for n, place in enumerate(places) if LOOP.search(place)), len(places))
    inside = places[loop + 1 :]
    if inside and SYNCHRONIZES.fullmatch(inside[-1]):
        return len(inside) > 1 and all(p.startswith(SCHEDULER) for p in inside[:-1])
    called = bool(inside) and all(p.startswith(SCHEDULER) for p in inside)
    return called and FETCHES.fullmatch(_line(inside[-1])) is not None


def _line(place: str) -> str:
    """The line of source of a place; '' if it cannot be read."""
    path, _, rest = place.partition(":")
    module = sys.modules.get(path.removesuffix(".py").replace("/", "."))
    file = getattr(module, "__file__", None)
    number = rest.split(" ")[0]
    return linecache.getline(file, int(number)).rstrip("\n") if file and number.isdecimal() else ""
