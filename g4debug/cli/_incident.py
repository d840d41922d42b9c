"""Finds the dumps of an incident: those in folders, or those that are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from g4debug.dumps import incidents
from g4debug.dumps.errors import DumpError
from g4debug.dumps.heads import quoted
from g4debug.dumps.incidents import Dump
from g4debug.dumps.reading import read
from g4debug.reporters.incident import Member, View

READ = 32  # dumps of an incident that are read whole; of the others only the head is


def load(paths: list[Path], folders: list[Path], list_command: Callable[[Path], str]) -> View:
    """The newest incident in the folders, or the named dumps as one incident.

    folders: the folders among ``paths``. list_command: the command that lists the dumps
    beside a path. Raises DumpError if no dump can be read.
    """
    if folders and len(folders) < len(paths):
        raise DumpError(f"give either folders or dumps: {folders[0]} is a folder")
    if not folders:
        for path in paths:  # a name that is mistyped would else be a member that cannot be read
            if _is_missing(path):
                raise DumpError(f"{quoted(path)}: no such file; try: {list_command(path)}")
        dumps = sorted(map(incidents.look, dict.fromkeys(paths)), key=lambda d: d.time)
        return _view(dumps, 0, str(paths[0]))
    found = incidents.group(d for folder in folders for d in _look_into(folder))
    whole = [i for i in found if not all(d.broken for d in i.dumps)]
    if not whole:
        what = "no dump in it can be read" if found else "there is no dump in it"
        raise DumpError(f"{folders[0]}: {what}; try: g4debug list {quoted(folders[0])}")
    return _view(list(whole[0].dumps), len(whole) - 1, str(folders[0]))


def _is_missing(path: Path) -> bool:
    try:
        return not path.exists()
    except (OSError, ValueError):  # it cannot be looked at: whoever reads it says why
        return False


def _look_into(folder: Path) -> list[Dump]:
    try:
        return incidents.look_into(folder)
    except (OSError, ValueError) as e:
        reason = getattr(e, "strerror", None) or e
        raise DumpError(f"{folder}: cannot be read: {reason}") from e


def _view(dumps: list[Dump], elsewhere: int, where: str) -> View:
    members = [_member(dump, i < READ) for i, dump in enumerate(dumps)]
    # The first one that can be read is shown in full. Those before it are told as broken.
    first = next((m for m in members if m.record is not None), None)
    if first is None:
        raise DumpError(f"{where}: no dump can be read: {members[0].broken or 'none is whole'}")
    return View((first, *(m for m in members if m is not first)), elsewhere)


def _member(dump: Dump, whole: bool) -> Member:
    known = vars(dump)
    try:
        return Member(**known, record=read(dump.path) if whole and not dump.broken else None)
    except DumpError as e:
        return Member(**{**known, "broken": str(e).removeprefix(f"{dump.path}: ")})
