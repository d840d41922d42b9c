"""Puts one server argument in force for a test, as the code asks for it in each release."""

from __future__ import annotations

from typing import Any

import releases


def put(monkeypatch: Any, name: str, value: Any) -> None:
    """Inside of ``real_layer.one_process``; ``monkeypatch`` puts it back."""
    from sglang.srt import server_args

    if not releases.has("sglang.srt.arg_groups.overrides") or not releases.has(
        "sglang.srt.arg_groups.model_overrides"
    ):
        monkeypatch.setattr(server_args.get_global_server_args(), name, value)
        return
    from sglang.srt.runtime_context import get_server_args

    # The arguments stay as they were typed; what SGLang has decided is kept beside them.
    args = get_server_args()
    decided = [*(getattr(args, "_resolved_overrides", None) or ()), ("test", {name: value})]
    monkeypatch.setattr(args, "_resolved_overrides", decided, raising=False)
