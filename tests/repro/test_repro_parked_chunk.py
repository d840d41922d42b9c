"""repro/parked_chunk.py as a user runs it: the server stands, g4debug says why, the fix serves."""

from __future__ import annotations

import pytest
from real_engine import ENGINE

pytestmark = ENGINE
SCRIPT = ("parked_chunk.py", "--json")


@pytest.mark.long("a whole script with four engines, two of which stand for 40 s")
def test_all_variants_do_what_they_should(arms):
    found = arms()
    assert found["broken"]["unserved"] == found["diagnosed"]["unserved"] == 3
    assert found["fixed"]["unserved"] == found["clean"]["unserved"] == 0
