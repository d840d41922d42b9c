"""SGLang's barrier between a forward that reads the tables and the results that rewrite them.

With overlap scheduling SGLang launches a batch, and then processes the result of the one before it.
Up to 0.5.17 it waits for the launched forward's reads only after that (upstream's #31687).
"""

from __future__ import annotations

from typing import Any


def wait_for_tables(scheduler: Any) -> None:
    """Let the scheduling stream wait until the forward has read SGLang's live tables.

    This is SGLang's own barrier, for the releases that come to it too late: they keep the event of
    the forward in a ``war_fastpath_runner``. The barrier takes the event away, and the one at
    SGLang's own place would then wait for the whole forward. So it is put back. 0.5.12 has no
    barrier; there the scheduling stream waits for the whole forward.

    With SGLang's own barrier this waits only where the result of a prefill is processed next. There
    SGLang gives the rows of running requests other pages, which the prefix cache had already. The
    result of a decode frees only pages of requests that have ended, and the rows of these requests
    are void in this forward. A wait there would make the host wait for the whole forward wherever
    it asks the device for something while it frees them.
    """
    if not hasattr(scheduler, "_apply_war_barrier"):
        scheduler.schedule_stream.wait_stream(scheduler.forward_stream)
        return
    runner = getattr(scheduler.model_worker, "war_fastpath_runner", None)
    if runner is None:
        return
    last = scheduler.last_batch  # its result is processed next
    if last is None or last.forward_mode.is_decode():
        return
    event = runner.war_fastpath_read_done_event
    scheduler._apply_war_barrier()
    runner.war_fastpath_read_done_event = event
