"""All that there is to say is in pyproject.toml, but for three things.

setuptools builds in ``build/`` beside this file, leaves it there, and puts all that it finds there
into the next wheel: modules, too, that were renamed or removed since. So each build has a folder
of its own, which ends with it.

README's links lead to other files of the repository. On a package index these are not there: so its
long description links to the address of ``[project.urls]``, or, as long as there is none, has the
links' words without the links.

The source archive has the links in g4debug (LINKS) as links, not as copies.
"""

import os
import re
import shutil
import tempfile
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.sdist import sdist

LINKS = {
    "g4debug/fixes": "../fixes",
    "g4debug/TRIAGE.md": "../TRIAGE.md",
    "g4debug/triage/cases": "../../docs/cases",
}
RELATIVE = re.compile(r"(!?)\[([^\[\]]*)\]\((?!\w+:|#)([^)]*)\)")


def long_description(readme: str, source: str, version: str) -> str:
    """README for a package index. source: the repository's address, or ''."""

    def link(found: re.Match[str]) -> str:
        picture, text, target = found.groups()
        if not source:
            return "" if picture else text
        folder = "raw" if picture else "blob"
        return f"{picture}[{text}]({source}/{folder}/v{version}/{target})"

    return RELATIVE.sub(link, readme)


class Sdist(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        for name, target in LINKS.items():
            copy = Path(base_dir) / name
            if copy.is_dir():
                shutil.rmtree(copy)
            else:
                copy.unlink(missing_ok=True)
            os.symlink(target, copy)


def main() -> None:
    here = Path(__file__).parent
    project = tomllib.loads((here / "pyproject.toml").read_text("utf-8"))["project"]
    found = re.search(r'^__version__ = "(.+)"$', (here / "g4debug/__init__.py").read_text(), re.M)
    assert found
    source = project.get("urls", {}).get("Source", "").rstrip("/")
    with tempfile.TemporaryDirectory(prefix="g4debug-build-") as folder:
        setup(
            options={"build": {"build_base": folder}},
            cmdclass={"sdist": Sdist},
            long_description=long_description(
                (here / "README.md").read_text("utf-8"), source, found[1]
            ),
            long_description_content_type="text/markdown",
        )


if __name__ == "__main__":  # a build runs this file as a script; the tests import it
    main()
