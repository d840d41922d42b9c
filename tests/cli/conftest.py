"""Lets these tests import the sample record and the hostile files of their neighbours."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "reporters")]
