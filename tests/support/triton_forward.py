"""A forward of a real TritonAttnBackend: its metadata, and its attention layer by layer."""

from __future__ import annotations

import torch
from real_triton import WIDE

TOKENS = (50, 100, 61)


class Spec:
    """What a verify's metadata are made from: a chain of 4 tokens after each sequence."""

    kv_indptr = None
    num_tokens_per_req = 4

    def __init__(self, lengths=None):
        size = sum(4 * (n + 4) for n in lengths or ())
        self.custom_mask = torch.ones(size, dtype=torch.bool) if lengths else None


def batch_of(rig, mode, requests, backend):
    batch = rig.batch(mode, requests, backend)
    if mode == "target_verify":
        batch.spec_info = Spec(batch.seq_lens.tolist())
    return batch


def prepared(rig, mode="decode"):
    """A backend with the metadata of a batch with rows that are not in the order of admission."""
    backend = rig.backend()
    a, b, c = (rig.admit(f"r{n}", n) for n in TOKENS)
    batch = batch_of(rig, mode, [c, a, b], backend)
    backend.init_forward_metadata(batch)
    return backend, batch


def run(rig, backend, batch, save=True):
    """The attention of one forward. save: write its KV; a FROZEN_KV_MTP draft does not."""
    new = len(batch.out_cache_loc)
    decode = batch.forward_mode.is_decode_or_idle()
    call = backend.forward_decode if decode else backend.forward_extend
    for layer in rig.layers:
        q, kv = torch.zeros(new, layer.tp_q_head_num * WIDE), torch.zeros(new, 1, WIDE)
        call(q, kv, kv, layer, batch, save_kv_cache=save)
