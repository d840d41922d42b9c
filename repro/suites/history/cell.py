"""One cell of the table: a case, one of its arms, a tool and a seed, in a process of its own."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.processes import START, UP, Outcome, run_child
from packaging.version import Version

from g4debug import cpu
from g4debug.cpu.server import DEFAULT
from g4debug.dumps import reading
from g4debug.findings.kinds import KINDS
from g4debug.findings.record import TrapRecord
from g4debug.hooking import targets
from g4debug.settings import fix_switch
from suites.history import counter, gpu, grades
from suites.history.case import CPU, Arm, Case
from suites.history.cases import case_of, truth_of
from suites.history.plugin import FOLDER, TRUTH
from suites.history.tools import TOOLS, Tool

BUGGY, FIXED, RIGHT = ARMS = "buggy", "fixed", "right"  # any other arm is a release
ABSENT = "not run: that machine had no environment with this SGLang"
SPOILED = "spoiled"
REPRO = Path(__file__).resolve().parents[2]
ROOT = REPRO.parent
# The suite's module had another name when the first cells were kept.
TRUTH_FAILED = re.compile(r"\A[\w.]*GroundTruthError: ")
# The flight recorder's dump when SGLang dies by itself. It accuses nobody.
NO_ALARM = {name for name, kind in KINDS["flight-recorder"].items() if kind.died}
NO_ALARM |= {"sigterm", "crash"}  # what older dumps call them
_REFUSED = re.compile(
    r"g4debug: could not be armed: (.*)|g4debug: (SGLang \S+ was never run with .*)"
)
# An end that has nothing to do with the bug: another program has the GPU, or the engine was too
# slow for what the workload is about.
NOT_EXERCISED = "NotExercised: "
_SPOILED = re.compile(
    r"[\w.]*Error: CUDA error: (?:CUDA-capable device\(s\) is/are busy|out of memory)"
    r"|[\w.]*OutOfMemoryError: CUDA out of memory"
    r"|ValueError: The memory capacity is unbalanced"
    rf"|[\w.]*{NOT_EXERCISED}"
)
_ENDED = re.compile(
    r"^[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|NotExercised)\b.*$", re.MULTILINE
)
# SGLang takes no heed of a switch, and runs as if it were not set.
_IGNORED = re.compile(r"Invalid value for (SGLANG_\w+): [^\n]*")
_DIED = re.compile(r"^([A-Za-z_][\w.]*(?:Error|Exception|Trap\w*|Interrupt)\b.*)$", re.MULTILINE)


@dataclass
class Cell:
    """One run of a case, and its result.

    grade: one of ``grades.py``. after: steps from the first trigger to the alarm, or to the
    end if there was none. said: what the tool said, or why the process died, in one line. wrong:
    answers that are not the right ones, of ``answers``; -1 where there are none to compare with.
    device: "cpu" or "cuda"; where: the name of the GPU. model: the toy that is served.
    """

    case: str
    arm: str
    tool: str
    seed: int
    grade: str = grades.SILENT
    said: str = ""
    after: int = -1
    steps: int = 0
    reached: int = 0
    triggered: int = 0
    note: str = ""
    ended: str = ""  # "completed", "died", "hangs", or SPOILED: then it proves nothing
    wrong: int = -1
    answers: int = 0
    seconds: float = 0.0
    outputs: dict[str, Any] = field(default_factory=dict)
    device: str = CPU
    where: str = ""
    model: str = DEFAULT

    @property
    def id(self) -> str:
        """The name of its folder and of its result."""
        where = "" if self.device == CPU else f".{self.device}"
        model = "" if self.model == DEFAULT else f"{self.model}."
        return f"{model}{self.case}.{self.arm}.{self.tool}.{self.seed}{where}"


PYTHONS: dict[str, Path] = {}  # release -> the Python that the user named for it


def interpreter(release: str, device: str = CPU) -> Path:
    """The Python of the environment that has a release of SGLang, whether or not it is there.

    The environments of ``make env`` are for the CPU, so they do not count for a GPU.
    """
    if release in PYTHONS:
        return PYTHONS[release]
    if str(targets.sglang_version()) == release:
        return Path(sys.executable)
    if device != CPU:
        return ROOT / f"no-environment-with-{release}"
    own = ROOT / f".venv-{release}" / "bin" / "python"
    default = ROOT / ".venv" / "bin" / "python"
    return own if own.exists() or not _has(default, release) else default


def _has(python: Path, release: str) -> bool:
    return any(python.parent.parent.glob(f"lib/python3*/site-packages/sglang-{release}.dist-info"))


def arm_of(case: Case, name: str) -> Arm:
    """An arm by its name. A release is one, too: the case's settings on that release as it is.

    Raises packaging.version.InvalidVersion for any other name.
    """
    if name == BUGGY:
        return case.buggy
    if name in (FIXED, RIGHT):
        return case.fixed if name == FIXED or case.right is None else case.right
    return replace(case.buggy, release=str(Version(name)))


def run(cell: Cell, folder: Path, right: Mapping[str, Any]) -> Cell:
    """Run a blank cell. right: request -> tokens, the right answers; empty if they are not known
    yet."""
    case, tool = case_of(cell.case), TOOLS[cell.tool]
    side, on_cpu = arm_of(case, cell.arm), cell.device == CPU
    cell = replace(cell, where="" if on_cpu else gpu.names()[0])
    refusal = tool.refusal(side.release, cell.device, case.mtp)
    python = interpreter(side.release, cell.device)
    if not refusal and not python.exists():
        refusal = ABSENT
    if refusal:
        return replace(cell, grade=grades.NA, said=refusal)
    folder = folder / cell.id
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("truth-*.json"), *(folder / "dumps").glob("*.pt")):
        old.unlink()
    model = {} if cell.model == DEFAULT else {"model": cell.model}
    more = tool.engine(side.release, case.mtp)
    ran = run_child(
        "cell",
        "suites.history.variant",
        {"name": cell.case, "arm": cell.arm, "seed": cell.seed, "more": {**model, **more}},
        environment(cell, folder),
        folder,
        case.seconds * tool.patience * (1.0 if on_cpu else gpu.PATIENCE),
        device=cell.device,
        python=[*tool.wrapper, str(python)],
        start=START,
        stands=Standing(case.stands, folder).proved,
    )
    return judge(cell, case, tool, ran, folder, right)


class Standing:
    """Whether a run of a case stands for as long as its tools were given to say so.

    seconds, folder: ``Case.stands``, and where the ground truth counts. The bug has to be counted,
    and no batch may have begun since: a server that goes on has not proved anything yet.
    """

    def __init__(self, seconds: float, folder: Path) -> None:
        self._seconds = seconds
        self._folder = folder
        self._steps = -1
        self._since = 0.0

    def proved(self) -> bool:
        if not self._seconds:
            return False
        counts, now = counter.read(self._folder), time.monotonic()
        if not counts.triggered or counts.steps != self._steps:
            self._steps, self._since = counts.steps, now
        return counts.triggered > 0 and now - self._since >= self._seconds


def environment(cell: Cell, folder: Path) -> dict[str, str]:
    """Variables for the cell's processes: the switches of case and tool, the ground truth."""
    case = case_of(cell.case)
    side = arm_of(case, cell.arm)
    dist = folder / "plugin" / "g4debug_history-0.dist-info"
    dist.mkdir(parents=True, exist_ok=True)
    (dist / "METADATA").write_text("Metadata-Version: 2.1\nName: g4debug-history\nVersion: 0\n")
    (dist / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\ng4debug-history = suites.history.plugin:register\n"
    )
    path = [str(folder / "plugin"), str(REPRO), str(ROOT), os.environ.get("PYTHONPATH", "")]
    if cell.device == CPU:
        path.insert(0, str(cpu.SITE))
    return {
        "G4DEBUG_FIXES": "none",
        **{fix_switch(fix): "1" for fix in side.fixes},
        **({"G4DEBUG_FAULTS": side.faults} if side.faults else {}),
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "SGLANG_TRTLLM_MHA_DEBUG_DIR": str(folder / "dumps"),
        TRUTH: truth_of(cell.case),
        FOLDER: str(folder),
        **case.environ,
        **side.environ,
        **TOOLS[cell.tool].environ(),
        **(gpu.environment(case, side) if cell.device != CPU else {}),
    }


