"""A realistic trap: a draft decode at sliding layer 4 that got the full pool's pages.

Seed PR #6's bug as a record: the frozen-KV draft runner reads the target's KV pool, but its
backend kept "no SWA" from the 64-token dummy pool, so the page table of a sliding layer
still holds page numbers of the full pool (72 pages) when the SWA pool has 36.
"""

from __future__ import annotations

import numpy as np

from g4debug.findings.record import (
    Finding,
    Location,
    Pool,
    Step,
    Table,
    TrapRecord,
)
from g4debug.findings.status import Checked, Limit, TracerStatus

RIDS = (
    "5f0c2a9e8d1b4c77a3e6f1029b8d4e10",
    "a81d03c4e7f24b6f9d5c0b2e6a1f3d98",
    "0d9be2f7316a4f02b8c7d4e5f6a70819",
    "c4f7a6b81e2d4a909b3c5d7e8f012a3b",
    "77e1d2c3b4a5468f9a0b1c2d3e4f5061",
    "e02b9c8d7f6e4d5c8b7a69584736251f",
    "1b6f5e4d3c2b4a198877665544332211",
    "",
)

FULL = Pool(name="full", pages=72, page_size=64, tokens=4544, used_tokens=3328)
SWA = Pool(name="swa", pages=36, page_size=64, tokens=2240, used_tokens=1984)


def sample_table() -> Table:
    """8 rows (one of padding), 16 of 128 columns; row 3 holds page 57 in a live cell."""
    seq_lens = [700, 512, 301, 513, 64, 870, 129, 1]
    values = np.zeros((8, 16), dtype=np.int64)
    first_live = []
    page = 1
    for row, length in enumerate(seq_lens):
        live = -(-length // 64)
        first = max(0, length - 512) // 64
        first_live.append(first)
        for column in range(first, live):
            values[row, column] = 1 + (page - 1) % 35
            page += 1
    values[7, 0] = 0
    values[3, 8] = 57
    values[6, 3] = 41  # past the row's length: an earlier owner's page, legal garbage
    return Table(
        values=values,
        seq_lens=np.array(seq_lens),
        first_live=np.array(first_live),
        bad=np.array([[3, 8, 57]]),
        pool=SWA,
        window=512,
        q_len=1,
        row0=0,
        column0=0,
        rows_total=8,
        columns_total=128,
        rids=RIDS,
    )


def sample_steps() -> tuple[Step, ...]:
    """Twelve worker steps, the last one the step of the finding."""
    steps = []
    for i in range(12):
        prefill = i in (0, 5)
        steps.append(
            Step(
                step=107 + i,
                forward_mode="EXTEND" if prefill else "DECODE",
                rids=RIDS[5:7] if prefill else RIDS[:7],
                seq_lens=(830 + i, 89 + i)
                if prefill
                else tuple(n - 44 + 4 * i for n in (700, 512, 301, 513, 64, 870, 129)),
                spec_info="" if prefill else "FrozenKVMTPDraftInput",
                full_used=3000 + 30 * i - 2 * (i % 3),
                swa_used=1600 + 35 * i - 3 * (i % 2),
            )
        )
    return tuple(steps)


def sample_record() -> TrapRecord:
    """The whole trap. No clock, no environment: the same bytes every time."""
    return TrapRecord(
        finding=Finding(
            check="page-table",
            kind="out-of-range",
            site="attn.trtllm_mha.layer_page_table",
            headline="g4debug: page-table: page 57 in the SWA pool of 36 pages, draft decode, "
            "layer 4, row 3, column 8",
            location=Location(
                process="scheduler",
                pid=4711,
                rank=0,
                step=118,
                forward_mode="DECODE",
                runner="draft",
                layer=4,
                layer_kind="sliding",
                request=RIDS[3],
                row=3,
                column=8,
                replay=False,
            ),
            expected="a page of the swa pool, 0..35",
            got="57: past the end of the pool; as a full-pool page it belongs to this request",
            owner="full page 57: request c4f7a6b8, since step 96",
            history=(
                "step 96: full page 57 allocated by alloc_extend for c4f7a6b8 (prefill)",
                "step 96: mapped to swa page 21",
                "step 118: full page 57 handed to layer 4 without the mapping",
            ),
            cause="The draft backend took the sliding layer's table from the full pool: its "
            "SWA state is that of the dummy pool it started with (_use_sliding_window_kv_pool="
            "False), so full-pool pages were not translated.",
            reference="fix swa-state-swap (seed PR #6; upstream sgl-project/sglang#26966)",
            next_command="G4DEBUG_FIX_SWA_STATE_SWAP=1 <your launch command>",
        ),
        created="2026-06-01T03:14:15+00:00",
        versions={
            "g4debug": "0.1.0",
            "sglang": "0.5.12.post1",
            "torch": "2.11.0+cu130",
            "flashinfer": "0.6.11",
            "python": "3.12.3",
            "gpu": "NVIDIA H200",
        },
        environment={
            "SGLANG_TRTLLM_MHA_DEBUG": "1",
            "SGLANG_TRTLLM_MHA_DEBUG_DIR": "/var/tmp/dumps",
            "G4DEBUG_FIX_SWA_STATE_SWAP": "0",
        },
        geometry={
            "layers": 42,
            "sliding_layers": 35,
            "kv_shared_layers": 18,
            "head_dim": 256,
            "page_size": 64,
            "sliding_window": 512,
            "swa_full_tokens_ratio": 0.5,
        },
        fixes={
            "swa-state-swap": "off: G4DEBUG_FIX_SWA_STATE_SWAP=0",
            "zero-accept": "applied: this SGLang needs it",
            "fused-router": "not-needed: this SGLang has it",
        },
        tracers=sample_tracers(),
        faults=(),
        pools=(FULL, SWA),
        table=sample_table(),
        steps=sample_steps(),
    )


def sample_tracers() -> tuple[TracerStatus, ...]:
    """One armed tracer, one that is limited, one that is off, and the ledger."""
    return (
        TracerStatus(
            "page-table",
            "raise",
            audited=0,
            checked=(Checked("tables", 1204, 371), Checked("steps", 371, 371)),
            findings={"out-of-range": 1},
        ),
        TracerStatus(
            "kv-allocator",
            "raise",
            limits=(Limit("its hook before_evict_swa is off", "it failed: KeyError: 3", 12),),
            audited=0,
            checked=(Checked("frees", 88, 371),),
        ),
        TracerStatus(
            "spec-lifecycle",
            "raise",
            off="this server does not run FROZEN_KV_MTP, so there is nothing to check",
            off_step=0,
        ),
        TracerStatus("ledger", audited=0, checked=(Checked("events", 913, 371),)),
    )
