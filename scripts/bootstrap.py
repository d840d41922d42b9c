"""Finds a Python for the virtual environment, and then lets it run environment.py.

The Makefile runs this file with whatever `python3` is. So it has to run on Python 3.6, too: an old
interpreter prints a sentence and not a SyntaxError. What needs a newer Python is in environment.py.
"""

import os
import subprocess
import sys
from typing import List, Optional, Tuple

OLDEST = (3, 11)
# 3.11 comes first, because the pinned packages were tried on it. python3 comes last, because it may
# be any version.
NAMES = ("python3.11", "python3.12", "python3.13", "python3")
# Without the package python3-venv Debian has `venv`, but not `ensurepip`, which it needs.
PROBE = """
import sys
print("%d.%d" % sys.version_info[:2])
print(getattr(sys, "_base_executable", None) or sys.executable)
try:
    import venv, ensurepip
    print("venv")
except ImportError:
    print("no venv")
"""


class Refused(Exception):
    """The set-up has to stop. The text is printed as one line and says what the user can do."""


def probe(command: str) -> Optional[Tuple[Tuple[int, int], str, bool]]:
    """(version, path of the real interpreter, has venv) of a command; None if it cannot be run."""
    try:
        out = subprocess.check_output([command, "-c", PROBE], stderr=subprocess.DEVNULL, timeout=60)
    except (OSError, subprocess.SubprocessError):  # there is none, or only an empty pyenv shim
        return None
    lines = out.decode("utf-8", "replace").splitlines()
    if len(lines) != 3:
        return None
    major, minor = lines[0].split(".")
    return (int(major), int(minor)), lines[1], lines[2] == "venv"


def find_python(asked: str, venv: str) -> str:
    """The interpreter that makes the environment.

    It is the one that was asked for, or else the one that made this environment before, or else the
    first usable one of NAMES. So `make demo` after `make test PYTHON=python3.12` does not throw the
    environment away.
    """
    candidates = (asked,) if asked else (os.path.join(venv, "bin", "python"), *NAMES)
    without_venv = ""
    too_old = ""
    for command in candidates:
        found = probe(command)
        if found is None:
            continue
        version, path, has_venv = found
        text = "{}.{}".format(*version)
        if version < OLDEST:
            too_old = too_old or f"{command} is Python {text}"
        elif not has_venv:
            without_venv = without_venv or text
        else:
            return path
    how = "make PYTHON=/path/to/python3.11 ..."
    if without_venv:
        raise Refused(
            f"Python {without_venv} has no venv module: install it (on Debian and Ubuntu: apt "
            f"install python{without_venv}-venv), or name another Python: {how}"
        )
    if too_old:
        raise Refused(f"Python 3.11 or newer is needed, but {too_old}: name another one: {how}")
    if asked:
        raise Refused(f"PYTHON={asked} cannot be run: name a Python 3.11 or newer: {how}")
    raise Refused(f"no Python 3.11 or newer was found: install one, or say where it is: {how}")


def main(argv: List[str]) -> int:
    """argv: the arguments of environment.py, of which the first is the environment's folder."""
    here = os.path.dirname(os.path.abspath(__file__))
    try:
        python = find_python(os.environ.get("PYTHON", ""), argv[0])
    except Refused as reason:
        sys.stderr.write(f"g4debug set-up: {reason}\n")
        return 1
    sys.stdout.flush()
    os.execv(python, [python, os.path.join(here, "environment.py"), *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
