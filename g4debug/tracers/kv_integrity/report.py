"""Turns KV that is not as it must be into a Finding. Runs only then, and may wait."""

from __future__ import annotations

import logging
import sys

from g4debug.findings.kinds import KINDS
from g4debug.findings.record import Finding, LayerKind, Location, PageEvent
from g4debug.hooking import req_kv
from g4debug.ledger.ledger import Ledger
from g4debug.ledger.page_history import short
from g4debug.tracers.kv_integrity.causes import cause_of_change, cause_of_nan, cause_of_write
from g4debug.tracers.kv_integrity.watched import Look, Watched

logger = logging.getLogger("g4debug")
NAMED = 4  # how many requests are named
Found = tuple[Finding, tuple[PageEvent, ...]]
NAN_CHECK = "SGLANG_SPEC_NAN_DETECTION"  # up to 0.5.13


def describe_written(
    watched: Watched, ledger: Ledger, page: int, code: int, count: int, step: int, idle: bool
) -> Found:
    """The finding that the stamp of a freed page is gone.

    code, count: of ``KvPages.written``. step: in which it was looked at.
    """
    pool = watched.pool
    layer, half, row = watched.place(code)
    events = ledger.history(pool.name, page)
    freed = next((e for e in reversed(events) if e.kind in ("free", "evict")), None)
    after = events[events.index(freed) + 1 :] if freed is not None else ()
    heir = next((e.request for e in after if e.request), "")
    last = freed.request if freed is not None else ""
    by = f" by {freed.caller}" if freed is not None and freed.caller else ""
    when = f"freed in step {freed.step}{by}" if freed is not None else "freed"
    found = "when the server was idle" if idle else "when it was handed out again"
    still = pointing_to(watched, ledger, page, heir)
    where = f"KV slot {row}, {half} of {_layer(watched, layer)}"
    record = KINDS["kv-integrity"]["write-after-free"]
    finding = record.finding(
        site="scheduler.on_idle" if idle else "pool.alloc",
        headline=(
            f"g4debug: kv-integrity: {pool.name.upper()} page {page} was written after it was "
            f"freed ({where}); this was found {found}" + (f" to request {heir}" if heir else "")
        ),
        location=_location(watched, ledger, layer, heir, step),
        expected=f"the stamp that page {page} got when it was {when}",
        got=f"other data at {where}; {count} rows of the page's K and V buffers in all",
        owner=(
            f"page {page} was held by {last or 'a request that is not known'}; "
            + (f"now {heir} holds it" if heir else "nobody holds it now")
            + (f"; {still}" if still else "")
        ),
        history=short(events),
        cause=cause_of_write(freed, still),
    )
    return finding, events


def describe_changed(
    watched: Watched, ledger: Ledger, look: Look, i: int, code: int, count: int
) -> Found:
    """The finding that a sealed page has another checksum.

    i: of the page in ``look``. code, count: of ``KvPages.changed``.
    """
    page, owner = int(look.pages[i]), str(look.owners[i])
    pool = watched.pool
    layer, half = watched.buffer(code)
    events = ledger.history(pool.name, page)
    bad = _not_finite_now(watched, page)
    others = f", and {count - 1} more of its {len(watched.kv.buffers)} buffers" * (count > 1)
    still = pointing_to(watched, ledger, page, owner)
    tokens = _tokens(watched, int(look.positions[i]), owner)
    record = KINDS["kv-integrity"]["kv-changed"]
    finding = record.finding(
        site="scheduler.run_batch",
        headline=(
            f"g4debug: kv-integrity: KV that was committed has changed: {pool.name.upper()} page "
            f"{page}, {half} of {_layer(watched, layer)}{others}, {tokens}"
        ),
        location=_location(watched, ledger, layer, owner, look.step),
        expected=(
            f"the KV that the page had when it became complete in step "
            f"{int(look.sealed_at[i])}; it still had it in step {int(look.since[i])}"
        ),
        got=f"another checksum in step {look.step}" + (f"; {bad}" if bad else ""),
        owner=(
            f"page {page} was handed out to {owner or 'a request that is not known'}"
            + (f"; {still}" if still else "")
        ),
        history=short(events),
        cause=cause_of_change(count, still),
    )
    return finding, events


