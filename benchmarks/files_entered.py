"""Counts how many files of g4debug are entered on five ways, from SGLang's call to the screen.

    python benchmarks/files_entered.py [--list] [--json FILE.json]

A file is entered if one of its Python functions is called. SGLang's own plugin loader arms
g4debug in this process, on the CPU engine. A real attention backend and a real allocator are then
driven without a model and without a server. Every way is gone once before it is counted, so that
imports and what is made only once do not count. The ways are:

1. A sound page table: from the call of SGLang's function that hands the table to the kernel until
   that function returns. Without a GPU the look at what was found is a part of this call; on a
   GPU it comes after the step.
2. A bad page table: the same call, until the record of the finding is complete, and then until
   the dump is written and the call has raised.
3. A bad page table, and ``g4debug show`` of its dump.
4. One free of a sound allocator.
5. A double free, until the record of the finding is complete, and then until the dump is written
   and the call has raised.

``--list`` also prints the files of each way, with the functions that were called.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tests" / "support"))

# The ways, and how many files each may enter. The goals 20 and 18 belong to counts of 30 and 28,
# which are those to the record: see docs/house.md.
GOALS = {
    "a sound page table": 8,
    "a bad page table, to its record": 20,
    "a bad page table, to the dump": None,
    "a bad page table, to the screen": 30,
    "one free": 8,
    "a double free, to its record": 18,
    "a double free, to the dump": None,
}
FAR = 10_000_000  # a page that no pool has
Files = dict[str, set[str]]  # file -> its functions that were called


@dataclass
class Entered:
    """The files of ours that a call enters, and which of them until the first record was made."""

    files: Files
    to_record: Files
    raised: RuntimeError | None  # a finding is one


def entered(call: Callable[[], Any]) -> Entered:
    to_record: set[tuple[str, str]] = set()
    seen: set[tuple[str, str]] = set()
    raised = None

    def note(frame: Any, event: str, value: Any) -> None:
        if event == "call":
            seen.add((frame.f_code.co_filename, frame.f_code.co_qualname))
        elif event == "return" and type(value).__name__ == "TrapRecord" and not to_record:
            to_record.update(seen)

    sys.setprofile(note)
    try:
        call()
    except RuntimeError as e:
        raised = e
    finally:
        sys.setprofile(None)
    return Entered(ours(seen), ours(to_record), raised)


def ours(calls: Iterable[tuple[str, str]]) -> Files:
    """The files of g4debug among calls of (file, function)."""
    import g4debug

    package = Path(g4debug.__file__).resolve().parent
    fixes = (package / "fixes").resolve()  # in a clone a link to a folder outside of the package
    files: Files = {}
    for path, function in calls:
        real = Path(path).resolve()
        for folder in (fixes, package):
            if real.is_relative_to(folder):
                files.setdefault(real.relative_to(folder.parent).as_posix(), set()).add(function)
                break
    return files


def arm(dumps: Path) -> None:
    """Let SGLang load g4debug as its servers do, on the CPU engine, with the default tracers."""
    for name in [n for n in os.environ if n.startswith(("G4DEBUG_", "SGLANG_"))]:
        del os.environ[name]
    from g4debug import cpu

    os.environ |= {
        "SGLANG_TRTLLM_MHA_DEBUG": "1",
        "SGLANG_TRTLLM_MHA_DEBUG_DIR": str(dumps),
        "SGLANG_PLUGINS": "g4debug",
    }
    cpu.prepare()
    logging.getLogger("g4debug").setLevel(logging.CRITICAL)  # the findings are made on purpose
    from sglang.srt.plugins import load_plugins

    load_plugins()


class Server:
    """The memory and the attention of a server that has not run a step yet. It goes the ways."""

    def __init__(self, dumps: Path) -> None:
        from real_backend import PAGE, Rig

        self.dumps, self.page, self.rig = dumps, PAGE, Rig()
        self.backend = self.rig.backend()
        self.requests = [self.rig.admit(f"r{n}", n) for n in (50, 100)]
        self.layer = next(x for x in self.rig.layers if not self.rig.sliding[x.layer_id])

    def ways(self) -> Iterator[Files]:
        """The files that each way enters, in the order of GOALS."""
        yield self.table(bad=False).files
        before = set(self.dumps.glob("*.pt"))
        bad = self.table(bad=True)
        yield bad.to_record
        yield bad.files
        (dump,) = set(self.dumps.glob("*.pt")) - before
        shown = show(dump).files
        yield {
            file: bad.files.get(file, set()) | shown.get(file, set()) for file in bad.files | shown
        }
        yield self.free(twice=False).files
        double = self.free(twice=True)
        yield double.to_record
        yield double.files

    def table(self, bad: bool) -> Entered:
        """A decode hands a page table to a kernel."""
        batch = self.rig.batch("decode", self.requests, self.backend)
        self.backend.init_forward_metadata(batch)
        if bad:
            self.backend.forward_metadata.page_table[1, 6] = FAR
        return enters(lambda: self.backend._get_layer_page_table(self.layer, batch), bad)

    def free(self, twice: bool) -> Entered:
        """The allocator gets the pages of a request back. twice: it has them already."""
        request = self.rig.admit("freed", 3 * self.page)
        row = self.rig.req_to_token.req_to_token[request.req_pool_idx]
        tokens = row[: request.tokens].long()
        if twice:
            self.rig.allocator.free(tokens)
        return enters(lambda: self.rig.allocator.free(tokens), twice)


def enters(call: Callable[[], Any], bad: bool) -> Entered:
    """The files that a call enters. It must end with a finding if ``bad``, and without if not."""
    found = entered(call)
    if (found.raised is not None) != bad or bool(found.to_record) != bad:
        sys.exit(f"expected {'a finding' if bad else 'no finding'}, got: {found.raised!r}")
    return found


def show(dump: Path) -> Entered:
    """The files that ``g4debug show`` of a dump enters."""
    from g4debug.cli import main

    codes: list[int] = []
    with redirect_stdout(io.TextIOWrapper(io.BytesIO(), "utf-8")):
        found = entered(lambda: codes.append(main(["show", str(dump)])))
    if codes != [0]:
        sys.exit(f"g4debug show {dump} ended with {codes or found.raised}")
    return found


def commit() -> str:
    """The commit of this clone, with "-dirty" if tracked files differ; '' without git."""
    asked = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"],
        capture_output=True,
        text=True,
    )
    return asked.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the files of each way, too")
    parser.add_argument("--json", type=Path, metavar="FILE.json", help="write them to a file, too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="g4debug-entered-") as folder:
        arm(Path(folder))
        server = Server(Path(folder))
        list(server.ways())  # does now all that is done only once
        ways = dict(zip(GOALS, server.ways(), strict=True))
    print(f"{'files entered by':<32} {'now':>4} {'goal':>5}")
    for name, files in ways.items():
        print(f"{name:<32} {len(files):>4} {GOALS[name] or '':>5}")
    for name, files in ways.items() if args.list else ():
        print(f"\n{name}:")
        for file, functions in sorted(files.items()):
            print(f"  {file}: {', '.join(sorted(functions))}")
    if args.json is not None:
        result: dict[str, Any] = {
            "commit": commit(),
            "sglang": metadata.version("sglang"),
            "python": platform.python_version(),
        }
        for name, files in ways.items():
            functions = {file: sorted(files[file]) for file in sorted(files)}
            result[name] = {"files": len(files), "goal": GOALS[name], "entered": functions}
        lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in result.items())
        args.json.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
