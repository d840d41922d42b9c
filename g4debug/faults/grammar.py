"""The grammar of G4DEBUG_FAULTS: fail-rs's grammar, with a seed and selectors added.

::

    spec    := item (";" item)*
    item    := "seed=" INT | NAME "=" chain
    chain   := action ("->" action)*
    action  := [P "%"] [N "*"] task ["(" argument ")"] ("@" KEY "=" VALUE)*
    task    := "on" | "off" | a task that the fault declares

``page-oob=5%3*corrupt(1)@mode=decode`` fires at each decode with a probability of 5 %, at most
three times. In a chain, the next action takes over when the count of an action is used up.
``@at=N`` is the N-th opportunity of the fault in the process, counted from 1; logged firings are
repeated by it. ``@rank=N`` strikes the tensor-parallel rank N only. Source: fail-rs
(https://docs.rs/fail, ``fail::cfg``).
"""

from __future__ import annotations

import difflib
import random
import re
from dataclasses import dataclass, field

from g4debug import discovery

SELECTORS = ("at", "layer", "mode", "rank", "request", "runner", "step")

_ACTION = re.compile(
    r"""^\s*(?:(?P<percent>\d+(?:\.\d+)?)%)?
        (?:(?P<count>\d+)\*)?
        (?P<task>[a-z][a-z0-9-]*)
        (?:\((?P<arg>[^()]*)\))?
        (?P<select>(?:@[a-z]+=[^@\s]+)*)\s*$""",
    re.VERBOSE,
)


class GrammarError(ValueError):
    """G4DEBUG_FAULTS cannot be used. The text says where, and what would be valid."""


@dataclass(frozen=True)
class Action:
    """One action of a chain. probability: 0..1. count: None means no limit."""

    task: str
    argument: str = ""
    probability: float = 1.0
    count: int | None = None
    select: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Plan:
    """The whole string, parsed."""

    seed: int = 0
    chains: dict[str, tuple[Action, ...]] = field(default_factory=dict)


def parse(text: str) -> Plan:
    """Read a fault string. Raises GrammarError for an unknown fault or a wrong syntax."""
    seed: int | None = None
    chains: dict[str, tuple[Action, ...]] = {}
    known = discovery.names("fault")
    for item in filter(None, (part.strip() for part in text.split(";"))):
        name, separator, value = item.partition("=")
        name = name.strip()
        if not separator or not value.strip():
            raise GrammarError(f"{item!r}: expected name=action, e.g. page-oob=1*on")
        if name == "seed":
            if seed is not None:
                raise GrammarError("seed is given twice")
            try:
                seed = int(value)
            except ValueError:
                raise GrammarError(f"seed={value!r}: expected a whole number") from None
            continue
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            meant = f"did you mean {near[0]!r}? " if near else ""
            raise GrammarError(f"unknown fault {name!r}; {meant}valid: {', '.join(known)}")
        if name in chains:
            raise GrammarError(f"fault {name!r} is given twice; join its actions with '->'")
        chains[name] = tuple(_action(name, part) for part in value.split("->"))
    return Plan(seed=seed or 0, chains=chains)


def _action(fault: str, text: str) -> Action:
    match = _ACTION.match(text)
    if match is None:
        raise GrammarError(
            f"{fault}={text!r}: expected [P%][N*]task[(argument)][@selector=value], "
            "e.g. 5%3*corrupt(1)@mode=decode"
        )
    percent = float(match["percent"]) if match["percent"] else 100.0
    if not 0 < percent <= 100:
        raise GrammarError(f"{fault}={text!r}: probability must be above 0 and at most 100 %")
    if match["count"] and not match["count"].strip("0"):
        raise GrammarError(f"{fault}={text!r}: a count of 0 never fires; use off")
    select: list[tuple[str, str]] = []
    for part in filter(None, match["select"].split("@")):
        key, _, value = part.partition("=")
        if key not in SELECTORS:
            raise GrammarError(
                f"{fault}: unknown selector @{key}; valid: {', '.join('@' + s for s in SELECTORS)}"
            )
        select.append((key, value))
    return Action(
        task=match["task"],
        argument=match["arg"] or "",
        probability=percent / 100,
        count=int(match["count"]) if match["count"] else None,
        select=tuple(select),
    )


class Chain:
    """How far a fault's chain has come: which action is next, and how often it fired."""

    def __init__(self, actions: tuple[Action, ...], seed: int, name: str) -> None:
        self.actions = actions
        # Each fault has its own generator, so that a second fault does not change what the first
        # one draws.
        self.random = random.Random(f"{seed}:{name}")
        self.index = 0
        self.fired = 0

    def fire(self, **context: object) -> Action | None:
        """The action to take at this opportunity, or None.

        ``context`` has the values that selectors are compared with (layer=3, mode="decode").
        """
        if self.index >= len(self.actions):
            return None
        action = self.actions[self.index]
        for key, value in action.select:
            if str(context.get(key, "")).lower() != value.lower():
                return None
        if action.probability < 1.0 and self.random.random() >= action.probability:
            return None
        self.fired += 1
        if action.count is not None and self.fired >= action.count:
            self.index += 1
            self.fired = 0
        return None if action.task == "off" else action
