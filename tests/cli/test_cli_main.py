"""The command line itself: discovery, exit codes, speed, quiet ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from sample_trap import sample_record

from g4debug import cli
from g4debug.dumps import writing


def run(*args: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "g4debug", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **kwargs)


def test_no_arguments_is_help_and_2() -> None:
    done = run()
    assert done.returncode == 2
    assert "show" in done.stdout
    assert "list" in done.stdout


def test_help() -> None:
    assert run("--help").returncode == 0
    assert "PATH" in run("show", "--help").stdout


def test_version_names_what_is_installed_without_importing_it() -> None:
    code = (
        "import sys; from g4debug.cli import main; code = main(['--version'])\n"
        "assert not {'torch', 'sglang', 'numpy', 'rich'} & set(sys.modules); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("g4debug ")
    assert "torch " in done.stdout
    assert "sglang " in done.stdout


def test_show_and_list_do_not_import_sglang(tmp_path: Path) -> None:
    code = (
        "import sys; from g4debug.cli import main\n"
        f"main(['show', {str(tmp_path)!r}]); main(['list', {str(tmp_path)!r}])\n"
        "assert 'sglang' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_unknown_command_suggests() -> None:
    done = run("shw")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "g4debug: there is no command 'shw'; did you mean: g4debug show"
    ]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with modules that are subcommands, too."""
    monkeypatch.setattr(cli, "__path__", [*cli.__path__, str(tmp_path)])
    cli.command_names.cache_clear()
    yield tmp_path
    cli.command_names.cache_clear()
    for name in [m for m in sys.modules if m.startswith("g4debug.cli.zz")]:
        del sys.modules[name]


def test_a_new_file_is_a_new_command(commands: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (commands / "zz_echo.py").write_text(
        "NAME, HELP, PASS_THROUGH = 'zz-echo', 'says it', True\n"
        "def add_arguments(parser): parser.add_argument('--known')\n"
        "def run(args): print(args.known, args.rest); return 7\n"
    )
    assert cli.main(["zz-echo", "--known", "1", "--kno", "2", "-x", "y"]) == 7
    assert capsys.readouterr().out == "1 ['--kno', '2', '-x', 'y']\n"
    cli.main(["--help"])
    assert "says it" in capsys.readouterr().out


def test_a_broken_command_does_not_break_the_others(
    commands: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (commands / "zz_broken.py").write_text("import not_there\n")
    (commands / "zz_empty.py").write_text("NAME = 'zz-empty'\n")
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "No module named 'not_there'" in out
    assert "cli/zz_empty.py has no HELP" in out
    assert cli.main(["zz-broken"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_interrupt_is_quiet(commands: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (commands / "zz_stop.py").write_text(
        "NAME, HELP = 'zz-stop', ''\n"
        "def add_arguments(parser): pass\n"
        "def run(args): raise KeyboardInterrupt\n"
    )
    assert cli.main(["zz-stop"]) == 128 + signal.SIGINT
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("arguments", ["--help", "list DIR --json", "show DIR/a.pt --all"])
def test_closed_pipe_is_quiet(tmp_path: Path, arguments: str) -> None:
    writing.write(writing.encode(sample_record()), tmp_path, "a.pt")
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "g4debug", *arguments.replace("DIR", str(tmp_path)).split()]
    with os.fdopen(write_end, "wb") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, timeout=300)
    assert done.stderr == b""
    assert done.returncode == 128 + signal.SIGPIPE