def judge(
    cell: Cell, case: Case, tool: Tool, ran: Outcome, folder: Path, right: Mapping[str, Any]
) -> Cell:
    """``cell`` with its run's result. folder: has its log, its dumps and its counts. right: the
    right answers, if they are known. A run that proves nothing has ended as SPOILED."""
    text = ran.text
    truth = counter.read(folder)
    cell.steps, cell.reached, cell.triggered = truth.steps, truth.reached, truth.triggered
    cell.note = truth.note
    cell.seconds = round(ran.seconds, 1)
    cell.outputs = ran.result.get("outputs", {})
    completed = ran.status == 0 and ran.result.get("completed", False)
    cell.ended = "completed" if completed else "hangs" if ran.status is None else "died"
    if truth.first >= 0:
        cell.after = truth.steps - truth.first
    cell.grade, cell.said = _grade(case, tool, cell, text, folder)
    if right:
        cell = compared(cell, right)
    why = _proves_nothing(cell, case, tool, text)
    return replace(cell, grade=grades.NA, said=why[:200], ended=SPOILED) if why else cell


def _proves_nothing(cell: Cell, case: Case, tool: Tool, text: str) -> str:
    """Why a run proves nothing of the bug or the tool, '' if it does."""
    switches = {**case.environ, **arm_of(case, cell.arm).environ, **tool.environ()}
    for ignored in _IGNORED.finditer(text):
        if ignored[1] in switches:
            return ignored[0]
    if TRUTH_FAILED.match(cell.said) and cell.arm in ARMS:
        return cell.said
    # Whatever a run says whose bug was triggered is a result, and so is an alarm without the bug:
    # else those would be repeated that do not suit.
    if cell.ended == "completed" or cell.triggered or cell.grade in grades.TOLD:
        return ""
    if cell.ended == "hangs" and UP not in text:
        return f"the engine was not up in {START:.0f} s"
    first = _ENDED.search(text)
    if first is None or not _SPOILED.match(first[0]):
        return ""
    # On another release a workload may come to nothing, and the run is to tell just that.
    if cell.arm not in ARMS and NOT_EXERCISED in first[0]:
        return ""
    return first[0].strip()


