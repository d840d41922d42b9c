"""What triage says to type next: it must be of use for what the log tells."""

from __future__ import annotations

import pytest

from g4debug.triage import reading, verdict

pytestmark = pytest.mark.once("a log is read without SGLang")

UP = "[2026-11-20 02:13:40] The server is fired up and ready to roll!\n"
KERNELS = "dmesg -T"  # the machine's own log
ABOVE = "grep -B20 -A40 'Fatal Python error'"  # the words of whoever aborted


@pytest.mark.parametrize(
    ("end", "command"),
    [
        (
            "[2026-11-20 02:40:12] Subprocess scheduler_0 (pid=1) crashed with exit code -9. x",
            KERNELS,
        ),
        (
            "[2026-11-20 02:40:12] Subprocess scheduler_0 (pid=1) crashed with exit code -11. x",
            KERNELS,
        ),
        (
            "[2026-11-20 02:40:12] Subprocess scheduler_0 (pid=1) crashed with exit code -6. x",
            ABOVE,
        ),
        ("Fatal Python error: Aborted", ABOVE),
        ("Fatal Python error: Segmentation fault", ABOVE),
        ("run.sh: line 3:  4321 Segmentation fault      (core dumped) python3 -m sglang", KERNELS),
        ("run.sh: line 3:  4321 Aborted                 (core dumped) python3 -m sglang", ABOVE),
        ("server-1 exited with code 137", KERNELS),
        ("server-1 exited with code 134", ABOVE),
        ("Killed", KERNELS),
    ],
)
def test_of_a_process_that_was_killed(end: str, command: str) -> None:
    found = verdict.of(reading.of(line.encode() + b"\n" for line in (UP + end).splitlines()))
    assert found.entry is not None
    assert found.entry.number == verdict.KILL
    assert found.next_command.startswith(command)
