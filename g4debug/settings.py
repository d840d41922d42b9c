"""Every environment variable of g4debug, typed, in one frozen dataclass.

Most users need only ``SGLANG_TRTLLM_MHA_DEBUG`` and ``SGLANG_TRTLLM_MHA_DEBUG_DIR``. All other
variables begin with ``G4DEBUG_``. An unknown variable, value or name is an error, because a debug
switch that is silently ignored is worse than none. This module imports neither torch nor sglang.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from g4debug import discovery

# The folder must not be called "g4debug": a process that is started in the temporary folder would
# import it as an empty package of that name, and SGLang would serve on with nothing armed.
DUMP_DIR = Path(tempfile.gettempdir()) / "g4debug-dumps"


def ours(directory: Path) -> Path:
    """``directory``. If we may not write there, its name with our user number behind it."""
    if directory.exists() and not os.access(directory, os.W_OK | os.X_OK):
        return directory.with_name(f"{directory.name}-{os.getuid()}")
    return directory


DEFAULT_DUMP_DIR = ours(DUMP_DIR)
MODES = ("raise", "contain", "log")
FIX_MODES = ("none", "needed", "all")
BOXES = ("shm", "dumps")
CORES = ("autopsy", "keep", "force", "off")
FIX_PREFIX = "G4DEBUG_FIX_"
WATCH = "watch"

_TRUE = ("1", "on", "true", "yes")
_FALSE = ("0", "off", "false", "no")


class SettingsError(Exception):
    """A variable is not understood or cannot be obeyed. The text says which one, and why."""


# How our variables begin, and how they are likely to be mistyped. SGLang has none that do so.
_OURS = ("G4DEBUG_", "G4_DEBUG", "SGLANG_TRTLLM_MHA_DEB", "SGLANG_TRTLLM_MHA_DBG")


def _flag(text: str, name: str) -> bool:
    lowered = text.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise SettingsError(f"{name}={text!r}: expected 1 or 0 (on/off, true/false, yes/no)")


def _debug(text: str, name: str) -> bool | str:
    if text.strip().lower() == WATCH:
        return WATCH
    try:
        return _flag(text, name)
    except SettingsError:
        raise SettingsError(
            f"{name}={text!r}: expected 1 or 0 (on/off, true/false, yes/no), or {WATCH}"
        ) from None


def _path(text: str, name: str) -> Path:
    return Path(text).expanduser()


def _number(low: int, high: int) -> Callable[[str, str], int]:
    def parse(text: str, name: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise SettingsError(f"{name}={text!r}: expected a whole number from {low} to {high}")
        return value

    return parse


def _mode(text: str, name: str) -> str:
    if text not in MODES:
        raise SettingsError(f"{name}={text!r}: expected one of {', '.join(MODES)}")
    return text


def _core(text: str, name: str) -> str:
    if text.strip() not in CORES:
        raise SettingsError(f"{name}={text!r}: expected one of {', '.join(CORES)}")
    return text.strip()


def _box(text: str, name: str) -> str:
    if text.strip() not in BOXES:
        raise SettingsError(f"{name}={text!r}: expected one of {', '.join(BOXES)}")
    return text.strip()


def _fix_mode(text: str, name: str) -> str:
    if text.strip() not in FIX_MODES:
        raise SettingsError(f"{name}={text!r}: expected one of {', '.join(FIX_MODES)}")
    return text.strip()


def _tracers(text: str, name: str) -> tuple[str, ...]:
    known = discovery.names("tracer")
    asked = discovery.named(text)
    if not asked:
        raise SettingsError(f"{name}={text!r}: names no tracer; valid: {', '.join(known)}")
    for tracer in asked:
        if tracer not in known:
            raise SettingsError(f"{name}: unknown tracer {tracer!r}; valid: {', '.join(known)}")
    return asked


def _name(text: str, name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", text):
        raise SettingsError(
            f"{name}={text!r}: expected at most 64 letters, digits, dots, dashes and underscores"
        )
    return text


def _text(text: str, name: str) -> str:
    return text


def _setting(env: str, parse: Callable[[str, str], Any], help: str, default: Any) -> Any:
    return field(default=default, metadata={"env": env, "parse": parse, "help": help})


@dataclass(frozen=True)
class Settings:
    """The settings from the environment. ``help`` texts are the table of docs/environment.md."""

    debug: bool | str = _setting(
        "SGLANG_TRTLLM_MHA_DEBUG",
        _debug,
        "1 arms every tracer that is not opt-in; watch arms only what may stay on for ever: the "
        "flight recorder with its tape, black box and hang watch, range checks of page tables and "
        "lists, and the pools' counts at idle. With watch, no finding stops the server",
        False,
    )
    debug_dir: Path = _setting(  # noqa: RUF009 - a Path is immutable
        "SGLANG_TRTLLM_MHA_DEBUG_DIR", _path, "the folder that dumps go to", DEFAULT_DUMP_DIR
    )
    trace: tuple[str, ...] = _setting(
        "G4DEBUG_TRACE", _tracers, "arm only these tracers (comma-separated)", ()
    )
    mode: str = _setting(
        "G4DEBUG_MODE",
        _mode,
        "raise: stop the server with the finding; contain: report it, hand the kernel a safe page "
        "table, and go on; log: only report it. With SGLANG_TRTLLM_MHA_DEBUG=watch it is contain, "
        "or log, and never raise",
        "raise",
    )
    not_run_on_this_release: bool = _setting(
        "G4DEBUG_NOT_RUN_ON_THIS_RELEASE",
        _flag,
        "1 lets tracers stop (raise) or correct (contain) a server that they were never run with: "
        "its SGLang release, kind of GPU, class of model, attention backend, draft, or parallelism "
        "and the like; without it, such a start is refused unless G4DEBUG_MODE=log",
        False,
    )
    fixes: str = _setting(
        "G4DEBUG_FIXES",
        _fix_mode,
        "which fixes are put in force. needed: fixes for the crashes and wrong results that this "
        "SGLang is known to have; all: performance paths and swa-ratio, too; none: nothing. The "
        "switch of a single fix wins over it",
        "needed",
    )
    faults: str = _setting(
        "G4DEBUG_FAULTS", _text, "faults to inject, for example page-oob=1*on", ""
    )
    max_dumps: int = _setting(
        "G4DEBUG_MAX_DUMPS",
        _number(0, 1000),
        "how many dumps one process may write; 0: none",
        8,
    )
    max_dump_mb: int = _setting(
        "G4DEBUG_MAX_DUMP_MB", _number(1, 64), "how large one dump may be, in MiB", 16
    )
    launch: str = _setting(
        "G4DEBUG_LAUNCH",
        _name,
        "a name for this launch of the server, the same on all of its nodes; by it, g4debug list "
        "groups the dumps. The server makes one up",
        "",
    )
    steps: int = _setting(
        "G4DEBUG_STEPS", _number(1, 100_000), "how many of the last steps a dump holds", 64
    )
    tape: int = _setting(
        "G4DEBUG_TAPE",
        _number(0, 48),
        "how much host memory the tape may take, in MiB: what a scheduler was given, so that "
        "g4debug replay can make its decisions again; 0: none",
        16,
    )
    hang_seconds: int = _setting(
        "G4DEBUG_HANG_SECONDS",
        _number(2, 86_400),  # an idle event loop may sleep for one second
        "a scheduler counts as hung after so many seconds without a step although it has work: a "
        "finding, which stops nothing. Where it stands within a step, SIGTERM leaves a dump from "
        "then on; by itself that is told then only where it is known to wait for its own device "
        "for far longer than such a step takes, and else at 80 % of --watchdog-timeout, after 300 "
        "s at most",
        20,
    )
    starved_steps: int = _setting(
        "G4DEBUG_STARVED_STEPS",
        _number(0, 1_000_000_000),
        "a request starves if it makes no progress for so many steps while others do, or for ten "
        "minutes while others overtake it: a finding, which stops nothing; 0: it is not looked for",
        5000,
    )
    core: str = _setting(
        "G4DEBUG_CORE",
        _core,
        "CUDA core dumps, which the flight recorder switches on unless you have, and unless the "
        "GPU's driver is older than 580. autopsy: what a core dump says goes into the dump, and "
        "the file is removed; keep: the file stays; force: as autopsy, with any driver, though an "
        "older one was never run and may write all of the device's memory and abort; off: none "
        "are switched on, and none is read",
        "autopsy",
    )
    black_box: str = _setting(
        "G4DEBUG_BLACK_BOX",
        _box,
        "where the black box of a scheduler lies. shm: in /dev/shm, which is memory, and is lost "
        "with a container that has its own; dumps: in the folder that dumps go to. A file there is "
        "written to the disk as it changes, and a step may have to wait for that disk",
        "shm",
    )
    leak_steps: int = _setting(
        "G4DEBUG_LEAK_STEPS",
        _number(0, 1_000_000),
        "pool-leak counts all pages after so many busy steps; 0: only when the server is idle",
        256,
    )
    yoco_eager_rows: int = _setting(
        "G4DEBUG_YOCO_EAGER_ROWS",
        _number(0, 1_000_000),
        "yoco-fast-prefill takes the place of a CUDA graph of a prefill where it saves at "
        "least so many rows; 0: never",
        2048,  # benchmarks/results/yoco_sweep_E2B_h200.csv: as fast at 2048, twice as fast at 4096
    )
    mm_encoder_percent: int = _setting(
        "G4DEBUG_MM_ENCODER_PERCENT",
        _number(1, 100),
        "how much of the device's memory one pass of the vision tower may take, in percent",
        5,
    )
    cpu: bool = _setting(
        "G4DEBUG_CPU",
        _flag,
        "1 runs SGLang without a GPU, with torch in place of CUDA kernels; not where CUDA is "
        "available",
        False,
    )
    switches: Mapping[str, bool] = field(default_factory=dict)  # fix id -> forced on or off
    forced_by: Mapping[str, str] = field(default_factory=dict)  # id -> the variable that did it

    @property
    def watch(self) -> bool:
        """True for ``SGLANG_TRTLLM_MHA_DEBUG=watch``: each tracer does only what costs little."""
        return self.debug == WATCH

    @property
    def tracers(self) -> tuple[str, ...]:
        """The names of the tracers to arm (opt-in tracers are left out later, by the plugin)."""
        if self.trace:
            return self.trace
        if self.watch:
            return discovery.watching()
        return discovery.names("tracer") if self.debug else ()

    @property
    def removes_cores(self) -> bool:
        """True if a CUDA core dump goes once its autopsy is in the dump."""
        return self.core in ("autopsy", "force")

    @property
    def takes_the_risk(self) -> bool:
        """True if a finding is only reported, or is wanted although it could be false."""
        return self.mode == "log" or self.not_run_on_this_release

    @property
    def asked(self) -> bool:
        """True if the user asked for something. If it cannot be done, the server must not start."""
        return bool(self.tracers or self.faults or any(self.switches.values()))

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read the environment. Raises SettingsError for anything that is not understood."""
        env = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        known: dict[str, dataclasses.Field[Any]] = {
            f.metadata["env"]: f for f in dataclasses.fields(cls) if f.metadata
        }
        variables = _fix_variables()
        switches: dict[str, bool] = {}
        forced_by: dict[str, str] = {}
        for name, text in env.items():
            if name in known:
                if text.strip():
                    values[known[name].name] = known[name].metadata["parse"](text, name)
            elif name in variables:
                if text.strip():
                    for fix in variables[name]:
                        other = forced_by.get(fix, name)
                        if switches.setdefault(fix, _flag(text, name)) != _flag(text, name):
                            raise SettingsError(
                                f"{name}={text} and {other}={env[other]} contradict each other: "
                                f"both switch fix {fix}; unset one"
                            )
                        forced_by[fix] = min(
                            name, other
                        )  # of two, show the one that begins with G4DEBUG_
            elif name.startswith(FIX_PREFIX):
                valid = sorted(s for s in variables if s.startswith(FIX_PREFIX))
                raise SettingsError(f"{name}: there is no such fix; valid: {', '.join(valid)}")
            elif name.upper().startswith(_OURS) or name.upper() == "G4DEBUG":
                valid = sorted(known)
                raise SettingsError(
                    f"{name}: unknown variable; valid: {', '.join(valid)}, {FIX_PREFIX}<FIX>"
                )
        if values.get("debug") == WATCH:
            _watch(values)
        return cls(**values, switches=switches, forced_by=forced_by)


