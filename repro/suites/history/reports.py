"""The HTML report of one finding of each case, as ``g4debug report`` writes it."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

from g4debug.dumps import reading
from g4debug.reporters import html
from suites.history.case import Case
from suites.history.cell import BUGGY, NO_ALARM

OURS = ("g4debug", "g4debug-best")  # the finding of the first one that has any is shown


def write(known: Mapping[str, Case], results: Path, folder: Path) -> dict[str, Path]:
    """name -> its page in ``folder``, for each case for which ``results`` has a finding of ours.

    If a case has no finding any more, its page is removed. If a case was not run this time, its
    page stays.
    """
    folder.mkdir(exist_ok=True)
    pages = {}
    for name in known:
        page = folder / f"{name}.html"
        text = _page(name, results)
        if text:
            page.write_text(text)
            pages[name] = page
        elif any(any(results.glob(f"{name}.{BUGGY}.{tool}.*/dumps")) for tool in OURS):
            page.unlink(missing_ok=True)
        elif page.exists():
            pages[name] = page
    return pages


def _page(name: str, results: Path) -> str:
    for tool in OURS:
        for dump in sorted(results.glob(f"{name}.{BUGGY}.{tool}.*/dumps/*.pt")):
            record = reading.read(dump)
            if record.finding.kind not in NO_ALARM:
                return _nowhere(html.render(record, source=dump.name), dump.parents[1])
    return ""


def _nowhere(text: str, cell: Path) -> str:
    """The page without the folders in which the run was made: they are nobody's business.

    cell: the cell's folder. It may have been copied since, from another machine, too.
    """
    where = rf"[^\s\"'<>=]*/(?={re.escape(cell.name)}/)"
    for folder in (cell.parent, Path.home(), Path(tempfile.gettempdir())):
        where += f"|{re.escape(str(folder))}/"
    return re.sub(where, "", text)
