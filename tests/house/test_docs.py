"""README and docs say what the code says."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from pathlib import Path

import pytest

from g4debug import cli, discovery
from g4debug.fixes import base
from g4debug.hooking import targets
from g4debug.hooking.hooks import Hooks
from g4debug.settings import DUMP_DIR, FIX_PREFIX, Settings, ours

ROOT = Path(__file__).resolve().parents[2]
DOCS = tuple(sorted((ROOT / "docs").glob("*.md")))
CASES = tuple(sorted((ROOT / "docs" / "cases").glob("*.md")))
PAGES = (ROOT / "README.md", ROOT / "TRIAGE.md", *DOCS, *CASES)
TEXTS = {str(path.relative_to(ROOT)): path.read_text() for path in PAGES}
ONE_PAGE = 130  # lines


def section(page: str, heading: str) -> str:
    """What stands between a heading of the second level and the next one."""
    found = TEXTS[page].partition(f"\n## {heading}\n")[2]
    assert found, f"{page} has no section {heading!r}"
    return found.partition("\n## ")[0]


def first_cells(text: str) -> list[str]:
    """The ids in the first column of a section's tables, linked or not."""
    return re.findall(r"^\| \[?`([a-z0-9-]+)`", text, re.M)


def code_of(text: str) -> str:
    """The blocks and spans of code in a page."""
    return "\n".join(re.findall(r"^```.*?^```|`[^`\n]+`", text, re.M | re.S))


def default(value: object) -> str:
    if isinstance(value, Path):
        assert value == ours(DUMP_DIR)
        return f"`/tmp/{DUMP_DIR.relative_to(tempfile.gettempdir())}`"
    if value in ("", ()):
        return "none"
    return f"`{int(value)}`" if isinstance(value, bool) else f"`{value}`"


def settings_table() -> list[str]:
    """The rows that docs/environment.md must have, from the dataclass."""
    rows = [
        f"| `{f.metadata['env']}` | {default(f.default)} | {f.metadata['help']} |"
        for f in dataclasses.fields(Settings)
        if f.metadata
    ]
    switch = "0 keeps a fix off; 1 forces it on, if it was written for this SGLang"
    return [*rows, f"| `{FIX_PREFIX}<FIX>` | by need | {switch} |"]


def test_the_environment_table_is_the_dataclass() -> None:
    page = TEXTS["docs/environment.md"]
    table = page.partition("<!-- settings:")[2].partition("<!-- /settings -->")[0]
    assert [x for x in table.splitlines() if x.startswith("| `")] == settings_table()


def test_every_command_is_there_and_no_other() -> None:
    real = {cli._load(name).NAME for name in cli.command_names()}
    page = TEXTS["docs/commands.md"]
    assert set(re.findall(r"^\| `g4debug ([a-z-]+)", page, re.M)) == real
    assert set(re.findall(r"^## ([a-z-]+)$", page, re.M)) == real


def test_every_toy_is_there_with_its_backends() -> None:
    toys = [discovery.load("toy", name) for name in discovery.names("toy")]
    rows = [
        f"| `{t.id}` | {t.about} | {', '.join(f'`{name}`' for name in t.backends)} |" for t in toys
    ]
    assert set(rows) <= set(section("docs/commands.md", "cpu-server").splitlines())


def test_every_draft_is_there_with_its_targets() -> None:
    drafts = [discovery.load("draft", name) for name in discovery.names("draft")]
    rows = [
        f"| `{d.id}` | {d.about} | {', '.join(f'`{name}`' for name in d.targets)} |" for d in drafts
    ]
    assert set(rows) <= set(section("docs/commands.md", "cpu-server").splitlines())


@pytest.mark.parametrize("page", TEXTS)
def test_only_commands_that_exist_are_named(page: str) -> None:
    real = {cli._load(name).NAME for name in cli.command_names()}
    called = re.findall(r"(?:^|bin/|`)g4debug ([a-z][a-z-]+)", code_of(TEXTS[page]), re.M)
    assert set(called) <= real