def _watch(values: dict[str, Any]) -> None:
    """What ``watch`` means for the other settings. Raises SettingsError if one contradicts it."""
    switch = f"SGLANG_TRTLLM_MHA_DEBUG={WATCH}"
    if values.setdefault("mode", "contain") == "raise":
        raise SettingsError(
            f"G4DEBUG_MODE=raise and {switch} contradict each other: with {WATCH} no finding stops "
            "the server; unset one, or take G4DEBUG_MODE=log"
        )
    can = discovery.watching()
    for tracer in values.get("trace", ()):
        if tracer not in can:
            raise SettingsError(
                f"G4DEBUG_TRACE={tracer} and {switch} contradict each other: that tracer has no "
                f"part that {WATCH} arms; valid: {', '.join(can)}; or SGLANG_TRTLLM_MHA_DEBUG=1"
            )


def fix_switch(fix_id: str) -> str:
    """The kill switch of a fix: ``swa-state-swap`` -> ``G4DEBUG_FIX_SWA_STATE_SWAP``."""
    return FIX_PREFIX + fix_id.upper().replace("-", "_")


def _fix_variables() -> dict[str, list[str]]:
    """Variable -> ids of the fixes that it switches.

    Every fix has a variable G4DEBUG_FIX_<FIX>. Some also have one that their author chose.
    """
    variables: dict[str, list[str]] = {}
    for name in discovery.names("fix"):
        variables.setdefault(fix_switch(name), []).append(name)
        documented = discovery.load("fix", name).switch
        if documented:
            variables.setdefault(documented, []).append(name)
    return variables
