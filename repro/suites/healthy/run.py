"""Runs one group of healthy workloads, without tracers and with all of them, and judges both."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import replays
from harness.processes import Outcome, child, run_child
from harness.processes import group as process_group
from harness.tracers import RECORDS, of_one_rank, on_one_rank
from harness.verdicts import not_completed

from suites.healthy.workload import Group, Workload

LEAK_STEPS = 4  # busy steps between two censuses
# Lower than by default (20, 5000), so that what looks like a hang or a starved request is judged.
HANG_SECONDS, STARVED_STEPS = 5, 300
TIMEOUT = 1800.0  # seconds of one run
# The log line of a failure of g4debug itself. A tracer that is off finds nothing.
FAILED = re.compile(
    r"g4debug: .*(?:This is a failure of g4debug|the page ledger is off|not armed|is blind"
    r"|judges nothing:).*"
)
STEPS = "steps"  # that a tracer has seen, whether or not there was something to check
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}  # SGLang's own check, in every step
Counts = dict[str, dict[str, int]]  # tracer -> what was checked -> how often


@dataclass
class Done:
    """The result of one workload on one engine. problem: '' if it passed."""

    workload: Workload
    requests: int = 0
    facts: dict[str, int] = field(default_factory=dict)
    checked: dict[str, int] = field(default_factory=dict)  # tracer -> checks
    seconds: float = 0.0
    problem: str = ""


@dataclass
class Ran:
    """The result of one group. limits: what each tracer does not judge on this engine.

    replayed: whether its scheduler decided the same again, in words.
    """

    group: Group
    done: list[Done] = field(default_factory=list)
    limits: dict[str, str] = field(default_factory=dict)
    checked: dict[str, int] = field(default_factory=dict)
    problem: str = ""
    replayed: str = ""

    @property
    def good(self) -> bool:
        return not self.problem and not any(d.problem for d in self.done)


def tracing(folder: Path) -> dict[str, str]:
    """The switches of a process in which every tracer is armed and stops at a finding."""
    return {
        "G4DEBUG_TRACE": ",".join(on_one_rank()),
        "G4DEBUG_MODE": "raise",
        # This is the script that runs it there: what it shows is what the gate opens.
        "G4DEBUG_NOT_RUN_ON_THIS_RELEASE": "1",
        "G4DEBUG_LEAK_STEPS": str(LEAK_STEPS),
        "G4DEBUG_HANG_SECONDS": str(HANG_SECONDS),
        "G4DEBUG_STARVED_STEPS": str(STARVED_STEPS),
        "SGLANG_TRTLLM_MHA_DEBUG_DIR": str(folder / "dumps"),
    }


def checkers() -> tuple[str, ...]:
    """The tracers that check something in a server that works."""
    return tuple(t for t in on_one_rank() if t != RECORDS)


def start(group: Group, armed: bool, folder: Path) -> Outcome:
    """Run the workloads of a group in a process of their own."""
    environ = {**group.environ, **(STRICT if group.strict else {})}
    arguments = {"name": group.id, "model": group.model}
    return launch("suites.healthy.variant", arguments, environ, armed, folder, TIMEOUT)


def launch(
    module: str,
    arguments: Mapping[str, Any],
    environ: Mapping[str, str],
    armed: bool,
    folder: Path,
    timeout: float,
    warm: bool = False,
) -> Outcome:
    """Run a child with every tracer or with none. It leaves its log. warm: see ``run_child``."""
    if armed:
        environ = {**tracing(folder), **environ}  # a group may have limits of its own
        forget(folder)
    name = "armed" if armed else "plain"
    return run_child(name, module, arguments, environ, folder, timeout, warm=warm)


def forget(folder: Path) -> None:
    """Remove the dumps of an earlier run, which would be taken for findings of this one."""
    for dump in (*(folder / "dumps").glob("*.pt"), folder / replays.NAME):
        dump.unlink(missing_ok=True)


def judge(group: Group, plain: Outcome | None, armed: Outcome, folder: Path) -> Ran:
    """plain: None if nothing is compared."""
    ran = Ran(group, problem=trouble(armed.text, folder))
    if not ran.problem and not armed.completed:
        ran.problem = f"with tracers: {not_completed(armed)}"
    elif not ran.problem and plain is not None and not plain.completed:
        ran.problem = f"without tracers: {not_completed(plain)}"
    for workload in group.workloads:
        found = armed.result.get(workload.id)
        if found is None:
            if not ran.problem:
                ran.problem = f"{workload.id} did not run"
            continue
        bare = plain.result.get(workload.id) if plain is not None else None
        ran.done.append(_judge(group, workload, found, bare, ran))
    return ran


def replay(ran: Ran, folder: Path) -> None:
    """Let the scheduler of a group that was good decide again."""
    passed, told = replays.replayed(folder)
    if passed:
        ran.replayed = told
    else:
        ran.problem = f"replayed: {told}"


def _judge(
    group: Group, workload: Workload, found: dict[str, Any], plain: dict[str, Any] | None, ran: Ran
) -> Done:
    checked = checked_of(found["checked"])
    for record in found["status"]:
        _note_limits(record, ran)
    ran.checked = added([ran.checked, checked])
    idle = [t for t in checkers() if not checked.get(t) and t not in group.idle]
    problem = found["problem"]
    excused = [t for t in group.idle if checked.get(t)]
    if not problem and found["ranks"] != group.ranks:
        problem = f"{found['ranks']} schedulers show a status, expected {group.ranks}"
    if not problem and idle:
        problem = f"checked nothing: {', '.join(idle)}"
    if not problem and excused:
        problem = f"checked something, and the group says that it cannot: {', '.join(excused)}"
    if not problem and plain is not None and workload.compare:
        if plain["problem"]:
            problem = f"without tracers: {plain['problem']}"
        elif found["outputs"] != plain["outputs"]:
            wrong = [k for k, v in found["outputs"].items() if plain["outputs"].get(k) != v]
            problem = f"other tokens than without tracers: {', '.join(wrong[:4])}"
    return Done(workload, found["requests"], found["facts"], checked, found["s"], problem)


def added(tallies: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sums of several tallies, name by name."""
    found: dict[str, int] = {}
    for tally in tallies:
        for name, count in tally.items():
            found[name] = found.get(name, 0) + count
    return found


