"""``python -m sglang.launch_server``, with a thread that publishes what the tracers checked.

``python repro/_healthy_server.py <flags of sglang.launch_server>`` does what that module does in
0.5.12.post1, and gives SGLang a function of our own for the scheduler's process.
"""

from __future__ import annotations

import os
import sys

from _run import end_with_the_script


def main() -> None:
    end_with_the_script()
    from _healthy import counts
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        launch_server(
            prepare_server_args(sys.argv[1:]),
            run_scheduler_process_func=counts.run_scheduler_process,
        )
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":  # spawned children import this module, too
    main()
