"""A kind of finding is one record in ``g4debug/findings/kinds.py``, and nothing else lists kinds.

The tables of kinds in docs/cases and docs/tracers.md are made of the records. To write them anew
after a record was changed, and to look at what that does::

    UPDATE_SNAPSHOTS=1 pytest tests/house/test_kinds.py; git diff docs

The table of all kinds in TRIAGE.md is the page's own (``tests/house/test_triage.py``).
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

from g4debug import discovery
from g4debug.findings.kinds import KINDS, DeviceKind, FindingKind, KvWritesKind, PageTableKind
from g4debug.triage import entry as triage

ROOT = Path(__file__).resolve().parents[2]
TRIAGE, TRACERS = ROOT / "TRIAGE.md", ROOT / "docs" / "tracers.md"
CASES = sorted((ROOT / "docs" / "cases").glob("*.md"))
RECORDS = [kind for of_check in KINDS.values() for kind in of_check.values()]
MEMBERS = {"PageTableKind": PageTableKind, "KvWritesKind": KvWritesKind}


# --- the tables ---------------------------------------------------------------------------------


def entries() -> dict[str, str]:
    """Title of each entry -> a link to its case from another one."""
    return {e.title: f"[{n}]({e.name})" for n, e in triage.entries().items()}


def linked(text: str) -> str:
    return re.sub(r"\[\[(.*?)\]\]", lambda m: entries()[m[1]], text)


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def meanings(check: str, heading: str) -> list[str]:
    """Of each kind of a tracer, what it means; in the case with this heading.

    Kinds that have the same text are in one row.
    """
    rows = {}
    for kind in KINDS[check].values():
        elsewhere = "" if kind.entry == heading else f"[[{kind.entry}]]"
        look = "; ".join(filter(None, (kind.look, kind.see, elsewhere)))
        rows.setdefault((kind.means, look), []).append(f"`{kind.name}`")
    if not any(look for _, look in rows):
        head = ["| kind | means |", "|---|---|"]
        return [*head, *(row(", ".join(names), means) for (means, _), names in rows.items())]
    head = ["| kind | means | look at |", "|---|---|---|"]
    return head + [
        row(", ".join(names), means, linked(look)) for (means, look), names in rows.items()
    ]


def certainties() -> list[str]:
    """What each kind is confirmed by, and what contain mode does about it."""

    def facts(kind: FindingKind) -> tuple[str, str, str]:
        by = (kind.confirmed_by or "certain by itself") + " (SWA pool)" * kind.in_swa
        return kind.check, by, kind.contain.value

    lines = ["| tracer | kinds | confirmed by | `contain` mode |", "|---|---|---|---|"]
    for (check, by, contain), kinds in groupby(sorted(RECORDS, key=facts), facts):
        lines.append(row(check, ", ".join(f"`{kind.name}`" for kind in kinds), by, contain))
    return lines


def written(text: str) -> str:
    """A page with its tables of kinds made of the records."""
    heading = ""
    table = r"^<!-- (?:findings|kinds): .* -->\n[\s\S]*?<!-- /.* -->\n"
    parts = re.split(rf"(^# .*\n|{table})", text, flags=re.M)
    for i, part in enumerate(parts):
        if part.startswith("# "):
            heading = re.sub(r"^\d+\. ", "", part.removeprefix("# ").strip())
        elif marker := re.match(r"<!-- (findings|kinds): (.*) -->\n", part):
            what = marker[2].split()[0]
            lines = meanings(what, heading) if what in KINDS else certainties()
            parts[i] = marker[0] + "\n".join(lines) + f"\n<!-- /{marker[1]} -->\n"
    return "".join(parts)


@pytest.mark.parametrize("page", [*CASES, TRACERS], ids=lambda page: page.name)
def test_the_tables_are_made_of_the_records(page: Path) -> None:
    text = page.read_text()
    if os.environ.get("UPDATE_SNAPSHOTS") == "1":
        page.write_text(written(text))
    assert text == written(text), f"run UPDATE_SNAPSHOTS=1 pytest {Path(__file__).name}"


def test_every_kind_is_in_every_table() -> None:
    triage, tracers = TRIAGE.read_text(), TRACERS.read_text()
    assert triage.count("<!-- findings: every kind") == tracers.count("<!-- kinds: all") == 1
    cases = "".join(path.read_text() for path in CASES)
    assert sorted(re.findall(r"<!-- kinds: (\S+) -->", cases)) == sorted(KINDS)


# --- the records --------------------------------------------------------------------------------


def test_every_tracer_has_kinds_and_every_kind_an_entry_and_a_fix_that_exist() -> None:
    assert set(KINDS) == set(discovery.names("tracer"))
    for kind in RECORDS:
        assert kind.entry in entries(), kind.name
        assert not kind.fix or kind.fix in discovery.names("fix"), kind.name
    assert len(RECORDS) == len({(kind.check, kind.name) for kind in RECORDS})


@pytest.mark.parametrize("numbered", MEMBERS.values())
def test_each_number_is_one_kind(numbered: type[DeviceKind]) -> None:
    assert sorted(numbered) == list(range(1, len(numbered) + 1))
    for kind in numbered:
        assert int(kind) == kind.value == kind.record.code
        assert numbered(int(kind)) is kind
    assert len({kind.record.name for kind in numbered}) == len(numbered)
    (check,) = {kind.record.check for kind in numbered}
    assert {k.name for k in KINDS[check].values() if k.code} == {k.record.name for k in numbered}


def test_the_flags_of_a_record_agree() -> None:
    for kind in RECORDS:
        assert not kind.outside or (kind.sure and kind.ended), kind.name
        assert not kind.sure or not kind.confirmed_by, kind.name
        assert not (kind.in_swa or kind.suspicion) or kind.confirmed_by, kind.name
        assert not (kind.in_swa and kind.suspicion), kind.name
        assert ("G4DEBUG_MODE=contain" in kind.command) <= (kind.contain.name == "MENDS"), kind.name


# --- nothing else lists kinds ---------------------------------------------------------------------

NAMES = {check: set(of_check) for check, of_check in KINDS.items()}
NUMBERED = {name for kind in (PageTableKind, KvWritesKind) for name in kind.__members__}


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for folder in ("g4debug", "fixes", "repro", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path != ROOT / "g4debug" / "findings" / "kinds.py":
                yield path.relative_to(ROOT), ast.parse(path.read_text())


def listed(node: ast.AST) -> list[str]:
    """The kinds that a tuple, list, set or dict lists, if there are several of one tracer.

    A dict that leads from kinds to functions is no list: it is how code branches on a kind.
    """
    if isinstance(node, ast.Dict):
        if all(isinstance(value, ast.Name | ast.Attribute | ast.Lambda) for value in node.values):
            return []
        parts = node.keys
    elif isinstance(node, ast.Tuple | ast.List | ast.Set):
        parts = node.elts
    else:
        return []
    words = [part.value for part in parts if isinstance(part, ast.Constant)]
    found = max(([w for w in words if w in names] for names in NAMES.values()), key=len)
    dotted = [ast.unparse(part) for part in parts if isinstance(part, ast.Attribute)]
    found += [d for d in dotted if re.fullmatch(rf"\w*Kind\.({'|'.join(NUMBERED)})", d)]
    return found if len(set(found)) > 1 else []


def test_nothing_else_lists_kinds() -> None:
    assert {
        f"{path}:{node.lineno}": found
        for path, tree in sources()
        for node in ast.walk(tree)
        if (found := listed(node))
    } == {}


@pytest.mark.parametrize(
    ("code", "is_list"),
    [
        ("KINDS = ('double-free', 'maps-freed')", True),
        ("Kind = Literal['leaked', 'double']", True),
        ("kind in (Kind.FREED, Kind.EVICTED)", True),
        ("WORDS = {'double-free': 'was freed twice', 'double-alloc': 'is held'}", True),
        ("WORDS = {'double-free': {}, 'double-alloc': {}}", True),
        ("kind in ('double-free', 'outside')", False),  # of two tracers: it is about something else
        ("CAUSES = {'double-free': _freed, 'double-alloc': lambda case: case.why}", False),
        ("CASES = (('page-oob', 'out-of-range'), ('page-zero', 'page-zero'))", False),
        ("if kind == 'double-free' or kind is Kind.FREED: pass", False),
    ],
)
def test_what_counts_as_a_list(code: str, is_list: bool) -> None:
    assert any(map(listed, ast.walk(ast.parse(code)))) is is_list


def test_a_check_makes_violations_of_its_own_kinds_only() -> None:
    """Wherever a kind is given by its name: to Violation, to a check that takes it, to KINDS."""
    count = 0
    for path, tree in sources():
        if path.parts[:2] != ("g4debug", "tracers") or len(path.parts) < 4:
            continue
        mine = NAMES[path.parts[2].replace("_", "-")]
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and node.args and takes_a_kind(node.func):
                given = node.args[0]
            elif isinstance(node, ast.Subscript) and ast.unparse(node.value).startswith("KINDS"):
                given = node.slice
            else:
                continue
            if isinstance(given, ast.Constant) and given.value not in NAMES:
                assert given.value in mine, f"{path}:{node.lineno}"
                count += 1
    assert count > 30


def takes_a_kind(function: ast.expr) -> bool:
    name = ast.unparse(function).rpartition(".")[2]
    return name in ("Violation", "check_counts", "check_advance")
