"""``run_module.py MODULE ...``: what ``python -m MODULE ...`` does, for a process of warm.py."""

import runpy
import sys

del sys.path[0], sys.argv[0]  # this folder, and this file
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