def test_every_tracer_is_there() -> None:
    page = TEXTS["docs/tracers.md"]
    tracers = discovery.names("tracer")
    assert sorted(first_cells(page)) == sorted(tracers)
    assert set(tracers) <= set(re.findall(r"^## ([a-z-]+)$", page, re.M))


def test_the_opt_in_tracers_are_called_so() -> None:
    """The table says by what each tracer is armed."""
    rows = re.findall(r"^\| \[`([a-z-]+)`\].*\| ([a-z ]+) \|$", TEXTS["docs/tracers.md"], re.M)
    opt_in = {name: discovery.load("tracer", name).opt_in for name in discovery.names("tracer")}
    assert dict(rows) == {n: "its name" if o else "default" for n, o in opt_in.items()}


def test_the_example_that_arms_one_more_leaves_none_of_the_default_ones_out() -> None:
    named = re.findall(r"^G4DEBUG_TRACE=([a-z,-]+) <", TEXTS["docs/tracers.md"], re.M)
    tracers = {name: discovery.load("tracer", name) for name in discovery.names("tracer")}
    default = {name for name, tracer in tracers.items() if not tracer.opt_in}
    assert [set(text.split(",")) for text in named] == [default | {"kv-integrity"}]


def test_every_fault_is_there_with_its_tracers() -> None:
    rows = re.findall(
        r"^\| `([a-z-]+)` \| .* \| (.*) \|$", section("docs/faults.md", "The faults"), re.M
    )
    caught_by = {
        name: set(discovery.load("fault", name).caught_by) for name in discovery.names("fault")
    }
    assert {name: set(re.findall(r"`([a-z-]+)`", cell)) for name, cell in rows} == caught_by
    assert len(rows) == len(caught_by)


def test_every_fix_and_path_is_there_with_its_state_and_switch() -> None:
    page = TEXTS["docs/fixes.md"]
    fixes = {name: discovery.load("fix", name) for name in discovery.names("fix")}
    paths = {name for name, fix in fixes.items() if fix.eligible}
    assert sorted(first_cells(section("docs/fixes.md", "Bug fixes"))) == sorted(set(fixes) - paths)
    assert sorted(first_cells(section("docs/fixes.md", "Performance paths"))) == sorted(paths)
    for name, fix in fixes.items():
        row = re.search(rf"^\| \[`{name}`\].*$", page, re.M)
        own = re.search(rf"^### {name}\n(.*?)(?=^##|\Z)", page, re.M | re.S)
        assert row, name
        assert own, name
        state = {"correctness": "needed", "performance": "all", "experiment": "its switch"}
        assert state[fix.purpose] in re.split(r"\s*\|\s*", row[0]), name
        assert fix.switch in row[0] + own[1], name


def test_every_repro_script_is_there() -> None:
    scripts = {path.name for path in (ROOT / "repro").glob("[a-z]*.py")}
    assert set(re.findall(r"repro/([a-z]\w+\.py)", TEXTS["docs/faults.md"])) == scripts


@pytest.mark.parametrize("page", TEXTS)
def test_only_repro_scripts_that_exist_are_named(page: str) -> None:
    for name in re.findall(r"repro/(\w+\.py)", TEXTS[page]):
        assert (ROOT / "repro" / name).is_file(), name


def test_ci_runs_the_readmes_test_command() -> None:
    command = TEXTS["README.md"].partition("## Tests\n\n```\n")[2].partition("\n```")[0]
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert command in lines  # with 0.5.23; then with the other one
    other = next(line for line in lines if line.startswith(f"{command} SGLANG="))
    assert other.removeprefix(f"{command} ").removesuffix(" || exit") in TEXTS["README.md"]


def test_the_table_of_tracers_and_releases() -> None:
    page = TEXTS["docs/supported.md"]
    table = page.split("<!-- runs")[1].split("<!-- /runs -->")[0]
    head, _, *rows = (line.strip("| ").split(" | ") for line in table.splitlines()[1:])
    said = {
        release: {
            row[0].strip("`"): tuple(cell.split(", "))
            for row in rows
            if (cell := row[column]) != "refused"
        }
        for column, release in enumerate(head)
        if column
    }
    assert said == targets.RUN


