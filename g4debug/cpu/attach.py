"""Which attribute of SGLang each stand-in replaces, and why. Nothing else is replaced."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from g4debug.cpu import (
    draft_tree,
    experts,
    flashinfer_init,
    grammar_mask,
    pinned,
    softcap,
    verify_greedy,
)
from g4debug.cpu.error import CpuEngineError

log = logging.getLogger("g4debug.cpu")


def _true() -> bool:
    """Stands in for `is_sm100_supported`, only where server_args checks the arguments."""
    return True


@dataclass(frozen=True)
class StandIn:
    """`setattr(module, path, replacement)`.

    `created`: SGLang imports the name only on CUDA, so it need not exist here. If any other name is
    missing, the process stops, because the table does not know this SGLang.
    """

    module: str
    path: str
    replacement: Callable[..., Any] | object
    why: str
    created: bool = False


_SRT: Final = "sglang.srt"
TABLE: Final[tuple[StandIn, ...]] = (
    StandIn(
        f"{_SRT}.server_args",
        "is_sm100_supported",
        _true,
        "SGLang allows trtllm_mha for prefill only on sm100",
    ),
    StandIn(
        f"{_SRT}.layers.attention.flashinfer_backend",
        "FlashInferAttnBackend.__init__",
        flashinfer_init.init_backend,
        "it builds CUDA wrappers that trtllm_mha never uses",
    ),
    StandIn(
        f"{_SRT}.layers.attention.trtllm_mha_backend",
        "flashinfer",
        flashinfer_init.FLASHINFER,
        "the attention kernels are CUDA only",
        created=True,
    ),
    StandIn(
        f"{_SRT}.layers.logits_processor",
        "fused_softcap",
        softcap.softcap_in_place,
        "its Triton kernel calls libdevice.tanh, which the interpreter lacks",
    ),
    StandIn(
        f"{_SRT}.layers.logits_processor",
        "torch",
        pinned.TORCH,
        "prompt logprobs ask for pinned memory, which only an accelerator has",
    ),
    StandIn(
        f"{_SRT}.constrained.xgrammar_backend",
        "XGrammarGrammar.apply_vocab_mask",
        grammar_mask.apply_vocab_mask,
        "it raises on a CPU, although xgrammar can do it there",
    ),
    StandIn(
        f"{_SRT}.layers.quantization.unquant",
        "UnquantizedFusedMoEMethod.forward_cpu",
        experts.forward_cpu,
        "it asserts that experts use silu; Gemma-4's use gelu, which SGLang's torch code can do",
    ),
    StandIn(
        f"{_SRT}.layers.quantization.unquant",
        "UnquantizedFusedMoEMethod.forward_native",
        experts.forward_cpu,
        "the same function under another name, for CPUs without AMX",
    ),
    StandIn(
        f"{_SRT}.speculative.eagle_utils",
        "sgl_build_tree_kernel_efficient",
        draft_tree.build_tree,
        "it is in sgl_kernel, which SGLang imports only on CUDA",
        created=True,
    ),
    # The two modules hold the same function under their own names.
    StandIn(
        f"{_SRT}.speculative.eagle_utils",
        "verify_tree_greedy_func",
        verify_greedy.verify_tree_greedy,
        "it has no CPU branch and would silently verify nothing",
    ),
    StandIn(
        f"{_SRT}.speculative.eagle_info",
        "verify_tree_greedy_func",
        verify_greedy.verify_tree_greedy,
        "the same function, imported by name",
    ),
)

_installed = False


def install() -> None:
    """Put all stand-ins of the table in place, once per process."""
    global _installed
    if _installed:
        return
    for stand_in in TABLE:
        _attach(stand_in)
    _installed = True
    names = ", ".join(dict.fromkeys(s.path for s in TABLE))
    log.warning("g4debug: CPU engine, with stand-ins for CUDA kernels in force: %s", names)


def _attach(stand_in: StandIn) -> None:
    owner: Any = importlib.import_module(stand_in.module)
    *parents, name = stand_in.path.split(".")
    for parent in parents:
        owner = getattr(owner, parent, None)
    if owner is None or not (stand_in.created or hasattr(owner, name)):
        versions = [d.version for d in importlib.metadata.distributions(name="sglang")]
        raise CpuEngineError(
            f"CPU engine: SGLang {versions} has no {stand_in.module}:{stand_in.path}; "
            "0.5.12.post1 and 0.5.13.post1 have it. Use one of these, or extend "
            "g4debug/cpu/attach.py for this version."
        )
    setattr(owner, name, stand_in.replacement)
