"""All that there is to say is in pyproject.toml, but for the folder that a wheel is built in.

setuptools builds in ``build/`` beside this file, leaves it there, and puts all that it finds there
into the next wheel: modules, too, that were renamed or removed since. So each build has a folder
of its own, which ends with it.
"""

import tempfile

from setuptools import setup

with tempfile.TemporaryDirectory(prefix="g4debug-build-") as folder:
    setup(options={"build": {"build_base": folder}})
