"""The limits that several tracers share: what keeps them from judging on some servers."""

from __future__ import annotations

from typing import Any


def overlaps(server_args: Any) -> bool:
    """True if the scheduler works on the next batch while a forward runs."""
    return not getattr(server_args, "disable_overlap_schedule", False)


def moving_pages(server_args: Any, as_of_launch: bool = False) -> list[str]:
    """Why it cannot be judged on this server which page belongs where; empty if it can.

    as_of_launch: who asks compares with what was true when the forward was launched, so overlap
    scheduling does not matter.

    Pages change hands while a forward reads them. With overlap scheduling, for instance, a request
    that ended in the last step is still part of the forward that runs, while its pages and its row
    are given to another request.
    """
    found = []
    if overlaps(server_args) and not as_of_launch:
        found.append(
            "with overlap scheduling, pages change hands while a forward reads them; start with "
            "--disable-overlap-schedule to have everything checked"
        )
    if getattr(server_args, "disaggregation_mode", None) not in (None, "null"):
        found.append("prefill and decode are disaggregated, so pages are filled by another server")
    if getattr(server_args, "enable_pdmux", False):
        found.append(
            "--enable-pdmux runs prefill beside decode; start without it to have everything checked"
        )
    return found