def counts(records: Iterable[Mapping[str, Any]]) -> Counts:
    """Each tracer's counts of its checks since its process was started, from its status."""
    return {r["name"]: {c["what"]: int(c["count"]) for c in r["checked"]} for r in records}


def fewest(ranks: Iterable[Counts]) -> Counts:
    """The counts of several schedulers: for each tracer, of the one in which it checked least."""
    found: Counts = {}
    for rank in ranks:
        least, mine = checked_of(found), checked_of(rank)
        found |= {name: rank[name] for name, n in mine.items() if n < least.get(name, n + 1)}
    return found


def checked_of(found: Counts) -> dict[str, int]:
    """tracer -> how many checks it made."""
    return {
        name: sum(n for what, n in tallies.items() if what != STEPS)
        for name, tallies in found.items()
        if name in on_one_rank()
    }


def _note_limits(record: dict[str, Any], ran: Ran) -> None:
    said = [f"{limit['what']}: {limit['why']}" for limit in record["limits"]]
    if record["off"]:
        said.append(f"off: {record['off']}")
        if record["name"] not in ran.group.idle and not ran.problem:
            ran.problem = f"{record['name']} is off: {record['off']}"
    if said:
        ran.limits[record["name"]] = "; ".join(said)


def trouble(text: str, folder: Path) -> str:
    """A failure that nothing excuses: a finding, or g4debug's own failure; '' if none."""
    if any((folder / "dumps").glob("*.pt")):
        found = re.search(r"(g4debug: .*)\n +expected: ", text)
        return f"a finding: {found[1] if found else 'see the dump'}"
    failed = FAILED.search(text)
    return f"g4debug failed: {failed[0]}" if failed else ""


def refused(group: Group, outcome: Outcome) -> Ran:
    """Judge a group that SGLang itself cannot run here."""
    ran = Ran(group)
    if group.refused not in outcome.text:
        last = not_completed(outcome) if not outcome.completed else "it ran"
        ran.problem = f"expected SGLang to say {group.refused!r}; {last}"
    return ran


# --- the server under load -------------------------------------------------------------------


@dataclass
class Served:
    """The result of the server under load."""

    minutes: float
    sent: dict[str, int] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    checked: dict[str, int] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)
    problem: str = ""


def serve(minutes: float, folder: Path, model: str) -> Served:
    """A real ``launch_server`` with every tracer, under load for some minutes."""
    from g4debug import cpu
    from g4debug.cpu import server
    from suites.healthy.load import FLAGS, Load

    folder.mkdir(parents=True, exist_ok=True)
    log, served = folder / "server.log", Served(minutes)
    forget(folder)
    environ = cpu.environment(os.environ) | tracing(folder) | STRICT
    port = server.free_port()
    mine = [*FLAGS, "--host=127.0.0.1", f"--port={port}"]
    flags = server.command(mine, model=model)[3:]  # of the module
    command = child("suites.healthy.server", "cpu", folder / "server.json", {"flags": flags})
    url = f"http://127.0.0.1:{port}"
    try:
        with log.open("wb") as sink, process_group(command, environ, sink) as process:
            server.wait_until_healthy(url, process, log, timeout=180.0)
            load = Load(url, minutes * 60)
            asyncio.run(load.run())
            served.sent, served.ended = dict(load.sent), dict(load.ended)
            served.checked = checked_of(counts(of_one_rank(process.pid)))
    except Exception as e:  # whatever ends it is the result
        served.problem = f"{type(e).__name__}: {e}"
    text = log.read_text(errors="replace")
    served.seen = {
        what: sum(int(n) for n in re.findall(rf"{sign}: (\d+)", text))
        for what, sign in (
            ("retractions", "#retracted_reqs"),
            ("prompt tokens from the prefix cache", "#cached-token"),
        )
    }
    idle = [t for t in checkers() if not served.checked.get(t)]
    served.problem = trouble(text, folder) or served.problem
    if not served.problem and idle:
        served.problem = f"checked nothing: {', '.join(idle)}"
    return served


# --- between two calls of the script ------------------------------------------------------------


def keep(ran: Ran, path: Path) -> None:
    """Write a result, so that a script that was interrupted can go on."""
    done = [{**vars(d), "workload": d.workload.id} for d in ran.done]
    path.write_text(json.dumps({**vars(ran), "group": "", "done": done}))


def kept(group: Group, path: Path) -> Ran | None:
    """A result that was kept; None if there is none, or if it was not good."""
    if not path.is_file():
        return None
    data = json.loads(path.read_text())
    workloads = {w.id: w for w in group.workloads}
    if any(d.get("workload") not in workloads for d in data["done"]):
        return None
    del data["group"]
    data["done"] = [Done(**{**d, "workload": workloads[d["workload"]]}) for d in data["done"]]
    ran = Ran(group, **data)
    return ran if ran.good else None
