"""The grades of a tool's answer to a bug, from nothing to its cause."""

from __future__ import annotations

from typing import Final

NA: Final = "n/a"  # the tool refuses, or does not exist in that release
SILENT: Final = "silent"
STANDS: Final = "stands"  # the bug leaves SGLang serving nobody, and the tool said nothing
CRASH: Final = "crash only"  # SGLang died of the bug, and the tool said no more than that
LATE: Final = "late"  # an alarm, after an answer that is wrong has left
ALARM: Final = "alarm"
OBJECT: Final = "object"  # names the page and the request
CAUSE: Final = "cause"  # names a file and function that the fix changes
ORDER: Final = (NA, SILENT, STANDS, CRASH, LATE, ALARM, OBJECT, CAUSE)
TOLD: Final = (LATE, ALARM, OBJECT, CAUSE)  # the tool told of the bug
SHORT: Final = {"na": NA, "crash": CRASH} | {grade: grade for grade in ORDER}  # in a prediction
