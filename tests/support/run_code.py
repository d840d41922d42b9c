"""``run_code.py OUT CODE``: run Python code with its standard output in the file OUT.

Started by warm.py, which has one log for both streams. It ends at once after the code, because
Triton's bindings have much to say about an interpreter that ends with them imported.
"""

import os
import sys
import traceback

out, code = sys.argv[1:]
fd = os.open(out, os.O_WRONLY | os.O_CREAT, 0o600)
os.dup2(fd, 1)
os.close(fd)
status = 0
try:
    exec(code, {"__name__": "__main__"})
except SystemExit as e:
    status = e.code if isinstance(e.code, int) else int(e.code is not None)
    if isinstance(e.code, str):
        print(e.code, file=sys.stderr)
except BaseException:
    traceback.print_exc()
    status = 1
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)