def describe_not_finite(
    watched: Watched, ledger: Ledger, look: Look, i: int, code: int, count: int
) -> Found:
    """The finding that a new page has NaN or Inf.

    i: of the page in ``look``. code, count: of ``KvPages.not_finite``.
    """
    page, owner = int(look.pages[i]), str(look.owners[i])
    pool = watched.pool
    layer, half, row = watched.place(code)
    events = ledger.history(pool.name, page)
    position = int(look.positions[i]) + row
    record = KINDS["kv-integrity"]["nan"]
    finding = record.finding(
        site="scheduler.run_batch",
        headline=(
            f"g4debug: kv-integrity: NaN or Inf in {half} of {_layer(watched, layer)}, "
            f"{pool.name.upper()} "
            f"page {page}, KV slot {row}: token {position} of request {owner}"
        ),
        location=_location(watched, ledger, layer, owner, look.step),
        expected="finite KV in a page whose tokens are all committed",
        got=f"NaN or Inf in {count} rows of the page's K and V buffers",
        owner=f"page {page} was handed out to {owner or 'a request that is not known'}",
        history=short(events),
        cause=cause_of_nan(layer, pool.name, layer == watched.layers[0], count),
        next_command=sglangs_check() + record.command,
    )
    return finding, events


def sglangs_check() -> str:
    """The beginning of a command that has SGLang look for NaN, too; "" if this one cannot."""
    known = getattr(sys.modules.get("sglang.srt.environ"), "envs", None)
    return f"{NAN_CHECK}=1 " if hasattr(known, NAN_CHECK) else ""


def pointing_to(watched: Watched, ledger: Ledger, page: int, besides: str) -> str:
    """Which other live requests have the page in their row of req_to_token. '' if none."""
    scheduler = ledger.recorder.scheduler
    if scheduler is None:
        return ""
    try:
        allocator = scheduler.token_to_kv_pool_allocator
        table = scheduler.req_to_token_pool.req_to_token
        size, found = watched.pool.page_size, []
        for rid, request in list(ledger.requests.items()):
            row, length = req_kv.row(request), req_kv.allocated(request)
            if rid == besides or row < 0 or not length:
                continue
            tokens = table[row, :length:size].long()
            if watched.pool.name == "swa":
                tokens = allocator.full_to_swa_index_mapping[tokens]
            columns = (tokens // size == page).nonzero().flatten().tolist()
            found += [f"{rid} (column {column})" for column in columns[:1]]
    except Exception:
        # The process is broken, and this is only an addition: it must not cost the finding.
        logger.exception("g4debug: kv-integrity could not find out who else has the page")
        return ""
    more = f" and {len(found) - NAMED} more" * (len(found) > NAMED)
    return f"it is also in the row of {', '.join(found[:NAMED])}{more}" if found else ""


def _not_finite_now(watched: Watched, page: int) -> str:
    """Where a page has NaN or Inf now. '' if it has none, or its dtype does not tell."""
    import torch

    if not watched.kv.has_floats:
        return ""
    try:
        pages = torch.tensor([page], device=watched.kv.device)
        code, count = watched.kv.not_finite(pages)[:, 0].tolist()
    except RuntimeError as e:
        return f"the device cannot be read any more ({e})".splitlines()[0]
    if not count:
        return ""
    layer, half, row = watched.place(code)
    where = f"KV slot {row}, {half} of {_layer(watched, layer)}"
    return f"NaN or Inf in {count} rows, the first at {where}"


def _layer(watched: Watched, layer: int) -> str:
    return f"layer {layer}" + (f" of the {watched.runner}" if watched.runner else "")


def _tokens(watched: Watched, position: int, owner: str) -> str:
    if position < 0 or not owner:
        return "of a request that is not known"
    return f"tokens {position}..{position + watched.pool.page_size - 1} of request {owner}"


def _location(watched: Watched, ledger: Ledger, layer: int, request: str, step: int) -> Location:
    kind: LayerKind = "sliding" if watched.pool.name == "swa" else "full"
    recorder = ledger.recorder
    # With overlap scheduling the next step may have begun since.
    mode = next((s.forward_mode for s in reversed(recorder.steps) if s.step == step), "")
    return Location(
        process="scheduler",
        step=step,
        forward_mode=mode,
        runner=watched.runner,
        layer=layer,
        layer_kind=kind,
        request=request,
    )
