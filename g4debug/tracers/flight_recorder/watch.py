"""What ``SGLANG_TRTLLM_MHA_DEBUG=watch`` arms of the flight recorder: all of it."""

from __future__ import annotations

from g4debug.tracers.flight_recorder.tracer import TRACER

WATCH = TRACER
