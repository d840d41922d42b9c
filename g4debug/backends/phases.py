"""Which attention backend runs in which phase of serving, and whether its tables are guarded.

With ``--prefill-attention-backend`` and ``--decode-attention-backend`` SGLang has two backends in
one (``HybridAttnBackend``), and chooses by the mode of a forward. So :func:`of` asks the objects,
and not the arguments of the server.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from g4debug.backends import adapter_of
from g4debug.backends.base import Adapter
from g4debug.hooking.resolved import server_argument


@dataclass(frozen=True)
class Phase:
    """name: prefill, decode, verify or draft. backend: the name of its adapter, else its class.

    in_part: it is guarded, and some of its forwards are not judged.
    """

    name: str
    backend: str
    guarded: bool
    in_part: bool = False


def of(
    scheduler: Any,
    adapters: Mapping[int, Adapter],
    in_part: Mapping[int, Collection[str]] | None = None,
) -> list[Phase]:
    """The phases of this server. [] if its backends cannot be found.

    adapters: the adapter of each backend that is guarded, by id() of the backend. in_part: the
        phases in which some forwards are not judged, by the same.
    """
    phases = []
    for name, backend in built(scheduler).items():
        adapter = adapters.get(id(backend))
        called = type(backend).__name__ if adapter is None else adapter.called(backend)
        guarded = adapter is not None and name in adapter.phases
        partly = name in (in_part or {}).get(id(backend), ())
        phases.append(Phase(name, called, guarded, partly))
    return phases


def built(scheduler: Any) -> dict[str, Any]:
    """Phase -> the object of its backend. {} if the backends of this server cannot be found."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    worker = getattr(scheduler, "tp_worker", None)
    target = getattr(getattr(worker, "model_runner", None), "attn_backend", None)
    if target is None:
        return {}
    found = {
        "prefill": selected(target, ForwardMode.EXTEND),
        "decode": selected(target, ForwardMode.DECODE),
    }
    draft = getattr(scheduler, "draft_worker", None)
    if draft is not None:
        found["verify"] = selected(target, ForwardMode.TARGET_VERIFY)
        drafting = _drafting(draft)
        if drafting is not None:
            found["draft"] = selected(drafting, ForwardMode.DECODE)
        extending = _extending(draft)
        if extending is not None:
            found["draft"] = selected(extending, ForwardMode.DRAFT_EXTEND_V2)
    return found


def named(scheduler: Any) -> tuple[str, ...]:
    """The backends of a server, each once, that of its prefills first: the names that their
    adapters know them by.

    Of one without an adapter the class is told. What was typed may be served by another class.
    """
    found: dict[str, None] = {}
    for backend in built(scheduler).values():
        adapter = adapter_of(backend)
        found[type(backend).__name__ if adapter is None else adapter.called(backend)] = None
    return tuple(found)


def blind_modes(phases: list[Phase]) -> set[str]:
    """The modes of the scheduler's batches in which neither target nor draft is guarded."""
    guarded = {p.name: p.guarded for p in phases}
    # With a draft, SGLang verifies in each decode.
    with_draft = [p.name for p in phases if p.name in ("verify", "draft")]
    found = set()
    if not guarded.get("prefill", True):
        found |= {"EXTEND", "MIXED", "SPLIT_PREFILL"}
    if not any(guarded.get(name, True) for name in with_draft or ["decode"]):
        found |= {"DECODE", "TARGET_VERIFY"}
    return found


def line(phases: list[Phase]) -> str:
    """``g4debug: page-table: prefill on triton, decode on trtllm_mha; all guarded``."""
    told = ", ".join(f"{p.name} on {p.backend}" for p in phases)
    blind = ", ".join(p.name for p in phases if not p.guarded)
    partly = ", ".join(p.name for p in phases if p.guarded and p.in_part)
    said = [f"NOT guarded: {blind}"] if blind else []
    said += (
        [f"guarded in part, see the limits in the log and the status: {partly}"] if partly else []
    )
    return f"g4debug: page-table: {told}; {'; '.join(said) or 'all guarded'}"


def asked(server_args: Any) -> dict[str, str]:
    """Phase -> the attention backend that the server was told to use, or chose. {} if not known.

    --attention-backend is only the default of the others. SGLang sets it on its own where the two
    are given (to flashinfer on a H200), and then nothing runs on it.
    """

    def named(*names: str) -> str:
        return next((str(v) for n in names if (v := server_argument(server_args, n))), "")

    prefill = named("prefill_attention_backend", "attention_backend")
    decode = named("decode_attention_backend", "attention_backend")
    found = {"prefill": prefill, "decode": decode}
    if named("speculative_algorithm"):
        found["verify"] = prefill if named("speculative_attention_mode") == "prefill" else decode
        found["draft"] = named("speculative_draft_attention_backend") or decode
    return {phase: backend for phase, backend in found.items() if backend}


def selected(backend: Any, mode: Any) -> Any:
    """The backend that runs this mode: one half of a hybrid, or the backend itself.

    Of one for layers with attention and linear ones, that of the layers with attention.
    """
    select = getattr(backend, "_select_backend", None)
    found = backend if select is None else select(mode)
    return getattr(found, "full_attn_backend", found)


def _drafting(worker: Any) -> Any:
    """The backend of a draft's steps; of the first step, if each step has its own."""
    for holder in (worker, getattr(worker, "_draft_worker", None)):
        backend = getattr(holder, "draft_attn_backend", None)
        if backend is not None:
            steps = getattr(backend, "attn_backends", None)
            return steps[0] if steps else backend
    return None


def _extending(worker: Any) -> Any:
    """The same of a draft that drafts in its extends, as multi-layer EAGLE's; its first model's."""
    runners = getattr(getattr(worker, "_draft_worker", None), "draft_runner_list", None)
    return runners[0].attn_backend if runners else None
