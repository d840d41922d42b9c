"""What a script says of a server that stands."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "repro"))

CAUSE = """\
A deadlock. It lacks 64 tokens of the SWA pool.
as sglang #36458: SGLang frees it only after it has admitted the next chunk
the fix parked-chunk is for such a request, and is off
"""


def test_the_lines_of_a_cause_are_sentences_in_a_paragraph():
    from harness.stand_still import sentences

    assert sentences(CAUSE) == (
        "A deadlock. It lacks 64 tokens of the SWA pool. As sglang #36458: SGLang frees it only "
        "after it has admitted the next chunk. The fix parked-chunk is for such a request, and is "
        "off."
    )
