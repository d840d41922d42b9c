"""How many pages a KV pool has for a layer."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from g4debug.hooking.layer_pools import pages_of


def test_a_pool_with_no_layer_yet_is_asked_for_the_buffer():
    rows, layer = torch.zeros(128, 1, 8), SimpleNamespace(layer_id=3)
    pool = SimpleNamespace(k_buffer=[], v_buffer=[], get_key_buffer={3: rows}.__getitem__)
    assert pages_of(pool, layer, 64) == 2
    assert pages_of(SimpleNamespace(kv_buffer=[rows]), layer, 32) == 4
