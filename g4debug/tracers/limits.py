"""What a server does that keeps tracers from judging: the limits that several of them share."""

from __future__ import annotations

from typing import Any


def moving_pages(server_args: Any) -> list[str]:
    """Why more than ranges cannot be judged on this server; empty if it can.

    Each says what to change. With overlap scheduling a request that ended in the last step is
    still in the forward that runs, while its pages and its row are given to somebody else.
    """
    found = []
    if not getattr(server_args, "disable_overlap_schedule", False):
        found.append(
            "overlap scheduling changes pages while a forward reads them; "
            "--disable-overlap-schedule arms the rest"
        )
    if getattr(server_args, "disaggregation_mode", None) not in (None, "null"):
        found.append("prefill and decode are disaggregated, pages come from another server")
    if getattr(server_args, "enable_pdmux", False):
        found.append("--enable-pdmux runs prefill beside decode; without it the rest is armed")
    return found
