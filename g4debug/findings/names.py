"""Texts that a stranger may have chosen, as they may stand in a log line or on a terminal.

A client chooses the id of its request: of any length, with newlines, and with escape sequences that
steer a terminal. A dump keeps an id as it is. Whatever goes into the log of a server passes here.
"""

from __future__ import annotations

import logging

LONGEST = 80  # characters of an id in a sentence
LONGEST_ID = 1024  # of an id in a request event; a client may choose one of megabytes, each time
LONGEST_LINE = 4000  # characters of a line of the log


def clean(text: str) -> str:
    """``text`` with every character that is not printable written as an escape.

    An escape sequence in a request id must not reach the terminal, and neither a newline nor a
    right-to-left mark may rearrange the report.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode("ascii")
        for c in text
    )


def name(rid: object) -> str:
    """A request's id in a sentence."""
    text = str(rid)
    return clean(text[:LONGEST]) + ("…" if len(text) > LONGEST else "")


def line(text: str) -> str:
    """One line of the log."""
    more = " … (cut)" if len(text) > LONGEST_LINE else ""
    return clean(text[:LONGEST_LINE]) + more


class _Clean(logging.Filter):
    """Makes a line of each text that is put into a message. A message itself is our own."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(
                line(str(value)) if isinstance(value, (str, BaseException)) else value
                for value in record.args
            )
        return True


def clean_log() -> None:
    """Clean what g4debug logs in this process from now on."""
    logger = logging.getLogger("g4debug")
    if not any(isinstance(f, _Clean) for f in logger.filters):
        logger.addFilter(_Clean())
