"""The ``g4debug`` command. Each subcommand is a module of this folder; there is no list to edit.

The module's name does not start with ``_``, and it has ``NAME``, ``HELP``,
``add_arguments(parser)`` and ``run(args) -> int``. If it sets ``PASS_THROUGH = True``, the
arguments that its parser does not know arrive as ``args.rest``. ``NEEDS_SGLANG = True`` says that
it can do nothing in a Python without SGLang. What is slow to import (torch,
numpy) is imported inside ``run``, and only the module of the command that was called is loaded.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import os
import pkgutil
import signal
import sys
from functools import cache
from types import ModuleType
from typing import Any, NoReturn, TextIO

from g4debug import __version__
from g4debug.cli._common import CliError, one_line

EXIT_USAGE = 2


def main(argv: list[str] | None = None) -> int:
    """Run one command. ``argv`` is without the program's name; the default is ``sys.argv[1:]``.

    Returns the exit code: 2 for a wrong call, an input that cannot be used or an output that cannot
    be written (with one line on stderr), 130 after Ctrl-C, and 141 after a closed pipe. The last
    two print nothing, like any command of a shell. argparse's own exits (``--help``, an unknown
    option) raise SystemExit.
    """
    args = sys.argv[1:] if argv is None else list(argv)
    if sys.stdout is None:  # Python does not open a stream whose descriptor was closed
        return _refuse("standard output is closed, so nothing was done")
    _tolerant_streams()
    try:
        try:
            return _dispatch(args)
        finally:
            _flush()  # so that what cannot be written shows here and not at interpreter exit
    except CliError as e:
        return _refuse(str(e))
    except BrokenPipeError:
        _silence_stdout()
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except OSError as e:
        _silence_stdout()
        # What is read or written by name has one. Only a stream has none.
        what = "standard output" if e.filename is None else os.fspath(e.filename)
        return _refuse(f"{what}: {e.strerror or e}")


def _refuse(text: str) -> int:
    """Say on one line of stderr why the command ends, if anybody can read it."""
    if sys.stderr is not None:  # print(file=None) would write it to stdout
        with contextlib.suppress(OSError):
            print(f"g4debug: {one_line(text)}", file=sys.stderr, flush=True)
    _silence(sys.stderr)
    return EXIT_USAGE


def _flush() -> None:
    # A BrokenPipeError or a full disk of stdout goes on in place of any other error: nobody would
    # see that one's output either.
    sys.stdout.flush()


@cache
def command_names() -> tuple[str, ...]:
    """Module names of the subcommands, sorted. Looked up once: a process may lose the right to."""
    return tuple(
        sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))
    )


def without_sglang() -> list[str]:
    """The commands that also work in a Python without SGLang."""
    loaded = (m for m in map(_load, command_names()) if not isinstance(m, str))
    return [str(m.NAME) for m in loaded if not getattr(m, "NEEDS_SGLANG", False)]


def _dispatch(args: list[str]) -> int:
    if not args:
        print(_help())
        return EXIT_USAGE
    if args[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if args[0] in ("-V", "--version"):
        print(_versions())
        return 0
    return _run(_find(args[0]), args[1:])


def _run(command: ModuleType, args: list[str]) -> int:
    pass_through = bool(getattr(command, "PASS_THROUGH", False))
    parser = _Parser(
        prog=f"g4debug {command.NAME}",
        description=command.__doc__ or command.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=not pass_through,  # an abbreviation would swallow somebody else's option
    )
    command.add_arguments(parser)
    if pass_through:
        parsed, rest = parser.parse_known_args(args)
        parsed.rest = rest
    else:
        # `show a.pt --json b.pt`, too. It does not know what `--` is for.
        parse = parser.parse_args if "--" in args else parser.parse_intermixed_args
        parsed = parse(args)
    return int(command.run(parsed) or 0)


class _Parser(argparse.ArgumentParser):
    """argparse ignores what it cannot write, and writes errors to stdout if stderr is closed."""

    def print_help(self, file: Any = None) -> None:
        (file or sys.stdout).write(self.format_help())

    def error(self, message: str) -> NoReturn:
        if sys.stderr is not None:
            with contextlib.suppress(OSError):
                sys.stderr.write(f"{self.format_usage()}{self.prog}: error: {one_line(message)}\n")
                sys.stderr.flush()
        _silence(sys.stderr)
        raise SystemExit(EXIT_USAGE)


def _find(name: str) -> ModuleType:
    """The module of the command called ``name``; CliError if there is none."""
    modules = command_names()
    stem = name.replace("-", "_")
    for guess in (stem, f"{stem}_"):  # list_.py: a module "list" would hide the builtin here
        if guess not in modules:
            continue
        command = _load(guess)
        if isinstance(command, str):
            raise CliError(f"command {name!r} cannot be loaded: {command}")
        if name == command.NAME:
            return command
    loaded = [m for m in map(_load, modules) if not isinstance(m, str)]
    for module in loaded:
        if name == module.NAME:
            return module
    names = [str(m.NAME) for m in loaded]
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean: g4debug {close[0]}" if close else "commands: " + ", ".join(names)
    raise CliError(f"there is no command {name!r}; {hint}")


def _load(name: str) -> ModuleType | str:
    """Import one command, or say in one line why that fails: the others must still work."""
    try:
        module = importlib.import_module(f"{__name__}.{name}")
    except Exception as e:
        return f"{type(e).__name__}: {one_line(str(e))}"
    missing = [a for a in ("NAME", "HELP", "add_arguments", "run") if not hasattr(module, a)]
    return f"cli/{name}.py has no {', '.join(missing)}" if missing else module


def _help() -> str:
    lines = [
        "usage: g4debug COMMAND [...]    g4debug COMMAND --help    g4debug --version",
        "",
        "Find out why SGLang crashes or answers wrongly on Gemma-4.",
        "",
        "commands:",
    ]
    for name in command_names():
        command = _load(name)
        if isinstance(command, str):
            lines.append(f"  {name.replace('_', '-'):<12} (unavailable: {command})")
        else:
            lines.append(f"  {command.NAME:<12} {command.HELP}")
    lines += ["", "A server died? Run g4debug list, then g4debug show DUMP."]
    return "\n".join(lines)


def _versions() -> str:
    """The versions of g4debug, SGLang, torch and Python. SGLang and torch are not imported."""
    from importlib import metadata

    parts = [f"g4debug {__version__}"]
    for package in ("sglang", "torch"):
        try:
            parts.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            parts.append(f"{package} not installed")
    return ", ".join((parts[0], *parts[1:])) + f", Python {sys.version.split()[0]}"


def _tolerant_streams() -> None:
    # A request id or a path may have characters that the terminal's encoding lacks.
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            with contextlib.suppress(ValueError, OSError):
                reconfigure(errors="backslashreplace")


def _silence_stdout() -> None:
    _silence(sys.stdout)


def _silence(stream: TextIO | None) -> None:
    # The interpreter flushes its streams once more at exit, which must not fail again: that would
    # print a traceback and change the exit code.
    if stream is None:
        return
    with contextlib.suppress(OSError, ValueError):
        stream.flush()
        return
    with contextlib.suppress(OSError, ValueError):
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, stream.fileno())
        os.close(devnull)
