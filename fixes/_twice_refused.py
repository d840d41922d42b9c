"""Asks SGLang once more for a request that it refuses while nothing else runs.

A scheduler asks ``PrefillAdder.add_one_req`` for each waiting request in each round. One that is
refused in two rounds in a row, while nothing else runs in either, stands: by the second one no
forward is in flight, so nobody can give anything back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from g4debug.fixes.paths.base import arguments

Ask = Callable[[], Any]  # asks SGLang for the request once more


class TwiceRefused:
    """Goes around ``PrefillAdder.add_one_req``, which admits a request, or says why it does not.

    serves: whether it is a request and a server that the fix is for; called with the adder and the
    request. ask_again: what the fix does where that request stands; called with both, and ``Ask``.
    """

    def __init__(
        self,
        serves: Callable[[Any, Any], bool],
        ask_again: Callable[[Any, Any, Ask], None],
    ) -> None:
        self.serves, self.ask_again = serves, ask_again
        self._refused: WeakSet[Any] = WeakSet()  # the one refused last, if nothing else ran

    def __call__(
        self,
        call_next: Callable[..., Any],
        adder: Any,
        req: Any,
        has_chunked_req: bool,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        result = call_next(adder, req, has_chunked_req, *args, **kwargs)
        refused = result.name == "NO_TOKEN" and not has_chunked_req
        stands = (
            refused and nothing_runs(adder) and _may_ask_again(adder) and self.serves(adder, req)
        )
        again = stands and req in self._refused
        self._refused.clear()
        if stands:
            self._refused.add(req)
        if again:
            self.ask_again(adder, req, lambda: call_next(adder, req, False, *args, **kwargs))
        return result  # it is refused still, or nobody else is to join it in this round


def nothing_runs(adder: Any) -> bool:
    """True if no request runs, and none was admitted in this round, of those the adder knows of."""
    runs = adder.running_batch is not None and adder.running_batch.reqs
    return not (adder.can_run_list or runs)


def _may_ask_again(adder: Any) -> bool:
    """True on a server where a request may be asked for twice in a round, if nothing runs."""
    if adder.dllm_config is not None:
        return False
    if adder.prefill_delayer_single_pass is not None:
        return False  # the ranks agree once in a round
    args = arguments()
    # With these, others may hold pages that this adder does not know of.
    return bool(args.disaggregation_mode == "null" and args.pp_size == 1)
