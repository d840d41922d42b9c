"""What a waiting request is said to ask of the SWA pool: SGLang's own function, in each form."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from g4debug.tracers.flight_recorder import admission

WINDOW, PAGE, POOL = 128, 64, 768  # tokens


class Of18:
    """``PrefillAdder`` of 0.5.18: what a request may still generate counts, too."""

    def _swa_budget_for_req(
        self, extend_input_len: int, max_new_tokens: int, swa_host_hit_length: int = 0
    ) -> int:
        more = max(extend_input_len - WINDOW, 0)
        return more + self._swa_reserved_tokens(extend_input_len, max_new_tokens)

    def _swa_reserved_tokens(self, extend_input_len: int, max_new_tokens: int) -> int:
        return min(extend_input_len + max_new_tokens, WINDOW) + PAGE

    def _swa_req_never_fits(self, extend_input_len: int, max_new_tokens: int) -> bool:
        return self._swa_budget_for_req(extend_input_len, max_new_tokens) >= POOL

    def ceil_paged_tokens(self, tokens: int) -> int:
        return -(-tokens // PAGE) * PAGE


@pytest.mark.parametrize(
    ("extend", "new", "chunk", "at_once", "needs"),
    [
        (300, 40, 512, False, (384, 385)),  # 320 in pages, and one page
        (30, 8, 512, False, (136, 137)),  # 72 of a window, and one page
        (900, 40, 512, False, (40 + 2 * PAGE, 40 + 2 * PAGE)),  # never: a smaller chunk will do
        (900, 40, None, False, (1024, 1025)),  # and prompts are not computed in chunks
        (300, 40, 512, True, (364, 364)),
    ],
)
def test_0_5_18_counts_the_answer(extend, new, chunk, at_once, needs):
    left = SimpleNamespace(adder=Of18(), page=PAGE, chunk=chunk)
    assert admission._swa_needs(left, extend, new, at_once) == needs


def test_before_it_only_the_prompt_counts():
    adder = SimpleNamespace(_swa_budget_for_req=lambda extend_input_len: extend_input_len + PAGE)
    left = SimpleNamespace(adder=adder, page=PAGE, chunk=512)
    assert admission._swa_needs(left, 300, 40, False) == (364, 365)
