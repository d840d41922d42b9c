"""Writes a model of _models.py in a process that ends: ``python _write_model.py NAME DEVICE``.

A process that starts a server must not have used the GPU itself. Prints the two folders.
"""

import json
import sys

from _models import GEOMETRIES, folder

if __name__ == "__main__":
    from g4debug.cpu.models import tiny_models, write

    name, device = sys.argv[1:]
    if device == "cpu":
        made = tiny_models()
    else:
        made = write(GEOMETRIES[name], folder(name), device=device)
    print(json.dumps([str(path) for path in made]))
