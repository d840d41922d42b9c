"""allocated-len: 0.5.12's v2 allocates ahead in the same place as today's."""

from __future__ import annotations

from g4debug.faults.allocated_len import install
from g4debug.faults.before_0_5_14._spec import with_path_only as absent

__all__ = ["absent", "install"]
