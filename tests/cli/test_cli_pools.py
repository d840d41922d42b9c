"""``g4debug pools``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from published import A4B_26B, DENSE_31B, folder

from g4debug import cli
from g4debug.cli import pools

SEED = ["--input", "8000", "--concurrency", "80", "--chunk", "16384", "--draft-tokens", "4"]


@pytest.fixture
def moe(tmp_path: Path) -> str:
    return str(folder(tmp_path / "gemma-4-26B-A4B-it", A4B_26B))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["pools", *arguments]) == 0
    return capsys.readouterr().out


def test_table_verdict_and_assumptions(moe: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, moe, "--from-log", "593956@0.8", *SEED, "--width", "80")
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "gemma-4-26B-A4B-it: 5 full + 25 sliding layers, window 1024, 128 experts" in out
    rows = re.findall(r"^ *([0-9.]+)  +(\d+)  +(\d+)  +(\d+)  +(\d+)  +(\d+)  +(\w+)", out, re.M)
    table = {float(r[0]): r for r in rows}
    assert table[0.15][1:3] == ("2138240", "320704")  # seed PR #7's layout
    assert table[0.8][1:3] == ("593920", "475136")
    assert table[0.15][6] == "SWA"
    (best,) = re.findall(r"^BEST  --swa-full-tokens-ratio ([0-9.]+)$", out, re.M)
    assert float(best) in table
    assert "WHY " in out
    assert "Assumed: " in out


def test_json_says_the_same(moe: str, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(run(capsys, moe, "--from-log", "593956@0.8", *SEED, "--json"))
    assert data["best"] in data["rows"]
    assert data["served"]["ratio"] == 0.15
    assert data["bytes_per_token"] == {"full": 20_480, "swa": 204_800}
    assert data["memory"]["kv_bytes"] == 593_956 * 184_320
    best = max(data["rows"], key=lambda r: r["holds"])
    assert best["holds"] == data["best"]["holds"]
    nothing = json.loads(run(capsys, moe, "--memory", "1MiB", "--json"))
    assert nothing["best"]["ratio"] is None


def test_the_options_reach_the_solve(moe: str, capsys: pytest.CaptureFixture[str]) -> None:
    def row(*options: str) -> dict[str, int]:
        out = run(capsys, moe, "--memory", "40GiB", "--ratio", "0.5", "--json", *options)
        return next(r for r in json.loads(out)["rows"] if r["ratio"] == 0.5)

    base = row()
    # 8 and 2 KV heads: 2 GPUs halve both, 4 GPUs keep one full-layer head each.
    assert row("--tp", "2")["full_tokens"] // 128 == base["full_tokens"] * 2 // 128
    assert row("--tp", "4")["full_tokens"] < base["full_tokens"] * 4
    assert row("--kv-dtype", "fp8_e4m3")["full_tokens"] // 128 == base["full_tokens"] * 2 // 128
    assert row("--page", "128")["full_tokens"] % 128 == 0
    assert row("--window", "128")["swa_holds"] >= base["swa_holds"]
    assert (
        row("--no-radix", "--output", "4000")["swa_holds"] != row("--output", "4000")["swa_holds"]
    )
    long = ("--input", "8000")
    assert row(*long, "--split-leaf")["swa_holds"] > row(*long)["swa_holds"]
    assert row(*long, "--chunk", "-1")["swa_holds"] < row(*long, "--chunk", "2048")["swa_holds"]


def test_a_dense_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = folder(tmp_path / "31B", DENSE_31B) / "config.json"
    data = json.loads(run(capsys, str(config), "--from-log", "132992@0.8", "--json"))
    assert data["served"]["ratio"] == 0.8
    assert data["served"]["full_tokens"] == 132_992  # seed PR #7's layout
    assert data["served"]["swa_tokens"] == 106_368


def test_the_picture(moe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "pools.svg"
    for options in (SEED, ["--concurrency", "5000"], ["--input", "1", "--output", "1"]):
        run(capsys, moe, "--memory", "40GiB", *options, "--svg", str(picture))
        text = picture.read_text("utf-8")
        root = ET.fromstring(text)
        assert set(re.findall(r"https?://[^\s\"'<>)]+", text)) == {"http://www.w3.org/2000/svg"}
        assert "prefers-color-scheme: dark" in text
        width, height = float(root.attrib["width"]), float(root.attrib["height"])
        points = []
        for node in root.iter():
            points += re.findall(r"([-0-9.]+),([-0-9.]+)", node.attrib.get("points", ""))
            assert 0 <= float(node.attrib.get("y", 0)) <= height
        assert len(points) > 2
        for x, y in points:
            assert 0 <= float(x) <= width
            assert 0 <= float(y) <= height
    run(capsys, moe, "--memory", "1MiB", "--svg", str(picture))  # nothing fits: still a picture
    ET.fromstring(picture.read_text("utf-8"))


def test_a_name_cannot_break_the_picture_or_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(folder(tmp_path / "a<b>&\x1b[2J", A4B_26B))
    picture = tmp_path / "p.svg"
    out = run(capsys, model, "--memory", "40GiB", "--svg", str(picture))
    assert "\x1b" not in out
    ET.fromstring(picture.read_text("utf-8"))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("40GiB", 40 << 30), ("40gb", 40 * 10**9), ("1.5Mi", 3 << 19), ("7", 7),
        ("43e9", 43 * 10**9), ("2 TiB", 2 << 40), ("512k", 512_000),
    ],
)  # fmt: skip
def test_sizes(text: str, value: int) -> None:
    assert pools.size(text) == value


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--memory", "40GiB", "--from-log", "1@0.8"],
        ["--memory", "lots"],
        ["--memory", "-1"],
        ["--memory", "1..2GiB"],
        ["--memory", "1e999"],
        ["--from-log", "593956"],
        ["--from-log", "593956@2"],
        ["--memory", "1GiB", "--ratio", "0"],
        ["--memory", "1GiB", "--input", "0"],
        ["--memory", "1GiB", "--tp", "x"],
        ["--memory", "1GiB", "--chunk", "-2"],
    ],
)
def test_wrong_calls(moe: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["pools", moe, *arguments])
    assert stop.value.code == 2
    assert "usage: g4debug pools" in capsys.readouterr().err


def test_inputs_that_cannot_be_used(
    moe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, words in (
        ([str(tmp_path / "none"), "--memory", "1GiB"], "cannot be read"),
        ([moe, "--memory", "1GiB", "--svg", str(tmp_path / "no" / "x.svg")], "cannot write"),
    ):
        assert cli.main(["pools", *arguments]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert len(error.splitlines()) == 1


def test_it_needs_neither_sglang_nor_torch(moe: str) -> None:
    code = (
        "import sys\n"
        "class Blocker:\n"
        "    def find_spec(self, name, *a):\n"
        "        if name.partition('.')[0] in ('sglang', 'torch', 'triton', 'transformers'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Blocker())\n"
        "from g4debug.cli import main\n"
        f"sys.exit(main(['pools', {moe!r}, '--memory', '40GiB', '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["best"]["holds"] > 0
