"""TRIAGE.md is made of the entries: whoever has a log line, or a dump, is led to one that exists.

To write the page anew::

    UPDATE_SNAPSHOTS=1 pytest tests/house/test_triage.py; git diff TRIAGE.md
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import importlib.util
import os
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
from g4debug.triage import entry, page, patterns

ROOT = Path(__file__).resolve().parents[2]
TRIAGE = (ROOT / "TRIAGE.md").read_text()
CASES = {path.name: path.read_text() for path in sorted((ROOT / "docs" / "cases").glob("*.md"))}
TEXTS = (TRIAGE, *CASES.values())
LAUNCH = "<your launch command>"
HOLE = "…"  # a placeholder of a string
REFERENCE = re.compile(r"TRIAGE\.md, '([^']+)'")


def headings() -> list[str]:
    """All headings, without the numbers of the entries."""
    found = [h for text in TEXTS for h in re.findall(r"^#+ (.*)$", text, re.M)]
    return [re.sub(r"^\d+\. ", "", h) for h in found]


def rows(text: str, name: str) -> list[list[str]]:
    """The cells of the tables between <!-- name ... --> and <!-- /name -->, without headers."""
    begin, end = f"<!-- {name}: ", f"<!-- /{name} -->"
    assert text.count(begin) == text.count(end) == 1
    part = text.partition(begin)[2].partition(end)[0]
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


def test_the_page_is_made_of_the_entries() -> None:
    if os.environ.get("UPDATE_SNAPSHOTS") == "1":
        (ROOT / "TRIAGE.md").write_text(page.page())
    assert page.page() == TRIAGE, f"run UPDATE_SNAPSHOTS=1 pytest {Path(__file__).name}"
    assert len(TRIAGE.encode()) <= page.LARGEST


def test_every_entry_has_its_number_and_its_case() -> None:
    """Numbers are referred to by dumps and documents; they have no hole and no file lies."""
    assert list(entry.entries()) == list(range(1, len(entry.entries()) + 1))
    for number, one in entry.entries().items():
        assert one.name.startswith(f"{number:02d}-")
        assert CASES[one.name].startswith(f"# {number}. {one.title}\n")
    assert {one.name for one in entry.entries().values()} == set(CASES)
    assert len({one.title for one in entry.entries().values()}) == len(entry.entries())


def test_a_dump_may_name_an_entry_by_a_title_of_before() -> None:
    named = entry.by_title()
    assert named["The server died and only the flight recorder left a dump"] == 7
    assert not set(entry.FORMERLY) & {one.title for one in entry.entries().values()}


def test_no_entry_is_longer_than_a_screen() -> None:
    for path in entry.FOLDER.glob("*.md"):
        text = path.read_text()
        assert len(text.splitlines()) <= entry.MOST_LINES, path.name
        assert max(map(len, text.splitlines())) <= 110, path.name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Title\n", "expected '# NN. Title'"),
        ("# 1. Title\n\n**You see.** x\n", "expected the parts You see, Run this"),
    ],
)
def test_a_file_that_is_no_entry_says_what_is_missing(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        entry.parse(text, "01-x.md")


def test_an_entry_that_says_in_force_names_its_fixes() -> None:
    """Their state is told for the server of the log: by *What helps*, and not by *Releases*."""
    for one in entry.entries().values():
        named = set(re.findall(r"`([a-z0-9-]+)`", one.helps + one.releases))
        known = named & set(discovery.names("fix"))
        assert known <= set(one.fixes), one.name
        assert one.fixes or "in force" not in one.helps + one.releases, one.name


def test_the_index_leads_to_every_entry() -> None:
    index = TRIAGE.partition("## Find your entry\n")[2].partition("\n## ")[0]
    linked = {int(n) for n in re.findall(r"\[(\d+)\]", index)}
    assert linked == set(entry.entries())
    targets = re.findall(r"^\[(\d+)\]: #(.*)$", TRIAGE, re.M)
    assert targets == [(str(n), page.anchor(e)) for n, e in entry.entries().items()]
    numbered = set(re.findall(r"^## (\d+)\. ", TRIAGE, re.M))
    assert numbered == {n for n, _ in targets}


def test_an_entry_that_is_named_by_its_number_is_there() -> None:
    for text in (*TEXTS, *(p.read_text() for p in (ROOT / "docs").glob("*.md"))):
        assert {int(n) for n in re.findall(r"\b[Ee]ntry (\d+)\b", text)} <= set(entry.entries())


def test_every_row_of_the_index_begins_with_the_log() -> None:
    index = TRIAGE.partition("## Find your entry\n")[2].partition("\n## ")[0]
    lines = [x for x in index.splitlines() if x.startswith("| ")]
    first = [x.split(" | ")[0] for x in lines]
    begins = ("| `", "| nothing", "| In the log", "| The line says")
    assert [x for x in first if not x.startswith(begins)] == []


def test_a_pattern_names_an_entry_or_says_what_helps() -> None:
    for one in patterns.PATTERNS:
        assert one.says
        assert one.section in page.SECTIONS
        assert {one.entry, *one.also} - {0} <= set(entry.entries())
        assert bool(one.entry) != bool(one.advice), one.says


def test_every_kind_has_a_pattern_that_its_own_words_lead_to() -> None:
    for check, of_check in KINDS.items():
        for kind in of_check.values():
            pattern = patterns.of_kind(kind)
            assert entry.entries()[pattern.entry].title == kind.entry
            assert pattern.says, (check, kind.name)


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
    """A finding names the tracer in whose folder it is made. The sanitizer is two tracers' own.

    ``Context.described`` makes one in few words where a tracer's own description fails.
    """
    rooms = {module.removeprefix("g4debug.").rpartition(".")[0] for module, _ in findings()}
    tracers = {f"tracers.{name.replace('-', '_')}" for name in KINDS}
    assert rooms == tracers | {"sanitizer", "tracers"}
    assert [m for m, _ in findings() if m.count(".") == 2 and ".tracers." in m] == [
        "g4debug.tracers.base"
    ]


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
        if isinstance(node, ast.Attribute) and node.attr in ("reference", "reference_for")
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
    titles = set(entry.by_title())
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
    assert [h for h in found if h not in titles] == []
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
    texts = [*TEXTS, *(text for module in sources() for text in strings(module))]
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
    texts = [*TEXTS, *(text for module in sources() for text in strings(module))]
    named = {n for text in texts for n in re.findall(r"\bG4DEBUG_[A-Z][A-Z_]*[A-Z]\b(?!_)", text)}
    assert "G4DEBUG_FIX_SWA_STATE_SWAP" in named
    assert named <= known


def test_the_scripts_that_are_named_are_there() -> None:
    texts = [*TEXTS, *(text for module in sources() for text in strings(module))]
    named = {n for text in texts for n in re.findall(r"\b(?:repro|tests|fixes)/[\w/]+\.py\b", text)}
    assert "repro/page_clamp.py" in named
    assert [n for n in sorted(named) if not (ROOT / n).exists()] == []


# --- what g4debug says about itself -------------------------------------------------------------


def test_the_messages_of_the_last_entry_are_in_the_source() -> None:
    said = {re.sub(r"%[sd]", HOLE, text) for module in sources() for text in strings(module)}
    found = rows(CASES[entry.entries()[20].name], "messages")
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
