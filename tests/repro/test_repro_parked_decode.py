"""repro/parked_decode.py as a user runs it: a request that decodes is killed, or served."""

from __future__ import annotations

import pytest
from real_engine import ENGINE

from g4debug.hooking import targets

pytestmark = [
    *ENGINE,
    pytest.mark.skipif(not targets.matches("<0.5.18"), reason="nobody is killed there"),
]
SCRIPT = ("parked_decode.py", "--json")


@pytest.mark.long("a whole script with four engines, on a release with the bug")
def test_all_variants_do_what_they_should(arms):
    found = arms()
    assert found["broken"]["status"] == found["diagnosed"]["status"] == 1
    assert found["fixed"]["status"] == found["clean"]["status"] == 0
