"""The declaration of a fault, and its injection, which logs its firings for a replay."""

from __future__ import annotations

import importlib
import logging
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from g4debug import discovery
from g4debug.faults.grammar import Action, Chain, GrammarError, Plan
from g4debug.hooking import targets
from g4debug.hooking.hooks import Hooks, Order
from g4debug.hooking.older import older_module

logger = logging.getLogger("g4debug")
Hook = Callable[..., Any]
Put = Callable[[Hook], Hook]  # a decorator
Asked = Literal[
    "a draft",
    "a draft model",
    "a draft that reads the target's KV",
    "hidden states that a draft begins with",
    "a SWA pool",
    "page tables",
    "lists of tokens",
    "a prefix cache",
]


@dataclass(frozen=True)
class Fault:
    """One fault, declared as ``FAULT`` in its file, which also has ``install(injection)``.

    tasks: each task that it has -> one line of help. caught_by: the tracers that must catch it.
    recreates: the id of the fix against the bug that it puts back, or ''. arguments: the tasks that
    take an argument. counts, default: if that is a whole number, what it counts, and the number
    without an argument. selectors: those for which the fault passes a value to ``Injection.fire``.
    Another one would never match, so it is an error; ``@at=``, ``@rank=`` and ``@step=`` belong to
    every fault. drills: chains with which it does harm under the load of repro/matrix.py, which
    runs each of them once. plain_drills: the same for a server without speculative decoding. needs:
    hook sites that it cannot do without. Where SGLang does not have them, there is no such fault.
    backend: the attention backend that its drills run on, '' for the CPU engine's default. ranks:
    how many tensor-parallel ranks it needs. asks: what a server must have, or it never fires there.
    watched: of caught_by, the tracer of which SGLANG_TRTLLM_MHA_DEBUG=watch must tell it, too; ''
    if watch may be blind to it.
    """

    id: str
    title: str
    tasks: dict[str, str]
    caught_by: tuple[str, ...]
    recreates: str = ""
    arguments: tuple[str, ...] = ()
    counts: str = ""
    default: int = 1
    selectors: tuple[str, ...] = ()
    drills: tuple[str, ...] = ("1*on",)
    plain_drills: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    backend: str = ""
    ranks: int = 1
    asks: tuple[Asked, ...] = ()
    watched: str = ""

    @property
    def absent(self) -> str:
        """Why this fault is not there on the installed SGLang, '' if it is."""
        missing = targets.absent(*self.needs)
        why = f"SGLang {targets.sglang_version()} has no {', '.join(missing)}" if missing else ""
        elsewhere = getattr(self._older, "absent", None)
        return str(elsewhere(why)) if elsewhere is not None else why

    def number_of(self, action: Action) -> int:
        """The number that an action is given. Raises GrammarError for an unusable argument."""
        text = action.argument or str(self.default)
        if not text.isdecimal() or int(text) < 1:
            raise GrammarError(
                f"{self.id}: {action.task}({text}): expected {self.counts}, at least 1"
            )
        return int(text)

    @property
    def _older(self) -> Any:
        """The module that does the work of the fault's file on the installed SGLang; None if none.

        It has an ``install``. It may have an ``absent``, which is given what its ``needs`` say.
        """
        return older_module(discovery.module_name("fault", self.id))

    def put(self, injection: Injection) -> None:
        """Install it in the way of the installed SGLang."""
        own = importlib.import_module(discovery.module_name("fault", self.id))
        (self._older or own).install(injection)


Install = Callable[["Injection"], None]
EVERY_FAULT = ("at", "rank", "step")  # selectors that need no value from the fault


@dataclass
class Clock:
    """Counts the worker steps of this process. Findings and dumps use the same numbers.

    It also knows the scheduler, and so the tensor-parallel rank.

    While SGLang prepares a batch, and allocates for it, the step is already the batch's own.
    """

    step: int = 0
    preparing: bool = False
    scheduler: Any = None
    _rank: int = -1

    def attach(self, scheduler: Any, *args: object, **kwargs: object) -> None:
        self.scheduler = scheduler

    @property
    def rank(self) -> int:
        """The tensor-parallel rank, -1 if it is not known yet."""
        if self._rank < 0 and self.scheduler is not None:
            from g4debug.findings.steps import ranks  # needs torch, which a list of faults does not

            self._rank = ranks(self.scheduler).tp
        return self._rank

    def prepare(self, *args: object, **kwargs: object) -> None:
        self.step += not self.preparing
        self.preparing = True

    def tick(self, *args: object, **kwargs: object) -> None:
        self.prepare()
        self.preparing = False


