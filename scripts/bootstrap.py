"""Find a Python that can hold the environment, then hand over to environment.py.

Run by the Makefile with whatever `python3` is, so this file parses and runs on Python 3.6:
an old interpreter gets a sentence, not a SyntaxError. Everything modern is in environment.py.
"""

import os
import subprocess
import sys
from typing import List, Optional, Tuple

OLDEST = (3, 11)
# 3.11 first: the pins were proven on it. The plain name last: it may be anything.
NAMES = ("python3.11", "python3.12", "python3.13", "python3")
# `ensurepip` is what Debian leaves out when python3-venv is not installed; `venv` alone imports.
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
    """A reason to stop that the user can act on; printed as one line."""


def probe(command: str) -> Optional[Tuple[Tuple[int, int], str, bool]]:
    """(version, path of the real interpreter, has venv) of a command, or None if it won't run."""
    try:
        out = subprocess.check_output([command, "-c", PROBE], stderr=subprocess.DEVNULL, timeout=60)
    except (OSError, subprocess.SubprocessError):  # absent, or a pyenv shim with nothing behind it
        return None
    lines = out.decode("utf-8", "replace").splitlines()
    if len(lines) != 3:
        return None
    major, minor = lines[0].split(".")
    return (int(major), int(minor)), lines[1], lines[2] == "venv"


def find_python(asked: str, venv: str) -> str:
    """The interpreter to build with: the one asked for, else the one in use, else the best named.

    The one that already made this environment goes before the named ones, so that `make demo`
    after `make test PYTHON=python3.12` does not throw the environment away.
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
            f"Python {without_venv} has no venv module: install it (Debian, Ubuntu: apt install "
            f"python{without_venv}-venv) or name another Python: {how}"
        )
    if too_old:
        raise Refused(f"Python 3.11 or newer is needed, and {too_old}: name another: {how}")
    if asked:
        raise Refused(f"PYTHON={asked} cannot be run: name a Python 3.11 or newer: {how}")
    raise Refused(f"no Python 3.11 or newer was found: install one, or name it: {how}")


def main(argv: List[str]) -> int:
    """argv: the environment's folder, then what environment.py takes."""
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
