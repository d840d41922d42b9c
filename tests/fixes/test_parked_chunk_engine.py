"""parked-chunk on real servers: where it acts, the tokens are those of a larger pool.

Both servers get the same requests: long prompts, some of them with a beginning in common, up to
four at once. One has a SWA pool of less than two chunks and the fix, the other one room for all
and no fix.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import installed_plugin
import pytest
import releases
from real_engine import ENGINE, drive, side_by_side

pytestmark = [
    *ENGINE,
    pytest.mark.long("two engines for each kind of server"),
    pytest.mark.skipif(not releases.is_newest(), reason="the kinds are those of the newest one"),
]
DRIVER = str(Path(__file__).with_name("drive_parked_chunk.py"))
CHUNK, TOTAL, ROOM = 256, 4096, 448  # tokens
# Those kinds of 0.5.23 on which it was seen to act. Without a prefix cache and with FROZEN_KV_MTP
# SGLang makes the pool larger.
KINDS = (
    ("plain", "no-radix", "overlap", 1),
    ("plain", "no-radix", "overlap", 16),
    ("plain", "no-radix", "overlap", 64),
    ("plain", "no-radix", "no-overlap", 64),
    ("plain", "radix", "overlap", 64),
    ("mtp", "radix", "overlap", 64),
)


@pytest.mark.parametrize(("mtp", "radix", "overlap", "page"), KINDS)
def test_where_it_acts_the_tokens_are_those_of_a_larger_pool(tmp_path, mtp, radix, overlap, page):
    runs = compare(tmp_path, mtp, radix, overlap, page)
    clean, fixed = (runs[name].result["answers"] for name in ("clean", "fixed"))
    assert None not in clean.values()
    assert fixed == clean
    assert runs["fixed"].result["acted"] > 0


def test_who_gets_on_by_itself_keeps_its_tokens_and_logprobs_bit_for_bit(tmp_path):
    """A long prompt is parked until the short ones end: a server that stands for nobody."""
    engine = {
        "chunked_prefill_size": 512, "max_total_tokens": 8192, "max_running_requests": None,
        "disable_radix_cache": True, "swa_full_tokens_ratio": 1280 / 8192,
    }  # fmt: skip
    server = {"mtp": False, "prompts": "beside", "logprobs": True, "engine": engine}
    runs = both(tmp_path, off=(server, "0"), on=(server, "1"))
    off, on = (runs[name].result for name in ("off", "on"))
    assert None not in off["answers"].values()
    assert all(len(found) == 24 for found in off["logprobs"].values())
    assert off["parked"] > 10
    assert on == off  # nor did it act


def compare(folder: Path, mtp: str, radix: str, overlap: str, page: int) -> dict[str, Any]:
    # Without overlap scheduling SGLang frees what is behind the window with each chunk. Then it
    # takes a pool that a single chunk fills.
    swa = ROOM if overlap == "overlap" else CHUNK + 64
    engine = {
        "page_size": page, "attention_backend": "triton" if page == 1 else "trtllm_mha",
        "chunked_prefill_size": CHUNK, "max_total_tokens": TOTAL, "max_running_requests": None,
        "disable_radix_cache": radix == "no-radix",
        "disable_overlap_schedule": overlap == "no-overlap",
    }  # fmt: skip

    def server(swa: int) -> dict[str, Any]:
        return {
            "mtp": mtp == "mtp", "prompts": "branches" if radix == "radix" else "",
            "engine": {**engine, "swa_full_tokens_ratio": swa / TOTAL},
        }  # fmt: skip

    return both(folder, clean=(server(TOTAL), "0"), fixed=(server(swa), "1"))


def both(folder: Path, **servers: tuple[dict[str, Any], str]) -> dict[str, Any]:
    """Run the servers by their names. Each is what its driver gets, and the switch of the fix."""
    plugin = folder / "plugin"
    plugin.mkdir()
    installed_plugin.install(plugin, "parked-counter", "parked_counter:register")
    support = Path(installed_plugin.__file__).parent

    def run(name: str, server: dict[str, Any], fix: str):
        return drive(
            folder / name, DRIVER, json.dumps(server), G4DEBUG_FIX_PARKED_CHUNK=fix,
            PARKED_COUNTS=str(folder / f"{name}.counts"),
            PYTHONPATH=installed_plugin.path(plugin, support),
        )  # fmt: skip

    runs = side_by_side(**{n: partial(run, n, *given) for n, given in servers.items()})
    for name, ran in runs.items():
        assert ran.status == 0, f"{name}: {ran.log[-3000:]}"
    return runs
