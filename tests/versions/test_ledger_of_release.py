"""On each SGLang release, its own allocators, prefix cache and requests beside our ledger.

Other tests here tell whether a hook site exists. This one tells whether the sites still see
everything: a release that hands out or takes back pages past our hooks fails here, before it meets
a server. Each release runs in a process of its own, from its unpacked wheel, with the packages of
this environment (drive_ledger.py). Nothing is installed, and there is no model.
"""

from __future__ import annotations

import pytest
from driven import driven
from packaging.version import Version
from test_versions import release  # noqa: F401 - a fixture

ROUNDS = 300
PLAIN = ("plain-sync", "plain-off-sync")
# Speculative decoding v2, with overlap scheduling; 0.5.14's dies on its first request.
V2 = ("plain", "plain-off", "spec", "spec-off", "spec-sync")
CORES = ("plain-python", "spec-rust")  # the two trees of the unified cache


def kinds_of(name: str) -> tuple[str, ...]:
    """The kinds of servers that a release is driven as."""
    version = Version(name)
    if version < Version("0.5.13"):
        return ()
    found = PLAIN if version < Version("0.5.15") else (*PLAIN, *V2)
    return (*found, *CORES) if version >= Version("0.5.21") else found


# What must be found, and after how many steps at most. A lost page is seen by the next census.
FAULTS = {
    "double-free": ("double-free", 0),
    "free-unallocated": ("free-unallocated", 0),
    "alloc-double": ("double-alloc", 0),
    "swa-mapping-corrupt": ("mapping-mismatch", 1),
    "lost-free": ("leaked", 8),
}


def drive(name: str, *arguments: str) -> dict:
    """What drive_ledger.py told of a release."""
    return driven(name, "drive_ledger.py", "--rounds", str(ROUNDS), *arguments)["kinds"]


@pytest.mark.parametrize("late", [False, True], ids=["at once", "as on a GPU"])
def test_the_ledgers_held_pages_are_the_allocators_own(release, late):  # noqa: F811
    kinds = kinds_of(release)
    if not kinds:
        pytest.skip("tests/ledger drives the installed 0.5.12, in engines and without")
    found = drive(release, "--kinds", ",".join(kinds), *(["--late"] if late else []))
    assert set(found) == set(kinds)
    for kind, seen in found.items():
        # It was really driven: requests ended.
        assert seen["served"] > 10, (kind, seen)
        assert seen["extend"] > 10, (kind, seen)
    # And pools were so small that some were retracted.
    assert sum(seen["retracted"] for seen in found.values()) > 0


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_in_its_step_also_as_on_a_gpu(release, fault):  # noqa: F811
    if "spec" not in kinds_of(release):
        pytest.skip("tests/faults injects it into the release that is installed")
    kind, steps = FAULTS[fault]
    found = drive(release, "--kinds", "plain", "--late", "--fault", f"seed=7;{fault}=1*on")
    assert found["plain"]["fired"], "the fault was never there to be found"
    assert found["plain"]["kind"] == kind
    assert 0 <= found["plain"]["step"] - found["plain"]["fired"][0] <= steps
