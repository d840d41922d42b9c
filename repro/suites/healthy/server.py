"""A child that does the same as ``python -m sglang.launch_server`` in 0.5.12.post1."""

from __future__ import annotations

import os
from pathlib import Path


def main(device: str, result: Path, flags: list[str]) -> None:
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        launch_server(prepare_server_args(flags))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
