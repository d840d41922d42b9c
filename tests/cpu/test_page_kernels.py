"""What moves page numbers in torch does the same as SGLang's kernels in Triton's interpreter.

In a process of its own: the interpreter must be on before Triton is imported.
"""

from __future__ import annotations

from pathlib import Path

from real_engine import ENGINE, drive

pytestmark = ENGINE
DRIVER = str(Path(__file__).with_name("drive_page_kernels.py"))
ROUNDS = 25


def test_each_is_the_same_as_sglangs(tmp_path: Path) -> None:
    run = drive(tmp_path, DRIVER, str(ROUNDS), seconds=300)
    assert run.status == 0, run.log[-3000:]
    assert run.result["compared"], run.result
    assert set(run.result["compared"].values()) == {ROUNDS}
