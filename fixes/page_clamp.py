"""Clamps page tables into the layer's pool. This is not a fix, and it is off by default.

It keeps a server with wrong page tables up, and *hides* that they are wrong. Each cell beyond
the pool gets the last page, which belongs to somebody else, so the layer reads another request's KV
and nobody is told. It exists so that it can be compared with the real fix (``repro/page_clamp.py``;
TRIAGE.md, 'Why the clamp is not a fix'). To keep a server up, use ``G4DEBUG_MODE=contain``, which
reports every kind of bad cell. From seed PR #5, which its author reverted.

The clamp runs before the page-table tracer, which would then see no bad cell any more. So a server
does not start with both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from g4debug.fixes.base import Fix, Hook, after
from g4debug.fixes.source import source
from g4debug.hooking.layer_pools import pages_of, pool_of_layer
from g4debug.settings import Settings, SettingsError, fix_switch

if TYPE_CHECKING:
    import torch

ID = "page-clamp"
BACKEND = "sglang.srt.layers.attention.trtllm_mha_backend.TRTLLMHAAttnBackend"


def after_page_table(
    table: torch.Tensor, backend: Any, layer: Any, forward_batch: Any
) -> torch.Tensor:
    """``table``: int32 [rows, columns] as SGLang made it. Returns a clamped copy."""
    pool, _ = pool_of_layer(backend, layer, forward_batch)
    return table.clamp(0, pages_of(pool, layer, backend.page_size) - 1)


def still_broken() -> bool:
    """True if SGLang hands the table to the kernel as it is."""
    return "clamp" not in source(f"{BACKEND}._get_layer_page_table")


def hooks() -> tuple[Hook, ...]:
    if "page-table" in Settings.from_environ().tracers:
        raise SettingsError(
            f"{fix_switch(ID)}=1 hides from the tracer page-table what it looks for; choose one "
            "of them (G4DEBUG_MODE=contain also keeps a server up, and reports bad cells)"
        )
    return (after("attn.trtllm_mha.layer_page_table", after_page_table),)


FIX = Fix(
    id=ID,
    title="not a fix: page tables are clamped, and the server reads other requests' KV",
    seed="PR #5",
    upstream="none; the seed reverted it in PR #6",
    needs=">=0.5.12",
    still_broken=still_broken,
    hooks=hooks,
    purpose="experiment",
)
