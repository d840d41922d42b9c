"""Adds g4debug's metrics to SGLang's ``/metrics``.

SGLang collects the metrics of all its processes through files (prometheus_client's multiprocess
mode): it sets ``PROMETHEUS_MULTIPROC_DIR`` before it starts the schedulers, each process writes
there, and the HTTP server adds up. prometheus_client looks at that variable when it is imported,
so it is imported here only when a scheduler is there.
"""

from __future__ import annotations

import os
from typing import Any

from g4debug.findings.status import Status
from g4debug.hooking.resolved import server_argument

MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"


def labels_of(scheduler: Any) -> dict[str, str]:
    """The labels that tell this scheduler from others. Those that SGLang's own metrics have."""
    args = scheduler.server_args
    ranks = {name: getattr(scheduler, name, None) for name in ("tp_rank", "pp_rank", "dp_rank")}
    return {
        "model_name": str(server_argument(args, "served_model_name", "")),
        **{name: str(0 if rank is None else rank) for name, rank in ranks.items()},
    }


def wanted(scheduler: Any) -> bool:
    """True if this server has a ``/metrics``."""
    enabled = bool(server_argument(scheduler.server_args, "enable_metrics"))
    return enabled and bool(os.environ.get(MULTIPROCESS))


class Metrics:
    """The metrics of one scheduler. ``labels``: name -> value, the same for all of them.

    Raises ImportError if there is no prometheus_client, which SGLang brings along.
    """

    def __init__(self, status: Status, labels: dict[str, str]) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge

        self.status = status
        self.labels = labels
        # The HTTP server reads the files, whatever the registry. One of our own clashes with none.
        registry = CollectorRegistry()
        names = [*labels, "tracer"]
        self._watch = Gauge(
            "g4debug_watch",
            "1 if SGLANG_TRTLLM_MHA_DEBUG=watch, which arms only a part of what 1 arms.",
            [*labels],
            registry=registry,
            multiprocess_mode="mostrecent",
        )
        self._armed = Gauge(
            "g4debug_armed",
            "0 when the tracer is off, silent, or a hook of it does not run; else 1, also if this "
            "server has nothing for it to judge.",
            names,
            registry=registry,
            multiprocess_mode="mostrecent",
        )
        self._declined = Gauge(
            "g4debug_declined",
            "1 if the tracer is off since the start, as the documentation says of every server of "
            "this kind; else 0.",
            names,
            registry=registry,
            multiprocess_mode="mostrecent",
        )
        self._limited = Gauge(
            "g4debug_limited",
            "How many limits the tracer has: things that it does not judge on this server.",
            names,
            registry=registry,
            multiprocess_mode="mostrecent",
        )
        self._findings = Counter(
            "g4debug_findings", "Findings.", [*names, "kind"], registry=registry
        )
        self._checks = Counter(
            "g4debug_checks",
            "How many things the tracer has checked, by their name in the status.",
            [*names, "checked"],
            registry=registry,
        )
        self._told: dict[tuple[str, ...], int] = {}

    def update(self) -> None:
        """Write what has changed since the last call."""
        self._watch.labels(**self.labels).set(int(self.status.watch))
        for part in list(self.status.parts.values()):
            if not part.mode:
                continue  # the ledger and the step recorder are no tracers
            record = part.record()
            mine = {**self.labels, "tracer": part.name}
            off = record.off and not record.idle  # idle: an alert could never be cleared
            blind = bool(off or record.dead or record.silent)
            self._armed.labels(**mine).set(0 if blind else 1)
            failed = record.dead or record.silent
            self._declined.labels(**mine).set(int(record.declined and not failed))
            self._limited.labels(**mine).set(len(record.limits))
            for done in record.checked:
                self._raise(self._checks, done.count, **mine, checked=done.what)
            for kind, count in record.findings.items():
                self._raise(self._findings, count, **mine, kind=kind)

    def _raise(self, counter: Any, total: int, **labels: str) -> None:
        """Raise a counter to ``total``."""
        key = (counter._name, *labels.values())
        new = total - self._told.get(key, 0)
        if new:
            counter.labels(**labels).inc(new)
            self._told[key] = total
