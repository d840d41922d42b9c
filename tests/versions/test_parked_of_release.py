"""parked-chunk on each SGLang release, with its own scheduling, allocators and prefix cache.

Servers that are drawn run twice, without the fix and with it (drive_parked.py). A server that gets
on by itself runs the same batches; one that stands behind a parked prompt stands no more.
"""

from __future__ import annotations

import pytest
from driven import driven
from packaging.version import Version
from test_versions import release  # noqa: F401 - a fixture

EXAMPLES = 40


def test_who_gets_on_runs_the_same_batches_and_who_stood_is_served(release):  # noqa: F811
    if Version(release) < Version("0.5.13"):
        pytest.skip("tests/fixes drives the installed 0.5.12, in engines and without")
    found = driven(release, "drive_parked.py", str(EXAMPLES))["found"]
    assert found["parked, and served"] > 3, found
    # Which of them stand, of those that are drawn: on 0.5.18, which cuts a leaf itself, none with a
    # prefix cache; on 0.5.14, which is driven without overlap here, none without one.
    caches = {"0.5.18": ("no radix",), "0.5.14": ("radix",)}.get(release, ("no radix", "radix"))
    for cache in caches:
        stood = [n for how, n in found.items() if how.startswith(f"{cache}: stands")]
        assert sum(stood) > 0, found
    assert found["spared"] > 0, found
