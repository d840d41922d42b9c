"""Sends all images and frames of a request through the vision tower together (seed PR #9).

SGLang 0.5.12 encodes and projects one image after the other. With six images each kernel runs six
times, each time with a sixth of the work. But the images do not depend on each other. So those with
the same number of patches go through the tower in one call, as many as a memory budget allows
(``G4DEBUG_MM_ENCODER_PERCENT`` of the device), and all soft tokens go through the embedder in one
call. The idea is vLLM's (#43169). The order, embeddings that are passed on, and the empty result
are as in SGLang.

A video is a list of frames. SGLang gives all of them to the tower at once; here the budget counts
for them, too. If memory runs out all the same, SGLang's own code runs, which needs less.

With tensor parallelism the ranks wait for each other in every layer of the tower, so that all must
cut the images into the same passes. At the first request they agree on the smallest budget among
them. From then on the passes follow from what every rank knows. A rank that runs out of memory
cannot go back to one image at a time alone: the others would wait for it in a pass, for ever. So
its error is raised, which ends the server and says what to do.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from g4debug.fixes.base import Fix, around
from g4debug.fixes.paths import base
from g4debug.fixes.source import source
from g4debug.settings import fix_switch

if TYPE_CHECKING:
    import torch

ID = "mm-batched-encoder"
MODEL = "sglang.srt.models.gemma4_mm.Gemma4ForConditionalGeneration"


@dataclass(frozen=True)
class Terms:
    """The terms of the passes, the same on all ranks that compute the tower together.

    runs: this path is used. budget: bytes that one pass may take. fused: vision-layer is used,
    which takes less memory.
    """

    runs: bool
    budget: int
    fused: bool


_agreed: weakref.WeakKeyDictionary[Any, Terms] = weakref.WeakKeyDictionary()


def around_image(call_next: Callable[..., Any], model: Any, items: list[Any]) -> Any:
    """Wraps ``get_image_feature``. Returns the embeddings [tokens, hidden of the text model]."""
    return _batched(call_next, model, items, "image_position_ids", video=False)


def around_video(call_next: Callable[..., Any], model: Any, items: list[Any]) -> Any:
    """Wraps ``get_video_feature``, which does the same for frames."""
    return _batched(call_next, model, items, "video_position_ids", video=True)


def _batched(
    call_next: Callable[..., Any], model: Any, items: list[Any], positions_of: str, video: bool
) -> Any:
    import torch

    from g4debug.fixes.paths.mm_batched_encoder.batches import Entry, collect

    why = limit(model)
    terms = terms_of(model, runs=not why)
    if not terms.runs:
        base.once(ID, "not used", f": {why or 'another rank cannot use it'}")
        return call_next(model, items)
    pieces = collect(items, positions_of, model.config.text_config.hidden_size, video)
    if pieces is None or sum(isinstance(p, Entry) for p in pieces) < 2:
        return call_next(model, items)  # one image only, or an error that SGLang reports
    try:
        return embeddings(model, pieces, terms, "frames" if video else "images")
    except torch.OutOfMemoryError as e:
        group = base.ranks()
        if group.world_size > 1:
            raise torch.OutOfMemoryError(
                f"g4debug: {ID}: rank {group.rank_in_group} of {group.world_size} ran out of "
                "device memory in the vision tower, where the other ranks wait for it, so that it "
                "cannot go on with one image at a time. Lower G4DEBUG_MM_ENCODER_PERCENT or "
                f"--mem-fraction-static, or set {fix_switch(ID)}=0. ({e})"
            ) from e
        more = (
            ": image by image this time; lower G4DEBUG_MM_ENCODER_PERCENT or --mem-fraction-static"
        )
        base.once(ID, "out of device memory", more, logging.WARNING)
    return call_next(model, items)


def terms_of(model: Any, runs: bool) -> Terms:
    """The terms of this model. With more than one rank they are agreed on once.

    runs: whether this rank can use the path. Every rank comes here with its first request that has
    an image, before any of them calls the tower.
    """
    import torch

    from g4debug.fixes.paths.vision_layer import fix as vision_layer

    if model in _agreed:
        return _agreed[model]
    fused = runs and vision_layer.used(model.vision_tower)
    mine = Terms(runs, budget(model.vision_tower.device), fused)
    group = base.ranks()
    if group.world_size == 1:
        return mine
    least = torch.tensor([mine.runs, mine.budget, mine.fused], dtype=torch.int64)
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    runs_everywhere, bytes_of_pass, fused_everywhere = least.tolist()
    found = Terms(bool(runs_everywhere), bytes_of_pass, bool(fused_everywhere))
    _agreed[model] = found
    return found


def embeddings(model: Any, pieces: list[Any], terms: Terms, what: str) -> torch.Tensor:
    """The embeddings [tokens, hidden] of all pieces, in order.

    The budget decides how many calls of the tower there are; the embedder is called once. what:
    "images" or "frames", for the log.
    """
    import torch

    from g4debug.fixes.paths.mm_batched_encoder.batches import (
        Entry,
        bytes_of_patches,
        encode,
        passes,
    )

    entries = [p for p in pieces if isinstance(p, Entry)]
    dtype = model.language_model.dtype()
    cost = bytes_of_patches(model.config.vision_config, dtype.itemsize, terms.fused)
    batches = passes(entries, cost, terms.budget)
    tokens = encode(model.vision_tower, entries, batches, dtype)
    embedded = model.embed_vision(inputs_embeds=torch.cat(tokens).unsqueeze(0)).squeeze(0)
    count = f"{len(batches)} pass" + ("" if len(batches) == 1 else "es")
    base.once(ID, "on", f": {len(entries)} {what} in {count} of the vision tower (first request)")
    if len(entries) == len(pieces):
        return embedded  # type: ignore[no-any-return]
    own = iter(torch.split(embedded, [len(t) for t in tokens]))
    device = model.language_model.device
    return torch.cat([next(own) if isinstance(p, Entry) else p.to(device) for p in pieces])


def budget(device: torch.device) -> int:
    """Bytes that one pass of the tower may take."""
    from g4debug.fixes.paths.mm_batched_encoder.batches import device_memory
    from g4debug.settings import Settings

    percent = Settings.from_environ().mm_encoder_percent
    return int(device_memory(device)) * percent // 100


def limit(model: Any) -> str:
    """Why SGLang's own code runs, image by image; '' if this path runs."""
    if why := base.numbers_limit(base.arguments()):
        return why
    layers = model.vision_tower.encoder.layers
    backend = type(layers[0].self_attn.qkv_backend).__name__
    # VisionSdpaAttention asserts that the batch size is 1.
    return "the vision tower's attention is sdpa" if backend == "VisionSdpaAttention" else ""


def still_broken() -> bool:
    """True if the soft tokens are projected inside of the loop over images."""
    texts = [source(f"{MODEL}.get_{kind}_feature") for kind in ("image", "video")]
    return all("for pv_idx, pv in" in t and "self.embed_vision(" in t for t in texts)


FIX = Fix(
    id=ID,
    title="images and frames go through the vision tower together, within a memory budget",
    seed="PR #9",
    upstream="none up to 0.5.23; vLLM #43169",
    needs=">=0.5.12,<0.5.16 or ==0.5.23",
    still_broken=still_broken,
    hooks=(
        around("mm.image_feature", around_image),
        around("mm.video_feature", around_video),
    ),
    purpose="performance",
    eligible="for two or more images or frames of a request; not where the vision tower's "
    "attention is sdpa, nor under --enable-deterministic-inference or --rl-on-policy-target",
)
