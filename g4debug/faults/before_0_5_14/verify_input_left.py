"""verify-input-left: the v1 worker knows at the end of a step whether every request finished."""

from __future__ import annotations

from g4debug.faults.verify_input_left import at_end

install = at_end
