"""On a GPU, CUDA graphs on: prefix-cache, and spec-lifecycle with the values that it follows.

Which bits a GPU computes may depend on the batch, so what must be equal with tracers and without
are the answers of requests that run alone.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from g4debug import cpu, discovery
from g4debug.dumps import reading
from g4debug.tracers.spec_lifecycle.tracer import NOT_FOLLOWED

sys.path.insert(0, str(Path(__file__).parents[2] / "repro"))
from suites.healthy.run import trouble

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda"
DRIVER = Path(__file__).with_name("serve_shared_prefixes.py")
TRACERS = ("prefix-cache", "spec-lifecycle")
HEALTHY = (12, 240, 40)  # requests that run alone, and together; tokens of the longest answer
ALONE, MANY, _ = HEALTHY
# protected-page strikes a request that has made two pages of its own.
STRUCK = (0, 30, 160)
# Nothing is wrong with these. The first requests, which run alone, are left alone.
STRESS = "seed=11;abort-request=130*off->9%on;forced-retract=4%on;radix-evict=130*off->8%on(1024)"
HAPPENED = {
    "a prefix came from the cache": r"#cached-token: [1-9]",
    "a request was aborted": r"abort-request #",
    "a request was retracted": r"Retract requests",
    "a prefix was evicted": r"radix-evict #",
}
# In log mode first: it reports, and stops nothing. In the other one it must be said that the
# tracers were never run so.
MODES = {
    "log": {"G4DEBUG_MODE": "log"},
    "raise": {"G4DEBUG_MODE": "raise", "G4DEBUG_NOT_RUN_ON_THIS_RELEASE": "1"},
}
FAULTS = (
    "cached-page-alias", "insert-wrong-page", "lent-row-page", "protected-page", "verify-input",
    "verify-result", "sampled-token",
)  # fmt: skip
DRILLS = [(name, drill) for name in FAULTS for drill in discovery.load("fault", name).drills]
Served = tuple[int, dict[str, Any], str, list[Path]]


def serve(folder: Path, name: str, traffic: tuple[int, int, int], **environ: str) -> Served:
    """Exit status, what a server of its own answered, its log, and the dumps that it left."""
    dumps, result = folder / "dumps", folder / f"{name}.json"
    base = cpu.environment(os.environ) if DEVICE == "cpu" else dict(os.environ)
    with (folder / f"{name}.log").open("w+") as log:
        run = subprocess.run(
            [sys.executable, str(DRIVER), DEVICE, str(result), *map(str, traffic)],
            env={**base, "SGLANG_TRTLLM_MHA_DEBUG_DIR": str(dumps), **environ},
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=280,
            check=False,
        )
        log.seek(0)
        text = log.read()
    found = json.loads(result.read_text()) if result.is_file() else {}
    return run.returncode, found, text, sorted(dumps.glob("*.pt"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("plain")
    status, found, log, _ = serve(folder, "plain", HEALTHY, G4DEBUG_FAULTS=STRESS)
    assert status == 0, log[-3000:]
    return found


@pytest.mark.parametrize("mode", MODES)
def test_a_healthy_server(tmp_path: Path, plain: dict[str, Any], mode: str) -> None:
    armed = {"G4DEBUG_TRACE": ",".join(TRACERS), "G4DEBUG_FAULTS": STRESS, **MODES[mode]}
    status, found, log, dumps = serve(tmp_path, "armed", HEALTHY, **armed)
    assert status == 0, log[-3000:]
    assert not dumps, [reading.read(path).finding.headline for path in dumps]
    assert not trouble(log, tmp_path)
    missing = [what for what, sign in HAPPENED.items() if not re.search(sign, log)]
    assert not missing, f"it did not happen that {'; '.join(missing)}"
    assert "graph: True" in log or DEVICE == "cpu", "no decode step was a replay"
    told = {t["name"]: t for t in found["tracers"]}
    for name in TRACERS:
        said = told[name]
        assert not said["off"], said
        assert not any(NOT_FOLLOWED in limit["why"] for limit in said["limits"]), said["limits"]
        judged = {c["what"]: c["count"] for c in said["checked"]}
        print(f"{mode}: {name} judged {judged}; limits: {said['limits']}")
        assert sum(n for what, n in judged.items() if what != "steps") > 100, judged
    lengths = list(map(len, found["tokens"]))
    wrong = [
        (n, wanted)
        for n, wanted, aborted in zip(lengths, found["wanted"], found["aborted"], strict=True)
        if n != wanted and not aborted
    ]
    assert not wrong
    assert found["tokens"][:ALONE] == plain["tokens"][:ALONE]
    same = sum(map(list.__eq__, found["tokens"][ALONE:], plain["tokens"][ALONE:]))
    print(f"{mode}: of {MANY} requests that ran together {same} got the same tokens")


@pytest.mark.parametrize(("fault", "drill"), DRILLS, ids=map("=".join, DRILLS))
def test_a_fault_is_told_by_the_tracer_that_it_names(
    tmp_path: Path, fault: str, drill: str
) -> None:
    declared = discovery.load("fault", fault)
    if declared.absent:
        pytest.skip(declared.absent)
    armed = dict.fromkeys([*TRACERS, *declared.caught_by, "pool-leak"])
    status, _, log, dumps = serve(
        tmp_path,
        "struck",
        STRUCK,
        G4DEBUG_TRACE=",".join(armed),
        G4DEBUG_FAULTS=f"seed=3;{fault}={drill}",
        G4DEBUG_LEAK_STEPS="1",
        **MODES["raise"],
    )
    fired = re.search(rf"g4debug fault \(seed=3\) {fault} #1: .*\[step (\d+): ", log)
    assert fired, log[-3000:]
    assert status != 0, log[-3000:]
    assert dumps, log[-3000:]
    finding = reading.read(dumps[0]).finding
    print(f"{fault}={drill} in step {fired[1]}: step {finding.location.step}, {finding.headline}")
    # A lost page is counted by the census of every step, which may come first.
    assert finding.check in (*declared.caught_by, "pool-leak"), finding.headline
