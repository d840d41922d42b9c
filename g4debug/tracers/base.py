"""The declaration of a tracer, and the context that it works in.

If a hook of a tracer fails because of a bug of ours, that is logged, the hook is switched off, and
the tracer's status says so. Serving goes on. The only exception that a hook lets through to SGLang
is a TrapError.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from g4debug.findings.kinds import KINDS
from g4debug.findings.record import Evidence, Finding, Location
from g4debug.findings.status import Part
from g4debug.findings.steps import Recorder
from g4debug.hooking.hooks import Hooks, Isolated, Order
from g4debug.settings import Settings
from g4debug.trapping.describe import Describer
from g4debug.trapping.trap import Trap, TrapError

if TYPE_CHECKING:
    from g4debug.ledger.ledger import Ledger

logger = logging.getLogger("g4debug")


class CanaryError(Exception):
    """A canary was not caught as it must be. The text says what happened instead."""


@dataclass(frozen=True)
class Tracer:
    """One tracer, declared as ``TRACER`` in its ``tracer.py``.

    title: what must hold, in one line. ledger: it needs the page ledger (``context.ledger``).
    without_ledger: the rest of its checks when the ledger was given up, '' for nothing. opt_in: it
    is armed only by its name in ``G4DEBUG_TRACE``, not by ``SGLANG_TRTLLM_MHA_DEBUG=1``. young:
    where it was not run yet (:data:`g4debug.hooking.targets.RUN`), it is opt-in, too; else it would
    keep the others from being armed there. judges: in a thousand steps of a busy server it has
    something to judge, and counts it. each_forward: it has something to judge in each forward,
    whatever the mode. steady: counts that grow in each step of a mode in which they have grown.
    """

    id: str
    title: str
    install: Callable[[Context], None]
    ledger: bool = False
    without_ledger: str = ""
    opt_in: bool = False
    young: bool = False
    judges: bool = True
    each_forward: bool = False
    steady: tuple[str, ...] = ()


class Context:
    """The tools of a tracer: settings, recorder, trap, ledger, and isolated hooks on SGLang."""

    def __init__(
        self,
        tracer_id: str,
        hooks: Hooks,
        settings: Settings,
        recorder: Recorder,
        trap: Trap,
        ledger: Ledger | None = None,
    ) -> None:
        self.tracer_id = tracer_id
        self.hooks = hooks
        self.settings = settings
        self.recorder = recorder
        self.trap = trap
        self.ledger = ledger  # None if no armed tracer needs it
        self.status: Part = recorder.status.part(tracer_id)
        self.disabled = ""  # why a hook of this tracer was switched off, '' if none was

    @classmethod
    def alone(cls, tracer_id: str, settings: Settings, ledger: bool = False) -> Context:
        """A context with a recorder and a trap of its own, and maybe a ledger, for a canary."""
        from g4debug.ledger.ledger import Ledger

        recorder = Recorder(settings.steps)
        trap = Trap(settings, Describer(recorder))
        of = Ledger(recorder) if ledger else None
        return cls(tracer_id, Hooks(), settings, recorder, trap, of)

    def limit(self, what: str, why: str, *, documented: bool = False) -> None:
        """Something is not judged on this server, see :meth:`Part.limit`. Logged once."""
        self.status.limit(what, why, documented=documented)

    def off(self, why: str, *, documented: bool = False) -> None:
        """This tracer judges nothing from now on, see :meth:`Part.off`. Logged once."""
        self.status.off(why, documented=documented)

    def nothing(self, why: str, off: bool = False) -> None:
        """This server has nothing of what is judged here, see :meth:`Part.nothing`."""
        self.status.nothing(why, off)

    def checked(self, n: int = 1, what: str = "checks") -> None:
        """Count ``n`` things that were checked in this step. ``what``: a plural, "tables"."""
        self.status.checked(n, what)

    def described(
        self, kind: str, site: str, got: str, make: Callable[[], tuple[Finding, Evidence]]
    ) -> tuple[Finding, Evidence]:
        """``make()``: the finding in full. If that fails, the finding with what is certain.

        A bug of ours in a description must neither hide the finding nor end what comes behind it.
        got: what was seen, in words, from what is at hand.
        """
        try:
            return make()
        except Exception:
            name = self.tracer_id
            logger.exception("g4debug: %s: a finding cannot be described in full", name)
            finding = KINDS[name][kind].finding(
                site=site,
                headline=f"g4debug: {name}: {kind}: {got}",
                location=Location(process="scheduler", step=self.recorder.event_step),
                expected="not known, because g4debug could not describe this finding in full",
                got=got,
                cause="not known, for the same reason: the log has the failure; please report it",
            )
            return finding, Evidence()

    def before(self, site: str, hook: Callable[..., None], optional: bool = False) -> None:
        """Call ``hook(*args, **kwargs)`` before a site, isolated.

        optional: a release that has no such site is none the worse for it.
        """
        self.hooks.before(site, Order.TRACER, self.tracer_id, self.isolate(hook), optional)

    def after(self, site: str, hook: Callable[..., Any], optional: bool = False) -> None:
        """Call ``hook(result, *args, **kwargs)`` after a site, isolated.

        What the hook returns becomes the site's result. If the hook fails, the site's own result
        is kept. optional: as of :meth:`before`.
        """
        isolated = self.isolate(hook, keeps=True)
        self.hooks.after(site, Order.TRACER, self.tracer_id, isolated, optional)

    def replace(self, site: str, name: str, hook: Callable[..., Any]) -> None:
        """Pass ``hook(value, kwargs)`` on to a site in place of its keyword argument ``name``.

        kwargs: all its keyword arguments. If the hook fails, the site gets its own value.
        """
        isolated = self.isolate(hook, keeps=True)

        def around(call_next: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if name in kwargs:
                kwargs[name] = isolated(kwargs[name], kwargs)
            return call_next(*args, **kwargs)

        self.hooks.around(site, Order.TRACER, self.tracer_id, around)

    def own(self, site: str) -> Callable[..., Any] | None:
        """SGLang's own function at a site. None if anybody but this tracer has a hook there."""
        return self.hooks.own(site, self.tracer_id)

    def on_exception(
        self, site: str, hook: Callable[[], None], order: Order = Order.TRACER
    ) -> None:
        """Call ``hook()``, isolated, when a site raises, and then let the exception go on.

        If the hook raises a TrapError, that goes on instead, with the exception as its context.
        The hook finds the exception with ``sys.exception()``.
        """
        isolated = self.isolate(hook)

        def around(call_next: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            try:
                return call_next(*args, **kwargs)
            except TrapError:
                raise
            except Exception:
                isolated()
                raise

        self.hooks.around(site, order, self.tracer_id, around)

    def isolate(self, hook: Callable[..., Any], keeps: bool = False) -> Isolated:
        """``hook``, isolated, also for a place that is not a site. If it fails, its result is None.

        keeps: its result is then its first argument. A hook that is isolated stays as it is.
        """
        if isinstance(hook, Isolated):
            return hook

        def failed(error: Exception) -> None:
            # Switch off only this hook. The tracer's others must go on, above all the one that
            # reports what the guard in an already captured CUDA graph sees.
            isolated.on = False
            self.disabled = f"{type(error).__name__}: {error}"
            name = getattr(hook, "__name__", "a hook")
            self.status.limit(f"its hook {name} is off", f"it failed: {self.disabled}", error)

        isolated = Isolated(hook, failed, keeps, lets=(TrapError,))
        return isolated
