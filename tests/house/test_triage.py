"""TRIAGE.md: whoever has a log line, or a dump, is led to an entry that exists.

That every kind of finding is in its tables is proven in ``test_kinds.py``.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from g4debug import cli, discovery
from g4debug.findings.kinds import KINDS
from g4debug.findings.record import Location
from g4debug.settings import FIX_PREFIX, Settings
from g4debug.tracers.kv_integrity import report

ROOT = Path(__file__).resolve().parents[2]
TRIAGE = (ROOT / "TRIAGE.md").read_text()
LAUNCH = "<your launch command>"
HOLE = "…"  # a placeholder of a string
REFERENCE = re.compile(r"TRIAGE\.md, '([^']+)'")


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^a-z0-9_ -]", "", heading.lower()).replace(" ", "-")


def headings() -> list[str]:
    """All headings, without the numbers of the entries."""
    return [re.sub(r"^\d+\. ", "", h) for h in re.findall(r"^#+ (.*)$", TRIAGE, re.M)]


def entries() -> dict[int, str]:
    """Number -> heading."""
    return {int(n): h for n, h in re.findall(r"^## (\d+)\. (.*)$", TRIAGE, re.M)}


def anchors() -> dict[str, str]:
    """Heading of an entry -> its anchor."""
    return {heading: slug(f"{number}. {heading}") for number, heading in entries().items()}


def rows(name: str) -> list[list[str]]:
    """The cells of the tables between <!-- name ... --> and <!-- /name -->, without headers."""
    begin, end = f"<!-- {name}: ", f"<!-- /{name} -->"
    assert TRIAGE.count(begin) == TRIAGE.count(end) == 1
    part = TRIAGE.partition(begin)[2].partition(end)[0]
    lines = [x for x in part.splitlines() if x.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@functools.cache
def sources() -> dict[str, ast.Module]:
    """Module name -> tree, of the package and of its fixes."""
    found = {}
    for folder, package in ((ROOT / "g4debug", "g4debug"), (ROOT / "fixes", "g4debug.fixes")):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if "site" in parts or parts[0] == "fixes":  # stand-ins for other packages; a link
                continue
            name = ".".join((package, *(p for p in parts if p != "__init__")))
            found[name] = ast.parse(path.read_text())
    return found


def strings(module: str) -> Iterator[str]:
    """Every text of a module but its docstrings; in f-strings HOLE stands for each value."""
    tree = sources()[module]
    parts: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts += node.values
        elif isinstance(node, ast.Expr):
            parts.append(node.value)
    skip = set(map(id, parts))
    for node in ast.walk(tree):
        if id(node) in skip:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(_part(module, part) for part in node.values)


def _part(module: str, part: ast.expr) -> str:
    """A part of an f-string; of a report's, its constants are put in."""
    if isinstance(part, ast.Constant):
        return str(part.value)
    value = part.value
    if isinstance(value, ast.Name) and module in {m for m, _ in findings()}:
        constant = getattr(importlib.import_module(module), value.id, HOLE)
        return constant if isinstance(constant, str) else HOLE
    return HOLE


# --- the entries --------------------------------------------------------------------------------


def test_the_numbers_have_no_hole() -> None:
    numbers = re.findall(r"^## (\d+)\. ", TRIAGE, re.M)
    assert numbers == [str(n) for n in range(1, len(numbers) + 1)]
    assert len(set(headings())) == len(headings()) - _repeated_parts()


def _repeated_parts() -> int:
    """Entries have parts of the same names (Symptom, Cause, ...); nothing else is there twice."""
    parts = re.findall(r"^### (.*)$", TRIAGE, re.M)
    common = {p for p in parts if parts.count(p) > 1}
    assert common <= {
        "Symptom",
        "Run this",
        "What the finding says",
        "What the dump shows",
        "Cause",
        "Fix",
        "What was run",
    }
    return sum(parts.count(p) - 1 for p in common)


def test_the_index_leads_to_every_entry() -> None:
    index = TRIAGE.partition("## Find your entry\n")[2].partition("\n---\n")[0]
    linked = set(re.findall(r"\]\(#([^)]+)\)", index))
    assert not set(anchors().values()) - linked


def test_a_link_shows_the_number_of_the_entry_that_it_leads_to() -> None:
    found = re.findall(r"\[(?:[Ee]ntry )?(\d+)(?:, [^\]]*)?\]\(#([^)]+)\)", TRIAGE)
    assert len(found) > 100
    of_part: dict[str, int] = {}
    number = 0
    for line in re.findall(r"^##+ .*$", TRIAGE, re.M):
        heading = line.lstrip("# ")
        number = int(heading.partition(".")[0]) if re.match(r"\d+\. ", heading) else number
        of_part.setdefault(slug(heading), number)
    assert [(n, a) for n, a in found if of_part.get(a) != int(n)] == []


