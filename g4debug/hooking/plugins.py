"""The plugins of SGLang that are installed here, and which of them SGLang loads.

SGLang loads every entry point of the group ``sglang.srt.plugins``, unless ``SGLANG_PLUGINS`` lists
the names of those to load. SGLang says nothing at its usual log level about one that it leaves out,
and then runs no code of it. So a plugin that is left out cannot say so itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

GROUP = "sglang.srt.plugins"
NAME = "g4debug"
ALLOW_LIST = "SGLANG_PLUGINS"


@dataclass(frozen=True)
class Plugin:
    """One entry point. allowed: ``SGLANG_PLUGINS`` lets SGLang load it."""

    name: str
    value: str  # "meddler.hooks:register"
    distribution: str  # "meddler 0.1", '' if not known
    allowed: bool

    @property
    def package(self) -> str:
        """The top-level package or module that it lives in."""
        return self.value.partition(":")[0].partition(".")[0]

    def __str__(self) -> str:
        """In words: ``allowed: meddler.hooks:register, of meddler 0.1``."""
        of = f", of {self.distribution}" if self.distribution else ""
        return f"{'allowed' if self.allowed else 'left out'}: {self.value}{of}"


def allowed_by(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """The names that ``SGLANG_PLUGINS`` lists. None if it is not set or empty: all are loaded."""
    text = environ.get(ALLOW_LIST, "")
    return tuple(x.strip() for x in text.split(",") if x.strip()) if text else None


def left_out(environ: Mapping[str, str]) -> str:
    """Why SGLang does not load g4debug in such an environment, and what to do. '' if it does."""
    names = allowed_by(environ)
    if names is None or NAME in names:
        return ""
    return (
        f"{ALLOW_LIST}={environ[ALLOW_LIST]} keeps SGLang from loading g4debug; "
        f"add it ({ALLOW_LIST}={','.join([*names, NAME])}) or unset it"
    )


def installed(environ: Mapping[str, str]) -> tuple[Plugin, ...]:
    """Every plugin that is installed for SGLang, by name. Imports none of them."""
    names = allowed_by(environ)
    found = []
    for entry in metadata.entry_points(group=GROUP):
        of = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else ""
        found.append(Plugin(entry.name, entry.value, of, names is None or entry.name in names))
    return tuple(sorted(found, key=lambda p: (p.name, p.value)))
