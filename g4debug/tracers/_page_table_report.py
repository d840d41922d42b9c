"""Turns what the page-table guard saw into a Finding. Runs only after it tripped."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from g4debug.checks.page_table import check_page_table
from g4debug.record import Finding, LayerKind, Location, Pool, Table
from g4debug.recorder import Recorder

if TYPE_CHECKING:
    from g4debug.tracers.page_table import Launch


def describe(
    launch: Launch | None, fields: dict[str, int], recorder: Recorder, draft: bool
) -> tuple[Finding, Table | None]:
    """The finding, and the table around it if the device can still be read."""
    if launch is None:
        return _bare(fields, recorder), None
    page_size = int(launch.backend.page_size)
    pool = Pool(
        launch.pool_name,
        launch.pages,
        page_size,
        (launch.pages - 1) * page_size,
        _used(recorder, launch.pool_name),
    )
    try:
        table = read_table(launch, pool, recorder)
    except RuntimeError:  # a dead CUDA context: what the kernel wrote is all there is
        table = None
    if table is not None and len(table.bad):
        row, column, value = (int(x) for x in table.bad[0])
    else:
        row, column, value = fields["row"], fields["column"], fields["value"]
    rid = table.rids[row] if table is not None and row < len(table.rids) else ""
    facts = Facts(launch, row, column, value)
    layer = int(launch.layer.layer_id)
    kind: LayerKind = "sliding" if launch.pool_name == "swa" else "full"
    who = "draft" if draft else "target"
    mode = launch.batch.forward_mode.name
    label = "full-pool page" if facts.untranslated else "page"
    finding = Finding(
        check="page-table",
        kind="out-of-range",
        site="attn.layer_page_table",
        headline=(
            f"g4debug: page-table in {who} {mode.lower().replace('_', '-')}: {kind} layer "
            f"{layer} gets {label} {value}, its {pool.name.upper()} pool has {pool.pages} pages "
            f"(request {rid or '?'}, row {row}, column {column})"
        ),
        location=Location(
            process="scheduler",
            pid=os.getpid(),
            rank=recorder.rank,
            step=recorder.step,
            forward_mode=mode,
            runner=who,
            layer=layer,
            layer_kind=kind,
            request=rid,
            row=row,
            column=column,
            replay=launch.captured,
        ),
        expected=(f"a page of the {pool.name} pool, 0..{pool.pages - 1}{facts.expected_page()}"),
        got=f"{value} ({len(table.bad) if table is not None else fields['count']} bad cells)",
        owner=facts.owner(rid),
        cause=facts.cause(),
        reference=facts.reference(),
        next_command=facts.next_command(),
    )
    return finding, table


def read_table(launch: Launch, pool: Pool, recorder: Recorder) -> Table:
    """Copy the guarded table to the host and check it again, every cell."""
    rows = launch.table.shape[0]
    q_lens = None if launch.cu_q is None else launch.cu_q.cpu().diff()
    values = launch.table.cpu().to(torch.int64)
    lengths = launch.seq_lens.cpu().to(torch.int64)
    checked = check_page_table(values, lengths, pool.pages, pool.page_size, launch.window, q_lens)
    used = int(((lengths + pool.page_size - 1) // pool.page_size).max()) if rows else 0
    columns = min(values.shape[1], used + 2)  # what lies past every row's end says nothing
    return Table(
        values=values[:, :columns].clone(),
        seq_lens=lengths,
        first_live=checked.first_live,
        bad=checked.bad,
        pool=pool,
        window=launch.window,
        q_len=int(q_lens.max()) if q_lens is not None and len(q_lens) else 1,
        rows_total=rows,
        columns_total=launch.table.shape[1],
        rids=_rids(launch, rows, recorder),
    )


def _rids(launch: Launch, rows: int, recorder: Recorder) -> tuple[str, ...]:
    """Request of each row, by the request-pool index that the forward really used."""
    by_index = recorder.requests_by_pool_index()
    indices = launch.batch.req_pool_indices.tolist()[:rows]
    current = recorder.current
    live = len(current.rids) if current is not None else rows
    names = [by_index.get(int(i), "") if n < live else "" for n, i in enumerate(indices)]
    return tuple(names + [""] * (rows - len(names)))


def _used(recorder: Recorder, name: str) -> int:
    return next((p.used_tokens for p in recorder.pools() if p.name == name), -1)


class Facts:
    """What else the process knows about one bad cell. Reads are best effort."""

    def __init__(self, launch: Launch, row: int, column: int, value: int) -> None:
        self.launch, self.value = launch, value
        page_size = int(launch.backend.page_size)
        self.full_page = self.swa_page = -1
        try:
            index = int(launch.batch.req_pool_indices[row])
            token = int(launch.backend.req_to_token[index, column * page_size])
            self.full_page = token // page_size
            mapping = self._target_pool().full_to_swa_index_mapping
            self.swa_page = int(mapping[token]) // page_size
        except (AttributeError, IndexError, RuntimeError):
            pass  # the report then says less, and nothing that is not known

    def _target_pool(self) -> Any:
        pool = getattr(self.launch.batch, "token_to_kv_pool", None)
        return pool if pool is not None else self.launch.backend.token_to_kv_pool

    @property
    def untranslated(self) -> bool:
        """The cell holds the request's own full-pool page where a SWA page belongs."""
        return self.launch.pool_name == "swa" and self.value == self.full_page != self.swa_page

    def expected_page(self) -> str:
        if self.launch.pool_name == "swa" and self.swa_page > 0:
            return f"; for this request and column: {self.swa_page}"
        if self.launch.pool_name == "full" and self.full_page > 0:
            return f"; for this request and column: {self.full_page}"
        return ""

    def owner(self, rid: str) -> str:
        if self.untranslated:
            return f"full-pool page {self.value} is held by request {rid or '?'} itself"
        return f"no pool has a page {self.value}"

    def cause(self) -> str:
        if self.untranslated:
            b = self.launch.backend
            pool = "None" if b._swa_kv_pool is None else "set"
            return (
                "full-pool indices reached a sliding layer: the attention backend has "
                f"use_sliding_window_kv_pool={b.use_sliding_window_kv_pool}, _swa_kv_pool={pool}, "
                "while the pool it reads is a SWAKVPool, so the table was not translated"
            )
        if self.full_page >= 0:
            return (
                "the cell differs from what req_to_token says "
                f"(full page {self.full_page}, SWA page {self.swa_page}): "
                "the table was overwritten after it was built, or built from stale data"
            )
        return ""

    def reference(self) -> str:
        if self.untranslated:
            return "fix swa-state-swap (seed PR #6; sglang #25103 broke it, #26966 fixed it)"
        return "TRIAGE.md, 'illegal memory access in decode'"

    def next_command(self) -> str:
        if self.untranslated:
            return "G4DEBUG_FIX_SWA_STATE_SWAP=1 <your launch command>"
        return "G4DEBUG_MODE=contain SGLANG_TRTLLM_MHA_DEBUG=1 <your launch command>"


def _bare(fields: dict[str, int], recorder: Recorder) -> Finding:
    """From the kernel's own words alone."""
    return Finding(
        check="page-table",
        kind="out-of-range",
        site="attn.layer_page_table",
        headline=(
            f"g4debug: page-table: page {fields['value']} is out of range "
            f"(row {fields['row']}, column {fields['column']})"
        ),
        location=Location(
            process="scheduler",
            pid=os.getpid(),
            rank=recorder.rank,
            step=recorder.step,
            row=fields["row"],
            column=fields["column"],
        ),
        expected="a page of the pool that the layer reads",
        got=str(fields["value"]),
    )