def test_every_row_of_the_index_begins_with_the_log() -> None:
    index = TRIAGE.partition("## Find your entry\n")[2].partition("\n---\n")[0]
    lines = [x for x in index.splitlines() if x.startswith("| ")]
    first = [x.split(" | ")[0] for x in lines]
    begins = ("| `", "| nothing", "| any other", "| In the log", "| The line says", "| BF16")
    assert [x for x in first if not x.startswith(begins)] == []


# --- findings -----------------------------------------------------------------------------------


@functools.cache
def findings() -> list[tuple[str, ast.Call]]:
    """(module, call) of each place that makes a finding: ``record.finding(headline=..., ...)``."""
    return [
        (module, node)
        for module, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "finding"
        and "headline" in {k.arg for k in node.keywords}
    ]


def test_every_tracer_makes_findings_and_nobody_else() -> None:
    """A finding names the tracer in whose folder it is made. The sanitizer is two tracers' own."""
    rooms = {module.removeprefix("g4debug.").rpartition(".")[0] for module, _ in findings()}
    tracers = {f"tracers.{name.replace('-', '_')}" for name in KINDS}
    assert rooms == tracers | {"sanitizer"}


def test_only_the_record_of_a_kind_makes_a_finding() -> None:
    for module, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and module != "g4debug.findings.kinds":
                arguments = [*node.args, node.func]
                assert "Finding" not in {ast.unparse(a).split(".")[-1] for a in arguments}, module


def test_a_record_makes_findings_of_its_own_tracer_kind_and_entry() -> None:
    words = dict.fromkeys(("site", "headline", "expected", "got"), "")
    for check, of_check in KINDS.items():
        for name, kind in of_check.items():
            made = kind.finding(location=Location(), **words)
            assert (made.check, made.kind) == (check, name)
            assert (made.reference, made.next_command) == (kind.reference, kind.command)


@pytest.mark.parametrize(
    ("module", "call"), findings(), ids=[f"{m}:{c.lineno}" for m, c in findings()]
)
def test_a_finding_names_the_entry_of_its_own_kind(module: str, call: ast.Call) -> None:
    """``x.finding(reference=… x.reference)``: a fix in front of the entry changes nothing else."""
    given = {k.arg: k.value for k in call.keywords}
    assert not {"check", "kind"} & set(given)
    named = [
        ast.unparse(node.value)
        for node in ast.walk(given.get("reference", ast.Pass()))
        if isinstance(node, ast.Attribute) and node.attr == "reference"
    ]
    assert named == [ast.unparse(call.func.value)] * ("reference" in given)


def test_a_fix_in_front_of_the_entry_exists() -> None:
    named = {
        name
        for module in sources()
        if module.startswith("g4debug.tracers.")
        for text in strings(module)
        for name in re.findall(r"^fix ([a-z-]+) \(", text)
    }
    assert {"swa-state-swap", "idle-draft-input", "spec-batch-guards"} <= named
    assert named <= set(discovery.names("fix"))


# --- what points here ---------------------------------------------------------------------------


