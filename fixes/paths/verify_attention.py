"""A verify's attention on triton reads the KV of each request once, in parts (performance path).

In each step of speculative decoding the target looks at a few drafted tokens of each request. On
``triton`` SGLang computes that with its kernel for prefills, whose blocks have room for 64 queries
and which reads a request's KV once for each head, one block of keys after the other. On a H200 that
took a quarter of a step of E4B with FROZEN_KV_MTP at batch 1, and more than a half at batch 64.
Here two small kernels do it, :mod:`g4debug.fixes.paths.kernels.verify_attention`.

From 0.5.18 on SGLang's backend asks another kernel first, ``verify_splitkv_fwd``, if
``use_verify_splitkv`` is true, which it is on MI350 only: it returns False for what it does not
compute, and SGLang's own kernel does then. Ours is put there after the backend's constructor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from g4debug.fixes.base import Fix, after
from g4debug.fixes.paths import base
from g4debug.fixes.source import source

if TYPE_CHECKING:
    import torch

ID = "verify-attention"
BACKEND = "sglang.srt.layers.attention.triton_backend.TritonAttnBackend"


def after_init(result: None, backend: Any, *args: Any, **kwargs: Any) -> None:
    """Runs after ``TritonAttnBackend.__init__``."""
    import torch

    why_not = base.server_limit(ID) or gpu_limit()
    if not why_not and backend.use_verify_splitkv:
        why_not = "SGLang has a kernel of its own for it here"
    if not why_not:
        backend.use_verify_splitkv = True
        backend.verify_splitkv_fwd = torch.compiler.disable(verify)  # type: ignore[no-untyped-call]
    base.say(ID, "triton", why_not)


def gpu_limit() -> str:
    """Why the kernels are not used on this GPU; '' if they are, and where there is none."""
    import torch

    if not torch.cuda.is_available():
        return ""
    major, minor = torch.cuda.get_device_capability()
    return "" if major == 9 else f"they were measured on Hopper only, and this is sm{major}{minor}"


def verify(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    custom_mask: torch.Tensor | None,
    is_causal: bool,
    mask_indptr: torch.Tensor | None,
    max_len_extend: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sm_scale: float | None = None,
    logit_cap: float = 0.0,
    sliding_window_size: int = -1,
    sinks: torch.Tensor | None = None,
    window_kv_offsets: torch.Tensor | None = None,
    xai_temperature_len: int = -1,
    max_bs: int | None = None,
) -> bool:
    """Compute a verify as ``extend_attention_fwd`` does, whose arguments these are.

    False if SGLang's kernel must. That hangs on shapes and settings only, and not on numbers on the
    device, since a CUDA graph may be captured.
    """
    from g4debug.fixes.paths.kernels.verify_attention import ineligible, verify_attention

    window = sliding_window_size if sliding_window_size > 0 else -1
    other = (
        not is_causal
        or sinks is not None
        or logit_cap > 0
        or xai_temperature_len > 0
        or (k_scale, v_scale) != (1.0, 1.0)
        or (custom_mask is not None and window >= 0 and window_kv_offsets is None)
    )
    rows = qo_indptr.shape[0] - 1
    if other or ineligible(q, k, k_buffer, v_buffer, rows, int(max_len_extend)):
        return False
    verify_attention(
        q,
        k,
        v,
        out,
        k_buffer,
        v_buffer,
        qo_indptr,
        kv_indptr,
        kv_indices,
        custom_mask,
        mask_indptr,
        int(max_len_extend),
        q.shape[2] ** -0.5 if sm_scale is None else sm_scale,
        window,
        window_kv_offsets,
    )
    return True


def still_broken() -> bool:
    """True if the backend would take another kernel for a verify, and has one for MI350 only."""
    text = source(f"{BACKEND}.__init__")
    asks = text.partition("self.use_verify_splitkv = (")[2]
    return asks.lstrip().startswith("is_gfx95_supported()")


FIX = Fix(
    id=ID,
    title="a verify's attention on triton reads the KV of each request once, in parts",
    seed="none; found in a timeline of 0.5.23",
    upstream="none (a kernel for MI350 and layers without a window: verify_splitkv.py)",
    needs="==0.5.23",
    elsewhere={
        "<0.5.18": "SGLang asks no other kernel for a verify there",
        "<0.5.23": "it was not run there",
    },
    still_broken=still_broken,
    hooks=(after("attn.triton.init", after_init),),
    purpose="performance",
    eligible=(
        "in the verify of speculative decoding on triton, on Hopper, for KV of the model's own "
        "dtype and up to 64 queries of the heads of a KV head; not under "
        "--enable-deterministic-inference, --rl-on-policy-target or --enable-torch-compile"
    ),
)
