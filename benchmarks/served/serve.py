"""One server of a benchmark: ``python _serve.py DEVICE ENGINE_JSON``; see :mod:`_servers`."""

import json
import sys

if __name__ == "__main__":  # spawned children import this module, too
    from _servers import serve

    serve(sys.argv[1], json.loads(sys.argv[2]))
