"""What SGLang's /metrics has of g4debug: the counters are real files of prometheus_client's."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("prometheus_client")
pytestmark = pytest.mark.once("the code is ours alone")
# In a process of its own: prometheus_client asks for the folder when it is imported.
SCRIPT = """
import json
from types import SimpleNamespace
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector
from g4debug.findings.metrics import Metrics
from g4debug.findings.status import Status

status = Status(SimpleNamespace(event_step=7, step=7))
for name, mode in (("flight-recorder", "raise"), ("page-table", "raise"), ("ledger", "")):
    status.part(name).mode = mode
for name in ("prefix-cache", "pool-leak"):
    status.part(name).mode = "raise"
status.part("prefix-cache").nothing("this server keeps no prefix cache", off=True)
status.part("pool-leak").off("with pipeline parallelism")
for name in ("spec-lifecycle", "kv-writes"):
    status.part(name).mode = "raise"
    status.part(name).off("not with a GPU in raise", documented=True)
status.part("kv-writes").audited({"kv.set": "somebody replaced it"})
metrics = Metrics(status, {"tp_rank": "1"})
told = []
for kinds in ((), ("hang",), ("starved", "starved"), ()):
    for kind in kinds:
        status.found("flight-recorder", kind)
    metrics.update()
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    told.append({
        f"{s.name} {s.labels.get('tracer', '')} {s.labels.get('kind', '')}": s.value
        for family in registry.collect() for s in family.samples
        if s.labels["tp_rank"] == "1"
    })
print(json.dumps(told))
"""


def test_a_hang_and_starved_requests_are_counted(tmp_path):
    """They stop nobody, so a counter is what an alert sees."""
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    before, hangs, starved, after = json.loads(run.stdout)
    name = "g4debug_findings_total flight-recorder"
    assert not [key for key in before if key.startswith("g4debug_findings_total")]
    assert hangs[f"{name} hang"] == 1
    assert (starved[f"{name} hang"], starved[f"{name} starved"]) == (1, 2)
    assert after == starved
    assert before["g4debug_armed flight-recorder "] == before["g4debug_armed page-table "] == 1
    assert not [key for key in after if "ledger" in key]
    # An alert on 0 would never end on a sound server that has nothing for a tracer.
    assert before["g4debug_armed prefix-cache "] == 1
    assert before["g4debug_armed pool-leak "] == 0
    # An alert leaves out what is off as documented, but not where a hook is dead besides.
    assert before["g4debug_armed spec-lifecycle "] == before["g4debug_armed kv-writes "] == 0
    declined = {k for k, v in before.items() if k.startswith("g4debug_declined") and v == 1}
    assert declined == {"g4debug_declined spec-lifecycle "}
