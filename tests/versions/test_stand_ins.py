"""The CPU engine's stand-ins on every release, by reading: each has its place."""

from __future__ import annotations

import re

from test_versions import release  # noqa: F401 - a fixture

from g4debug.cpu import attach
from g4debug.fixes.source import exists, source


def test_every_stand_in_has_its_place(release):  # noqa: F811
    gone = [
        f"{s.module}.{s.path}"
        for s in attach.for_this_release()
        if s.module.startswith("sglang.") and not s.created and not there(s)
    ]
    assert not gone


def there(stand_in: attach.StandIn) -> bool:
    if stand_in.path == "torch":  # a package that is not SGLang's
        return bool(re.search(r"^import torch$", source(stand_in.module), re.M))
    return exists(f"{stand_in.module}.{stand_in.path}")
