"""The ``g4debug`` command: it finds a subcommand, runs it, and owns the streams and the exit code.

Each subcommand is a module of this folder; there is no list to edit.
The module's name does not start with ``_``, and it has ``NAME``, ``HELP``,
``add_arguments(parser)`` and ``run(args) -> int``. If it sets ``PASS_THROUGH = True``, the
arguments that its parser does not know arrive as ``args.rest``. ``NEEDS_SGLANG = True`` says that
it can do nothing in a Python without SGLang. Slow imports (torch, numpy, rich) stand inside
``run``, and only the module of the command that was called is loaded.
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
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any, NoReturn, TextIO

from g4debug import __version__
from g4debug.dumps.errors import DumpError

if TYPE_CHECKING:
    from rich.console import Console

PROGRAM = "g4debug"
EXIT_USAGE = 2
MIN_WIDTH = 40
MAX_WIDTH = 1000
LARGEST = 1 << 40  # a larger number is a slip of the finger


class CliError(Exception):
    """Ends a command with exit code 2. Its text is printed to stderr on one line."""


def one_line(text: str) -> str:
    """``text`` on one line, with everything that could steer a terminal escaped."""
    from g4debug.findings.names import clean

    return clean(" ".join(text.split()))


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
            # A failing write shows here, and not at interpreter exit. It replaces any other error:
            # nobody would see the output of that one either.
            sys.stdout.flush()
    except (CliError, DumpError) as e:
        return _refuse(str(e))
    except BrokenPipeError:
        _silence(sys.stdout)
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except OSError as e:
        _silence(sys.stdout)
        # A file that is opened by name has a filename. Only a stream has none.
        what = "standard output" if e.filename is None else os.fspath(e.filename)
        return _refuse(f"{what}: {e.strerror or e}")


def _refuse(text: str) -> int:
    """Say on one line of stderr why the command ends, if anybody can read it."""
    if sys.stderr is not None:  # print(file=None) would write it to stdout
        with contextlib.suppress(OSError):
            print(f"g4debug: {one_line(text)}", file=sys.stderr, flush=True)
    _silence(sys.stderr)
    return EXIT_USAGE


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
    if args[0].startswith("-"):
        name = next((a for a in args if not a.startswith("-")), "COMMAND")
        raise CliError(f"options come behind the command: g4debug {name} {args[0]}")
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
        "Find out why SGLang crashes, serves nobody or answers wrongly.",
        "",
        "commands:",
    ]
    for name in command_names():
        command = _load(name)
        if isinstance(command, str):
            lines.append(f"  {name.replace('_', '-'):<12} (unavailable: {command})")
        else:
            lines.append(f"  {command.NAME:<12} {command.HELP}")
    lines += [
        "",
        "A server died? Run g4debug triage LOG; or g4debug list, then g4debug show DUMP.",
        "It serves nobody? Run g4debug doctor --pid PID.",
    ]
    return "\n".join(lines)


def _versions() -> str:
    """The versions of g4debug, SGLang, torch and Python. SGLang and torch are not imported."""
    from importlib import metadata

    parts = [f"{PROGRAM} {__version__}"]
    for package in ("sglang", "torch"):
        try:
            parts.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            parts.append(f"{package} not installed")
    return ", ".join(parts) + f", Python {sys.version.split()[0]}"


def _tolerant_streams() -> None:
    # A request id or a path may have characters that the terminal's encoding lacks.
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            with contextlib.suppress(ValueError, OSError):
                reconfigure(errors="backslashreplace")


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


def program() -> str:
    """How g4debug can be called again, for the commands that we print."""
    from g4debug.dumps import calling

    return calling.program()


def add_console_arguments(parser: argparse.ArgumentParser) -> None:
    """The user's options for ``make_console``."""
    parser.add_argument(
        "--width",
        type=at_least(MIN_WIDTH),
        metavar="N",
        help="print this many columns (default: the terminal's, or 80)",
    )
    parser.add_argument(
        "--no-color", action="store_true", help="print without colour (NO_COLOR=1 does so, too)"
    )


def at_least(low: int) -> Callable[[str], int]:
    """A type of argparse's: a whole number that is ``low`` or more."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= LARGEST:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, at least {low}")
        return value

    return number


@contextlib.contextmanager
def no_traceback(what: str, hint: str = "g4debug show --json") -> Iterator[None]:
    """Turn a bug of a reporter into a CliError: the evidence must stay reachable."""
    try:
        yield
    except (OSError, CliError, DumpError):  # OSError: the output cannot be written
        raise
    except Exception as e:
        problem = f"{type(e).__name__}: {e}"
        raise CliError(f"{what} ({problem}); try: {hint}, and please report this") from e


def present(reporter: Any, found: Any, args: argparse.Namespace) -> None:
    """Print the result as the user asked for it: by ``render`` or by ``render_json``."""
    if args.json:
        reporter.render_json(found, sys.stdout)
    else:
        reporter.render(found, console_for(args))


def console_for(args: argparse.Namespace) -> Console:
    return make_console(width=args.width, color=not args.no_color)


def make_console(
    *,
    width: int | None = None,
    color: bool = True,
    stream: IO[str] | None = None,
    record: bool = False,
) -> Console:
    """A console on ``stream`` (default: stdout), ``width`` columns wide (default: its own width).

    It writes colours only if the stream is a terminal and ``color`` is on, and else not one ANSI
    code. NO_COLOR counts as ``color=False``. ``record=True`` is for ``export_svg`` and always has
    colours.
    """
    from rich.console import Console

    class QuietPipe(Console):
        def on_broken_pipe(self) -> None:  # rich would print and exit with 1
            raise BrokenPipeError

    plain = not record and (not color or bool(os.environ.get("NO_COLOR")))
    if width is not None:
        width = max(MIN_WIDTH, min(width, MAX_WIDTH))
    console = QuietPipe(
        file=stream or sys.stdout,
        width=width,
        color_system="truecolor" if record else None if plain else "auto",
        force_terminal=True if record else None,
        record=record,
        markup=False,
        highlight=False,
        emoji=False,
        legacy_windows=False,
    )
    if width is None and console.width < MIN_WIDTH:
        console.width = MIN_WIDTH
    return console
