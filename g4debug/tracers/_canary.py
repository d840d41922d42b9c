"""What the tracers' canaries share."""

from __future__ import annotations


class CanaryError(Exception):
    """The tracer did not do what it must; the text says what it did instead."""