def compared(cell: Cell, right: Mapping[str, Any]) -> Cell:
    """``cell`` with how many of its answers are wrong, and an alarm after one of them is late.

    Not on a GPU: there an answer that differs may be rounding (see ``table.rounding``).
    """
    wrong = sum(cell.outputs[k] != v for k, v in right.items() if k in cell.outputs)
    late = wrong > 0 and cell.device == CPU and cell.grade in grades.TOLD
    grade = grades.LATE if late else cell.grade
    return replace(cell, answers=len(right), wrong=wrong, grade=grade)


def _grade(case: Case, tool: Tool, cell: Cell, text: str, folder: Path) -> tuple[str, str]:
    died = _DIED.findall(text)
    failed = next((d for d in died if TRUTH_FAILED.match(d)), "")
    if failed:
        return grades.CRASH, failed[:200]
    if tool.ours:
        refused = _REFUSED.search(text)
        if refused:
            return grades.NA, (refused[1] or refused[2]).strip()
        alarm, named, cause = _dump(case, folder)
    else:
        if tool.gpu and UP not in text:  # SGLang refuses it, or it refuses SGLang
            return grades.NA, (died[-1][:200] if died else "the engine did not come up with it")
        alarm = tool.alarm(text)
        named, cause = False, bool(alarm) and _names(case, alarm)
    if not alarm:
        if cell.ended == "died":
            return grades.CRASH, died[0][:200] if died else "died without a word"
        return (grades.STANDS, "hangs") if cell.ended == "hangs" else (grades.SILENT, "")
    if cause:
        return grades.CAUSE, alarm
    return (grades.OBJECT if named else grades.ALARM), alarm


def _dump(case: Case, folder: Path) -> tuple[str, bool, bool]:
    """The headline of the first finding, whether it names page and request, whether the cause."""
    records = [reading.read(path) for path in (folder / "dumps").glob("*.pt")]
    found = [r for r in records if r.finding.kind not in NO_ALARM]
    if not found:
        return _core(records)
    record = min(found, key=lambda r: r.finding.location.step)
    finding = record.finding
    words = "\n".join(
        [finding.headline, finding.expected, finding.got, finding.owner, *finding.history,
         finding.cause, *(e.caller for e in record.events)]
    )  # fmt: skip
    page = re.search(r"\bpages? \d+", words) is not None
    return finding.headline, page and bool(finding.location.request), _names(case, words)


def _core(records: Iterable[TrapRecord]) -> tuple[str, bool, bool]:
    """The same of a CUDA core dump that names a KV page. One that is only likely is no name."""
    for core in (r.autopsy for r in records):
        if core is not None and core.pages > 0:
            named = bool(core.request) and "most likely" not in core.verdict
            return core.verdict, named, False
    return "", False, False


def _names(case: Case, words: str) -> bool:
    """Whether one line has both the file and the function of something that the fix changed."""
    return any(
        re.search(rf"\b{re.escape(Path(file).name)}\b", line)
        and re.search(rf"\b{re.escape(function)}\b", line)
        for file, function in case.cause
        for line in words.splitlines()
    )


def as_text(cells: Iterable[Cell], answers: Collection[str]) -> str:
    """Cells as JSON, one in a line. answers: the ids of the cells that keep their answers."""
    blank = asdict(Cell("", "", "", 0))
    lines = []
    for cell in sorted(cells, key=lambda c: c.id):
        told = {k: v for k, v in asdict(cell).items() if v != blank[k] or k in ("seed", "arm")}
        if cell.id not in answers:
            told.pop("outputs", None)
        lines.append(json.dumps(told))
    return "".join(f"{line}\n" for line in lines)


def from_text(text: str) -> dict[str, Cell]:
    """id -> cell, from the text of ``as_text``."""
    cells = (Cell(**json.loads(line)) for line in text.splitlines())
    return {cell.id: cell for cell in cells}


def keep(cell: Cell, folder: Path) -> None:
    (folder / f"{cell.id}.json").write_text(json.dumps(asdict(cell)))


def kept(cell_id: str, folder: Path) -> Cell | None:
    path = folder / f"{cell_id}.json"
    return Cell(**json.loads(path.read_text())) if path.is_file() else None