@dataclass
class Injection:
    """One firing plan of a fault in this process: it asks its chain and logs what fired.

    ``before``, ``after`` and ``around`` are decorators. They put the fault's function at a site of
    SGLang's, as those of :class:`Hooks` do.
    """

    fault: Fault
    chain: Chain
    seed: int
    schedule: list[str] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)
    hooks: Hooks = field(default_factory=Hooks)
    opportunities: int = 0
    random: random.Random = field(default_factory=random.Random)
    _fired: str = ""  # the action that fires again what fired last

    def fire(self, **context: object) -> Action | None:
        """The action at this opportunity, or None. Selectors are compared with ``context``.

        What the fault then draws comes from ``self.random``. That depends only on the seed and on
        the number of the opportunity, so a replay draws the same.
        """
        self.opportunities += 1
        clock = self.clock
        action = self.chain.fire(at=self.opportunities, step=clock.step, rank=clock.rank, **context)
        if action is not None:
            self.random = random.Random(f"{self.seed}:{self.fault.id}:{self.opportunities}")
            argument = f"({action.argument})" if action.argument else ""
            rank = "".join(f"@rank={value}" for key, value in action.select if key == "rank")
            self._fired = f"1*{action.task}{argument}@at={self.opportunities}{rank}"
        return action

    def before(self, site: str, optional: bool = False) -> Put:
        return self._put(self.hooks.before, site, optional)

    def after(self, site: str, optional: bool = False) -> Put:
        return self._put(self.hooks.after, site, optional)

    def around(self, site: str, optional: bool = False) -> Put:
        return self._put(self.hooks.around, site, optional)

    def _put(self, how: Callable[..., None], site: str, optional: bool) -> Put:
        def put(hook: Hook) -> Hook:
            how(site, Order.FAULT, self.fault.id, hook, optional=optional)
            return hook

        return put

    def log(self, what: str) -> None:
        """Log a firing. Every firing is logged, so a fault never acts in secret.

        The line ends in the action that fires it again:
        ``page-oob #2: ... [step 9: 1*corrupt(1)@at=17]``. See :func:`replay`.
        """
        number, step = len(self.schedule) + 1, self.clock.step
        line = f"{self.fault.id} #{number}: {what} [step {step}: {self._fired}]"
        self.schedule.append(line)
        logger.warning("g4debug fault (seed=%d) %s", self.seed, line)


def replay(seed: int, schedule: Iterable[str]) -> str:
    """The value of G4DEBUG_FAULTS that repeats the logged firings of a process, and no others."""
    chains: dict[str, list[str]] = {}
    for line in schedule:
        action = line.rpartition(": ")[2].rstrip("]")
        actions = chains.setdefault(line.partition(" ")[0], [])
        if action not in actions:  # one firing may log more than one line
            actions.append(action)
    return ";".join([f"seed={seed}", *(f"{n}={'->'.join(a)}" for n, a in chains.items())])


def recreated_bugs(plan: Plan) -> dict[str, str]:
    """Fix id -> the fault that puts its bug back, for each such fault of the plan."""
    faults = (discovery.load("fault", name) for name in plan.chains)
    return {f.recreates: f.id for f in faults if f.recreates}


def check(plan: Plan) -> None:
    """Raises GrammarError if a fault cannot carry out the plan here."""
    for name, actions in plan.chains.items():
        fault: Fault = discovery.load("fault", name)
        if fault.absent:
            raise GrammarError(f"{fault.id} cannot be injected here: {fault.absent}")
        for action in actions:
            _refuse_impossible(fault, action)


def install_all(plan: Plan, hooks: Hooks) -> tuple[Injection, ...]:
    """Install the faults of the plan. Raises GrammarError if a fault cannot carry it out."""
    check(plan)
    injections = []
    clock = Clock()
    for name, actions in plan.chains.items():
        fault: Fault = discovery.load("fault", name)
        chain = Chain(actions, plan.seed, name)
        injection = Injection(fault, chain, plan.seed, clock=clock, hooks=hooks)
        fault.put(injection)
        injections.append(injection)
    if injections:
        # Registered last, so it runs first: a fault that acts before a step counts for that step.
        hooks.before("batch.prepare_for_extend", Order.FAULT, "clock", clock.prepare)
        hooks.before("batch.prepare_for_decode", Order.FAULT, "clock", clock.prepare)
        hooks.before("scheduler.run_batch", Order.FAULT, "clock", clock.tick)
        hooks.before("scheduler.init", Order.FAULT, "clock", clock.attach)
    return tuple(injections)


def _refuse_impossible(fault: Fault, action: Action) -> None:
    if action.task not in ("off", *fault.tasks):
        valid = ", ".join(("off", *fault.tasks))
        raise GrammarError(f"{fault.id} has no task {action.task!r}; valid: {valid}")
    if action.argument and action.task not in fault.arguments:
        raise GrammarError(f"{fault.id}: {action.task} takes no argument")
    if fault.counts:
        fault.number_of(action)
    for key, value in action.select:
        if key not in (*EVERY_FAULT, *fault.selectors):
            valid = ", ".join(f"@{s}" for s in (*EVERY_FAULT, *fault.selectors))
            raise GrammarError(f"{fault.id} has no selector @{key}; valid: {valid}")
        if key == "rank" and not value.isdecimal():
            raise GrammarError(
                f"{fault.id}: @rank={value}: expected a tensor-parallel rank, from 0"
            )
        known = selector_values(key)
        if known and value.lower() not in known:
            raise GrammarError(
                f"{fault.id}: @{key}={value} never matches; valid: {', '.join(known)}"
            )


def selector_values(key: str) -> tuple[str, ...]:
    """The values that a selector can have; () if there is no such list.

    The forward modes are SGLang's, which is imported for them.
    """
    if key == "runner":
        return ("draft", "target")
    if key == "mode":
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        return (*(name.lower() for name in ForwardMode.__members__), "replay")
    return ()