def test_whoever_names_an_entry_names_it_by_a_heading_that_is_there() -> None:
    """By number nobody does: numbers change."""
    known, named = set(headings()), 0
    for folder in ("g4debug", "fixes", "repro", "benchmarks", "scripts", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            if path == Path(__file__):
                continue
            text = re.sub(r"\s*\n\s*(?:#\s*)?", " ", path.read_text())
            found = REFERENCE.findall(text)
            named += len(found)
            assert [h for h in found if h not in known] == [], path
            assert not re.search(r"TRIAGE(?:\.md)?,?(?: entry)? \d", text), path
    references = [kind.reference for of_check in KINDS.values() for kind in of_check.values()]
    found = [REFERENCE.fullmatch(reference)[1] for reference in references]
    assert [h for h in found if h not in entries().values()] == []
    assert named + len(found) > 60


# --- next commands ------------------------------------------------------------------------------


def next_commands() -> list[str]:
    """Every text of the tracers that a user may type: what begins with g4debug, or launches."""
    return sorted(
        {
            text
            for module in sources()
            if module.startswith("g4debug.tracers.")
            for text in strings(module)
            if LAUNCH in text or re.match(r"(?:g4debug|python) [^(]", text)
        }
        | {kind.command for of_check in KINDS.values() for kind in of_check.values()} - {LAUNCH, ""}
    )


@pytest.mark.parametrize("text", next_commands())
def test_a_next_command_can_be_typed(text: str) -> None:
    before, launches, after = text.partition(LAUNCH)
    if not launches:
        program, name, *rest = shlex.split(re.sub(r"<[^>]*>", "FILE", text).replace("…", "1"))
        if program in ("dmesg", "grep"):  # the system's own
            return
        assert program == "g4debug"
        parser = argparse.ArgumentParser(exit_on_error=False)
        cli._find(name).add_arguments(parser)  # raises for a command that is not there
        assert not parser.parse_known_args(rest)[1]
        return
    environment = dict(word.split("=", 1) for word in shlex.split(before))
    ours = {k: v for k, v in environment.items() if k.startswith(("G4DEBUG_", "SGLANG_TRTLLM_"))}
    settings = Settings.from_environ(ours)  # raises for a name or a value that is not known
    assert sum(k.startswith(FIX_PREFIX) for k in ours) == len(settings.switches)
    for name in set(environment) - set(ours) - {"CUDA_LAUNCH_BLOCKING"}:
        assert f"\n    {name} =" in in_sglang("environ.py")
    for flag in after.split():
        field = flag.removeprefix("--").replace("-", "_")
        known = in_sglang("server_args.py", "arg_groups/fields/*.py")
        assert f'"{flag}"' in known or f"\n    {field}: " in known


def test_sglangs_own_check_for_nan_is_named_where_there_is_one(sglang, monkeypatch) -> None:
    command = KINDS["kv-integrity"]["nan"].command
    text = report.sglangs_check() + command
    name, _, rest = text.partition("=1 ")
    if name == report.NAN_CHECK:
        assert rest == command
        assert f"\n    {name} =" in in_sglang("environ.py")
    else:
        assert text == command
        assert report.NAN_CHECK not in in_sglang("environ.py")
    monkeypatch.delitem(sys.modules, "sglang.srt.environ")
    assert report.sglangs_check() == ""


def test_there_are_next_commands() -> None:
    found = next_commands()
    assert len(found) > 10
    for part in ("G4DEBUG_FIX_", "G4DEBUG_TRACE=", "G4DEBUG_MODE=", "g4debug show", "--disable-"):
        assert any(part in text for text in found), part


def test_the_commands_that_messages_name_are_there() -> None:
    words = r"(?:^|\n|[:;] +|\bthen |\bor |NEXT +|`)g4debug ([a-z][a-z-]*)(?= |$|`|\n)(?! \()"
    texts = [TRIAGE, *(text for module in sources() for text in strings(module))]
    named = {name for text in texts for name in re.findall(words, text)}
    assert {"show", "list", "doctor", "pools"} <= named
    assert named <= {cli._load(name).NAME for name in cli.command_names()}


def in_sglang(*names: str) -> str:
    """What these files of SGLang say; a name may be a pattern."""
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs sglang")
    srt = Path(found.submodule_search_locations[0]) / "srt"
    return "\n".join(p.read_text() for name in names for p in sorted(srt.glob(name)))


def test_the_variables_that_messages_name_are_real() -> None:
    known = {f.metadata["env"] for f in Settings.__dataclass_fields__.values() if f.metadata}
    known |= {FIX_PREFIX + n.upper().replace("-", "_") for n in discovery.names("fix")}
    texts = [TRIAGE, *(text for module in sources() for text in strings(module))]
    named = {n for text in texts for n in re.findall(r"\bG4DEBUG_[A-Z][A-Z_]*[A-Z]\b(?!_)", text)}
    assert "G4DEBUG_FIX_SWA_STATE_SWAP" in named
    assert named <= known


def test_the_scripts_that_are_named_are_there() -> None:
    texts = [TRIAGE, *(text for module in sources() for text in strings(module))]
    named = {n for text in texts for n in re.findall(r"\b(?:repro|tests|fixes)/[\w/]+\.py\b", text)}
    assert "repro/page_clamp.py" in named
    assert [n for n in sorted(named) if not (ROOT / n).exists()] == []


# --- what g4debug says about itself -------------------------------------------------------------


def test_the_messages_of_the_last_entry_are_in_the_source() -> None:
    said = {re.sub(r"%[sd]", HOLE, text) for module in sources() for text in strings(module)}
    found = rows("messages")
    assert len(found) > 15
    missing = [
        message
        for cells in found
        for message in re.findall(r"`([^`]+)`", cells[0])
        if not any(_says(text, message) for text in said)
    ]
    assert missing == []


def _says(text: str, message: str) -> bool:
    """The pieces between the holes are in the text, in this order."""
    return re.search(".*".join(map(re.escape, message.split(HOLE))), text, re.S) is not None
