"""Overlap scheduling with drafts for which SGLang switches it off on a CPU.

On a GPU SGLang runs EAGLE, EAGLE3, STANDALONE and NGRAM under overlap scheduling, and so does the
CPU engine, in which a stream is a stand-in. ``--disable-overlap-schedule`` still switches it off.
"""

from __future__ import annotations


def kept(server_args: object) -> None:
    """`_disable_overlap_schedule_for_cpu`, which here changes nothing."""
