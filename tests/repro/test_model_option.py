"""``--model`` of the scripts: what a model cannot have is left out with its reason, and all else of
the suites is there; Gemma-4's is as it was.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from g4debug import discovery
from g4debug.cpu import toys
from g4debug.cpu.server import DEFAULT

OTHERS = [name for name in discovery.names("toy") if name != DEFAULT]


@pytest.fixture
def faults():
    return [discovery.load("fault", name) for name in discovery.names("fault")]


@pytest.mark.parametrize("name", OTHERS)
def test_each_group_is_there_or_left_out_with_a_reason(suite, name):
    groups, toy = suite("healthy.groups"), toys.load(name)
    without, mine = groups.left_out(name), groups.groups(name)
    assert all(without.values())
    served = {n: g for n, g in groups.groups().items() if n not in without}
    asked = [
        len({g.engine.get("attention_backend")} - {None}) or len(toy.backends)
        for g in served.values()
    ]
    assert len(mine) == sum(asked)
    assert {g.engine["attention_backend"] for g in mine.values()} == set(toy.backends)
    assert {g.model for g in mine.values()} == {name}
    assert not any(g.refused for g in mine.values())
    assert not any("MTP" in g.title for g in mine.values() if g.mtp)
    assert groups.group_of("plain-no-radix", name) == mine["plain-no-radix"]
    assert ("plain" in mine) == (name != "lfm2")  # which is served without a prefix cache


def test_gemma_4_has_every_group(suite):
    groups = suite("healthy.groups")
    assert groups.left_out(DEFAULT) == {}
    assert {group.model for group in groups.groups().values()} == {DEFAULT}


def test_gemma_4_has_every_drill(suite, faults):
    drill = suite("matrix.drill")
    found = drill.drills(faults, toys.load(DEFAULT))
    assert not any(d.without for d in found)
    asked = [(f.id, c, True) for f in faults for c in f.drills]
    asked += [(f.id, c, False) for f in faults for c in f.plain_drills]
    assert [(d.fault.id, d.chain, d.mtp) for d in found] == asked


@pytest.mark.parametrize("name", OTHERS)
def test_a_drill_that_a_model_cannot_have_says_why(suite, faults, name):
    found = suite("matrix.drill").drills(faults, toys.load(name))
    assert {d.fault.id for d in found} == {f.id for f in faults if f.drills or f.plain_drills}
    why = {f"{d.fault.id}={d.chain}": d.without for d in found}
    assert why["bonus-token=1*on"] == "it asks for a draft"
    assert why["sampled-token=1*on"] == why["double-free=1*on"] == ""
    assert not any("target_verify" in d.chain for d in found if not d.without)
    swa = [why[drill] for drill in ("kv-nan=1*swa", "early-swa-free=1*on")]
    has = toys.load(name).pool == "swa"
    assert swa == ["" if has else "it asks for a SWA pool"] * 2
    told = why["page-oob=1*on@mode=decode"]
    assert told == ("it asks for page tables" if name == "deepseek" else "")


def test_the_drills_of_a_backend_strike_what_it_hands_over(suite, faults):
    drill = suite("matrix.drill")
    for backend, tables in (("flashinfer", False), ("fa3", True), ("torch_native", None)):
        found = drill.drills(faults, toys.load("llama"), backend)
        assert {d.on for d in found} == {backend}
        why = {f"{d.fault.id}={d.chain}": d.without for d in found}
        assert why["page-oob=1*on@mode=decode"] == ("" if tables else "it asks for page tables")
        lists = "" if tables is False else "it asks for lists of tokens"
        assert why["token-oob=1*on@mode=decode"] == lists
        assert why["double-free=1*on"] == ""
    usual = drill.drills(faults, toys.load("llama"))
    assert {d.on for d in usual} == {"", "triton"}  # each fault's own


def test_the_page_of_a_backend_has_a_name_and_a_command_of_its_own(suite):
    drill, table = suite("matrix.drill"), suite("matrix.table")
    assert drill.name_of("llama", "") == "llama"
    assert drill.name_of("llama", "flashinfer") == "llama-flashinfer"
    page = table.markdown([], [], "llama", backend="flashinfer")
    assert page.splitlines()[0].endswith(", llama on flashinfer")
    assert '`make matrix ARGS="--model llama --backend flashinfer"`' in page


def test_a_case_that_a_model_cannot_have_says_why(suite):
    cases = suite("history.cases").cases()
    asked = {name: c.without(toys.load("gpt-oss")) for name, c in cases.items()}
    assert not any(asked[c] for c in ("locked-prefix", "group-remap", "page-0-freed"))
    assert asked["zero-accept"] == "its server drafts, and gpt-oss has no draft here"
    assert all(c.without(toys.load("llama")) for c in cases.values())
    assert not any(c.without(toys.load(DEFAULT)) for c in cases.values())


def test_a_cell_of_another_model_has_a_name_of_its_own(suite):
    cell = suite("history.cell")
    usual, other = (
        cell.Cell("page-0-freed", "buggy", "g4debug", 0, **more)
        for more in ({}, {"model": "gpt-oss"})
    )
    assert usual.id == "page-0-freed.buggy.g4debug.0"
    assert other.id == "gpt-oss.page-0-freed.buggy.g4debug.0"
    text = cell.as_text([usual, other], ())
    assert "model" not in text.splitlines()[0 if "gpt-oss" in text.splitlines()[1] else 1]
    assert cell.from_text(text) == {usual.id: usual, other.id: other}


def test_cells_of_another_model_are_in_no_row_of_gemma_4(suite):
    cell, table, cases = suite("history.cell"), suite("history.table"), suite("history.cases")
    cells = [
        cell.Cell("page-0-freed", arm, tool, 0, reached=1, triggered=arm == "buggy", model=model)
        for arm in ("buggy", "fixed")
        for tool in ("nothing", "g4debug")
        for model in (DEFAULT, "gpt-oss")
    ]
    by_model = table.by_model(cases.cases(), cells)
    assert list(by_model) == [DEFAULT, "gpt-oss"]
    for rows in by_model.values():
        (row,) = (r for r in rows if r.ran)
        assert row.truth.buggy.runs == 1
        assert row.entries["g4debug"].seeds == 1
    page = suite("history.page")
    first: dict[str, dict[str, object]] = {}
    alone = page.markdown(by_model[DEFAULT], first)
    both = page.markdown(by_model[DEFAULT], first, others=page._others(by_model))
    begin = both.index("## On gpt-oss")
    end = both.index("\n## ", begin) + 1
    assert both[:begin] + both[end:] == alone


@pytest.mark.parametrize("name", OTHERS)
def test_a_server_is_drawn_for_a_model(suite, name):
    draw, toy = suite("fuzz.draw"), toys.load(name)
    drafts = {n for n in discovery.names("draft") if name in discovery.load("draft", n).targets}
    found = set()
    for seed in range(60):
        shape = draw.draw(seed, name)
        asked = {v for k, v in shape.engine.items() if k.endswith("attention_backend") and v}
        assert asked <= set(toy.backends)
        assert not shape.mtp
        assert shape.words.startswith(f"{name}, {shape.draft or 'no MTP'}")
        if shape.draft:
            most = discovery.load("draft", shape.draft).arguments.get("speculative_num_steps", 0)
            assert shape.speculates
            assert shape.engine.get("speculative_num_steps", 0) <= most
        found.add(shape.draft)
    assert found == {"", *(drafts if draw.SERVES_DRAFTS else ())}


def test_a_toy_that_is_added_takes_some_seeds_and_leaves_the_others(suite, monkeypatch):
    draw = suite("fuzz.draw")
    now = {seed: draw.model_of(seed) for seed in range(200)}
    assert {*now.values()} == {*OTHERS, DEFAULT}
    monkeypatch.setattr(draw.discovery, "names", lambda noun: (*OTHERS, DEFAULT, "another"))
    then = {seed: draw.model_of(seed) for seed in range(200)}
    changed = {seed for seed in now if now[seed] != then[seed]}
    assert 0 < len(changed) < 50
    assert {then[seed] for seed in changed} == {"another"}


@pytest.mark.parametrize(
    ("module", "model", "options"),
    [
        ("soak", "deepseek", ["--device", "cuda"]),  # it has no shape for a GPU
        ("soak", "qwen3", ["--device", "cuda", "--draft", "eagle"]),
        ("soak", "llama", ["--device", "cuda", "--draft", "standalone"]),
        ("fuzz", "llama", ["--corrupt"]),
        ("history_suite", "llama", ["--replay"]),
    ],
)
def test_what_does_not_go_with_a_model_is_refused(
    suite, monkeypatch, capsys, module, model, options
):
    monkeypatch.setattr("sys.argv", [module, "--model", model, *options])
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module(module).main()
    said = f"--draft {options[-1]}: " if "--draft" in options else f"--model {model}: "
    assert said in capsys.readouterr().err


def test_a_model_on_a_gpu_has_its_real_shape(suite, monkeypatch, tmp_path):
    shapes = importlib.import_module("workloads.shapes")
    monkeypatch.setattr(shapes, "in_memory", lambda name: tmp_path / name)
    engine = shapes.engine("llama", "eagle", max_running_requests=12, tp_size=2)
    assert (
        json.loads(Path(engine["model_path"], "config.json").read_text()) == shapes.SHAPES["llama"]
    )
    draft = Path(engine["speculative_draft_model_path"], "config.json")
    assert json.loads(draft.read_text())["architectures"] == ["LlamaForCausalLMEagle"]
    assert engine["load_format"] == "dummy"
    assert (engine["cuda_graph_max_bs"], engine["tp_size"]) == (12, 2)
    assert "speculative_draft_model_path" not in shapes.engine("llama", "ngram")


def test_a_group_that_a_model_has_not_is_refused_with_the_reason(suite, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["healthy", "--model", "llama", "--only", "moe"])
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module("healthy").main()
    assert "llama has no group 'moe': it is Gemma-4 with experts" in capsys.readouterr().err


def test_the_pages_are_apart(suite, monkeypatch):
    options = importlib.import_module("harness.options")
    monkeypatch.setattr(options.targets, "sglang_version", lambda: "1.2")
    assert options.page(Path("docs"), "healthy", DEFAULT) == Path("docs/healthy-1.2.md")
    assert options.page(Path("docs"), "healthy", "llama") == Path("docs/healthy-1.2-llama.md")
    assert options.results_of(Path("/tmp"), DEFAULT) == Path("/tmp")
