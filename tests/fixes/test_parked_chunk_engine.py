"""parked-chunk on real servers: where it acts, the tokens are those of a larger pool.

Both servers get the same requests: long prompts, some of them with a beginning in common, up to
four at once. One has a SWA pool of less than two chunks and the fix, the other one room for all
and no fix.
"""

from __future__ import annotations

import json
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
    plugin = folder / "plugin"
    plugin.mkdir()
    installed_plugin.install(plugin, "parked-counter", "parked_counter:register")
    support = Path(installed_plugin.__file__).parent

    def run(name: str, swa: int, fix: str):
        server = {"mtp": mtp == "mtp", "branches": radix == "radix"}
        server["engine"] = {**engine, "swa_full_tokens_ratio": swa / TOTAL}
        return drive(
            folder / name, DRIVER, json.dumps(server), G4DEBUG_FIX_PARKED_CHUNK=fix,
            PARKED_COUNTS=str(folder / f"{name}.counts"),
            PYTHONPATH=installed_plugin.path(plugin, support),
        )  # fmt: skip

    runs = side_by_side(
        clean=lambda: run("clean", TOTAL, "0"), fixed=lambda: run("fixed", swa, "1")
    )
    for name, ran in runs.items():
        assert ran.status == 0, f"{name}: {ran.log[-3000:]}"
    return runs
