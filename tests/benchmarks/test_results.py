"""Where a benchmark's figures go: each release and GPU has its own file, and keeps it."""

import importlib.metadata
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from measuring import results

pytestmark = pytest.mark.once("the code is ours alone")
ROWS = [{"round": 0, "us": 1.5}]


@pytest.fixture
def release(monkeypatch):
    """``release(x)``: the packages' metadata say that SGLang x is installed."""
    version = importlib.metadata.version

    def install(found):
        from g4debug.trapping import describe

        monkeypatch.setattr(
            describe, "version", lambda name: found if name == "sglang" else version(name)
        )

    return install


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GB200", "gb200"),
        ("cpu", "cpu"),
    ],
)
def test_the_default_name_has_the_release_and_the_gpu(release, device, name):
    release("0.5.23")
    assert results.default("decode_paths_E4B", device).name == f"decode_paths_E4B_0.5.23_{name}.csv"
    release("0.5.12.post1")
    assert results.default("x", device).name == f"x_0.5.12.post1_{name}.csv"


def test_figures_of_another_release_stay(release, tmp_path, capsys):
    out = tmp_path / "figures.csv"
    release("0.5.12.post1")
    results.write("", ROWS, "NVIDIA H200", out)
    before = out.read_text()
    release("0.5.23")
    growing = results.Growing(out)
    growing.add(ROWS, "NVIDIA H200")
    growing.add(ROWS, "NVIDIA H200")
    assert out.read_text() == before
    mine = tmp_path / "figures_0.5.23.csv"
    assert growing.path == mine
    head, rows = results.read(mine)
    assert head["sglang"] == "0.5.23"
    assert len(rows) == 2
    assert "figures.csv has figures of SGLang 0.5.12.post1" in capsys.readouterr().out


def test_figures_of_this_release_are_written_anew(release, tmp_path):
    out = tmp_path / "figures.csv"
    release("0.5.23")
    for us in (1, 2):
        results.write("", [{"us": us}], "cpu", out)
    assert results.read(out)[1] == [{"us": "2"}]
    assert [*tmp_path.iterdir()] == [out]


def test_a_file_of_somebody_else_stays(release, tmp_path):
    out = tmp_path / "notes.csv"
    out.write_text("kind,wall_s\nold,4.18\n")
    release("0.5.23")
    results.write("", ROWS, "cpu", out)
    assert out.read_text().startswith("kind")
    out.write_text("")  # nothing is lost with this one
    results.write("", ROWS, "cpu", out)
    assert results.read(out)[1] == [{"round": "0", "us": "1.5"}]


def test_no_script_names_a_file_of_results_itself():
    """results.default does, and so a release cannot be forgotten."""
    scripts = Path(results.__file__).parents[1].glob("*.py")
    made = [s.name for s in scripts if "results.FOLDER /" in s.read_text()]
    assert made == ["picture.py"]  # it only reads
