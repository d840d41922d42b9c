"""The arguments by which SGLang's host decides are known, on the SGLang that is installed here."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import arguments_read
import pytest

from g4debug.findings import decisive_arguments
from g4debug.hooking import targets


def test_the_sources_are_read_in_each_way() -> None:
    source = (
        "self.server_args.a\nget_schedule().b\nget_exec().mamba.c\ngetattr(server_args, 'd', 1)\n"
        "get_context().e\nself.f\nserver_args_of.g\ngetattr(x, 'h')\n"
    )
    assert {*arguments_read.read_in(source)} == {"a", "b", "c", "d", "mamba"}


def test_each_argument_that_scheduler_caches_and_workers_read_is_known() -> None:
    """If one is not: does it decide where pages go? It belongs there or to the harmless ones."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations
    assert not arguments_read.unknown(Path(spec.submodule_search_locations[0]) / "srt")


def test_no_argument_is_two_things() -> None:
    assert not arguments_read.known() & arguments_read.HARMLESS
    assert not arguments_read.ON_TAPE & (arguments_read.HARMLESS | arguments_read.known())


def test_each_of_them_is_read_under_a_name_that_releases_have() -> None:
    asked = {
        *decisive_arguments.AGAIN, *decisive_arguments.LIMITS, *decisive_arguments.RANKS
    }  # fmt: skip
    assert asked <= targets.ARGUMENTS.keys()


def test_what_is_off_is_no_limit_and_is_not_given_again() -> None:
    defaults: dict[str, object] = {
        "disaggregation_mode": "null",
        "enable_hisparse": False,
        "pp_size": 1,
    }
    defaults |= {"dcp_size": None, "radix_eviction_policy_config": {}}
    assert decisive_arguments.not_carried(defaults) == []
    assert decisive_arguments.given({"prefill_max_requests": None, "page_size": 64}) == {}


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("disaggregation_mode", "decode", "disaggregation"),
        ("radix_eviction_policy_config", {"k": 1}, "an eviction policy with settings of its own"),
        ("radix_cache_backend", "other", "another prefix cache (radix_cache_backend)"),
        ("pp_size", 2, "pipeline ranks"),
        ("dcp_size", 2, "decode-context-parallel ranks"),
    ],
)
def test_what_is_on_is_a_limit(name: str, value: object, limit: str) -> None:
    assert decisive_arguments.not_carried({name: value}) == [limit]


def test_what_a_tape_has_is_given_again() -> None:
    facts = {"prefill_max_requests": 2, "allow_auto_truncate": True, "min_free_slots_delay": None}
    assert decisive_arguments.given(facts) == {
        "prefill_max_requests": 2, "allow_auto_truncate": True
    }  # fmt: skip
