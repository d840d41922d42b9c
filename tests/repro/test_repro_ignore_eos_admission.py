"""repro/ignore_eos_admission.py as a user runs it: it stands, g4debug says why, the fix serves."""

from __future__ import annotations

import pytest
from real_engine import ENGINE

pytestmark = ENGINE
SCRIPT = ("ignore_eos_admission.py", "--json")


@pytest.mark.long("a whole script with four engines, two of which stand for 40 s")
def test_all_variants_do_what_they_should(arms):
    found = arms()
    assert found["broken"]["unserved"] == found["diagnosed"]["unserved"] == 2
    assert found["fixed"]["unserved"] == found["clean"]["unserved"] == 0