def test_the_readme_is_one_page_and_leads_to_every_other() -> None:
    readme = TEXTS["README.md"]
    assert len(readme.splitlines()) <= ONE_PAGE
    linked = set(re.findall(r"\]\(([^)#]+)", readme))
    cases = {str(path.relative_to(ROOT)) for path in CASES}  # TRIAGE.md leads to them
    assert {page for page in TEXTS if page != "README.md"} - cases <= linked
    assert cases <= set(re.findall(r"\]\(([^)#]+)", TEXTS["TRIAGE.md"]))


def anchors(text: str) -> set[str]:
    """GitHub's anchors of a page's headings."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)  # a # in a block is no heading
    return {
        re.sub(r"[^a-z0-9_ -]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", prose, re.M)
    }


def test_a_cell_of_the_comparison_says_that_nobody_looked() -> None:
    """An empty cell says nothing, and is read as a no."""
    table = re.findall(r"^\| .*$", (ROOT / "docs/comparison.md").read_text(), re.M)
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in table]
    assert len(cells) > 20
    assert {len(row) for row in cells} == {9}
    assert [row[0] for row in cells if "" in row] == []


@pytest.mark.parametrize("page", TEXTS)
def test_links_lead_somewhere(page: str) -> None:
    here = ROOT / page
    for target in re.findall(r"\]\(([^)]+)\)", TEXTS[page]):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        there = (here.parent / file).resolve() if file else here
        assert there.exists(), target
        if anchor:
            assert anchor in anchors(there.read_text()), target


def test_the_readmes_first_screen_shows_a_replay_and_how_to_try_it() -> None:
    """The picture is drawn higher than a screen, so it comes behind both."""
    before, _, _ = TEXTS["README.md"].partition("(docs/show.svg)")
    assert "\n$ g4debug replay dump.pt " in before
    assert "make demo" in before
    dump = re.search(r"\(tests/replay/[a-z-]+-([0-9.post]+)\.pt\)", before)
    assert dump is not None
    assert f"`make env SGLANG={dump[1]}`" in before


def test_the_picture_fetches_nothing() -> None:
    picture = (ROOT / "docs" / "show.svg").read_text()
    urls = set(re.findall(r"https?://[^\s\"'<>)]+", picture))
    assert urls <= {"http://www.w3.org/2000/svg", "https://www.textualize.io"}
    assert "g4debug:" in picture.replace("&#160;", " ")


def cell(state: base.FixState) -> str:
    """What docs/supported.md says of a fix in this state."""
    if state.state == "applied":
        return "run"
    if state.state == "off":
        return "by its switch"
    reason = state.why.removeprefix("not on this release, because ")
    return "not needed" if reason.startswith("the installed SGLang") else f"no: {reason}"


def test_the_table_of_fixes_and_releases() -> None:
    """The column of the installed release, with ``G4DEBUG_FIXES=all``; the others are theirs."""
    page = TEXTS["docs/supported.md"]
    table = page.split("<!-- fixes")[1].split("<!-- /fixes -->")[0]
    head, _, *rows = (line.strip("| ").split(" | ") for line in table.splitlines()[1:])
    assert [row[0].strip("`") for row in rows] == sorted(discovery.names("fix"))
    version = targets.sglang_version()
    if version is None or str(version) not in head:
        pytest.skip(f"the table is for {', '.join(head[1:])}")
    states = {s.fix.id: s for s in base.apply_all(Hooks(), {}, {}, mode="all")}
    column = head.index(str(version))
    assert {row[0].strip("`"): row[column] for row in rows} == {
        name: cell(state) for name, state in states.items()
    }


def test_the_healthy_engines_are_counted_right():
    counts = {
        release: len(first_cells(section(f"docs/healthy-{release}.md", "On which engines")))
        for release in ("0.5.23", "0.5.15.post1", "0.5.12.post1")
    }
    said = " ".join(TEXTS["docs/faults.md"].split())
    for release, count in counts.items():
        assert re.search(rf"\b(?:on )?{count} (?:engines )?on {re.escape(release)}", said), release
    assert f"{sum(counts.values())} engines, and a server under load on each" in said
