"""Collects what ``g4debug doctor`` reports. Only the probe, in its own process, imports SGLang."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from g4debug import __version__, discovery
from g4debug.cli._catalogue import armed, catalogue, opt_in
from g4debug.cli._common import one_line
from g4debug.faults.grammar import GrammarError, parse
from g4debug.hooking import targets
from g4debug.reporters.doctor import Diagnosis, Row
from g4debug.settings import Settings, SettingsError, fix_switch

GROUP = "sglang.srt.plugins"
NAME = "g4debug"
PROBE_SECONDS = 180
ONLY_VIEW = "only g4debug show and g4debug list can be used here: this Python has no SGLang"


def diagnose(environ: Mapping[str, str], canary: str) -> Diagnosis:
    """Look at everything. ``canary``: auto (where there is no GPU to share), 1 or 0."""
    d = Diagnosis()
    d.versions, d.gpus = _versions(), _gpus()
    settings = _settings(d, environ)
    installed = targets.sglang_version()
    if settings is not None:
        writes = installed is not None
        d.dumps = _dump_directory(d, settings) if writes else "none are written: no SGLang here"
    catalogue(d, settings)
    if installed is None:
        d.viewer = True
        if settings is not None and (settings.asked or settings.cpu):
            d.problems.append(
                "debugging is asked for, but this Python has no SGLang; run doctor with the "
                f"server's Python (this one: {sys.executable})"
            )
        d.unchecked = dict.fromkeys(("sites", "fixes", "canary"), "no SGLang here")
        d.conclude(ONLY_VIEW)
        return d
    if str(installed) not in targets.VERIFIED:
        verified = ", ".join(targets.VERIFIED)
        d.notes.append(f"SGLang {installed} is not verified with g4debug; verified: {verified}")
    _plugin(d, environ)
    _shadowed(d)
    if d.problems:
        d.unchecked = dict.fromkeys(("sites", "fixes", "canary"), "solve the above first")
    elif settings is not None:
        _probe(d, settings, environ, canary)
    d.conclude(_verdict(d, settings) if settings is not None else "")
    return d


def _versions() -> dict[str, str]:
    from g4debug.trapping.describe import versions

    found = versions()
    return {NAME: __version__, **{k: v for k, v in found.items() if k != NAME}}


def _gpus() -> list[str]:
    """Names and driver by nvidia-smi: no CUDA context is made beside a running server."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ["nvidia-smi does not answer"]
    if done.returncode:
        return [f"nvidia-smi: {one_line(done.stdout or done.stderr)}"]
    lines = [one_line(x) for x in done.stdout.splitlines() if x.strip()]
    counts = {x: lines.count(x) for x in lines}
    return [f"{n} x {x} (name, capability, driver)" for x, n in counts.items()]


def _settings(d: Diagnosis, environ: Mapping[str, str]) -> Settings | None:
    """The environment as the server would read it; None if it would refuse to start."""
    settings: Settings | None = None
    try:
        settings = Settings.from_environ(environ)
        parse(settings.faults)
    except GrammarError as e:
        d.problems.append(f"G4DEBUG_FAULTS: {e}")
        settings = None
    except SettingsError as e:
        d.problems.append(str(e))
    documented = {fix.switch for fix in _fixes()} - {""}
    for name in sorted(environ):
        ours = name.startswith(("G4DEBUG_", "SGLANG_TRTLLM_MHA_DEBUG", "SGLANG_PLUGINS"))
        if ours or name in documented:
            d.environment.append(Row(name, environ[name]))
    if settings is None:
        return None
    if settings.tracers and settings.mode == "contain":
        d.notes.append("G4DEBUG_MODE=contain: after a finding, that step's tokens are wrong")
    if settings.tracers and settings.mode == "log":
        d.notes.append("G4DEBUG_MODE=log: a finding is reported, the crash still happens")
    if settings.faults:
        d.notes.append(
            f"faults are injected, the server will be broken on purpose: {settings.faults}"
        )
    return settings


def _dump_directory(d: Diagnosis, settings: Settings) -> str:
    """Whether a dump could be written now. Leaves no file and makes no directory."""
    directory = settings.debug_dir
    if settings.max_dumps == 0:
        return "none are written: G4DEBUG_MAX_DUMPS=0"
    place = directory
    try:
        while not place.exists() and place != place.parent:
            place = place.parent
        with tempfile.TemporaryFile(dir=place):
            pass
        free = shutil.disk_usage(place).free
    except OSError as e:
        reason = e.strerror or str(e)
        d.problems.append(f"no dump can be written to {directory}: {reason} (as {_user()})")
        return f"{directory}: not writable: {reason}"
    needed = settings.max_dumps * settings.max_dump_mb << 20
    if free < needed:
        d.notes.append(
            f"{directory}: {free >> 20} MiB free; {settings.max_dumps} dumps may take up to "
            f"{needed >> 20} MiB"
        )
    there = "" if place == directory else ", will be created"
    return f"{directory}: writable{there}, {free / (1 << 30):.1f} GiB free"


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        return str(os.getuid())


def _fixes() -> list[Any]:
    names = discovery.names("fix")
    return [discovery.load("fix", name) for name in names]


def _plugin(d: Diagnosis, environ: Mapping[str, str]) -> None:
    """Would SGLang's plugin loader find g4debug, load it, and call it?"""
    found = [e for e in metadata.entry_points(group=GROUP) if e.name == NAME]
    owners = sorted({f"{e.dist.name} {e.dist.version}" for e in found if e.dist is not None})
    if not found:
        d.plugin.append(Row("entry point", "missing", f"no {NAME} in group {GROUP}"))
        d.problems.append(
            "SGLang does not see g4debug: it is not installed in this Python; "
            "run: pip install g4debug"
        )
    elif len(found) > 1:
        d.plugin.append(Row("entry point", "ambiguous", f"declared by {', '.join(owners)}"))
        d.problems.append(
            f"more than one distribution declares the plugin {NAME}: {', '.join(owners)}; "
            "uninstall the others"
        )
    else:
        _loadable(d, found[0], owners)
    allowed = environ.get("SGLANG_PLUGINS", "")
    names = [x.strip() for x in allowed.split(",") if x.strip()]
    if allowed and NAME not in names:
        d.plugin.append(Row("SGLANG_PLUGINS", "EXCLUDES g4debug", allowed))
        d.problems.insert(
            0,
            f"SGLANG_PLUGINS={allowed} keeps SGLang from loading g4debug; "
            f"add it (SGLANG_PLUGINS={','.join([*names, NAME])}) or unset it",
        )
    elif allowed:
        d.plugin.append(Row("SGLANG_PLUGINS", "allows g4debug", allowed))
    others = sorted({e.name for e in metadata.entry_points(group=GROUP)} - {NAME})
    if others:
        d.notes.append(f"other SGLang plugins are installed, too: {', '.join(others)}")


def _loadable(d: Diagnosis, entry: metadata.EntryPoint, owners: list[str]) -> None:
    try:
        entry.load()
    except Exception as e:  # whatever it is, SGLang would only log it
        reason = f"{type(e).__name__}: {one_line(str(e))}"
        d.plugin.append(Row("entry point", "FAILED", reason))
        d.problems.append(f"SGLang cannot load the plugin {entry.value}: {reason}")
        return
    d.plugin.append(Row("entry point", "seen", f"{entry.value}, by {', '.join(owners)}"))
    if entry.dist is not None and entry.dist.version != __version__:
        d.notes.append(
            f"installed as {entry.dist.version}, but the code is {__version__}; "
            "run: pip install --force-reinstall g4debug"
        )


def _shadowed(d: Diagnosis) -> None:
    """``python -m`` looks in the current directory first; a folder ``g4debug`` there (of dumps,
    say) hides an editable install, and SGLang would only log that."""
    spec = PathFinder.find_spec(NAME, [os.getcwd(), *sys.path])
    if spec is not None and spec.origin is None:
        folder = next(iter(spec.submodule_search_locations or []), NAME)
        d.problems.append(
            f"the folder {folder} hides the package g4debug from a server started in this "
            "directory; start it in another one"
        )


def _probe(d: Diagnosis, settings: Settings, environ: Mapping[str, str], canary: str) -> None:
    """Load the plugins for real, in another process, with every tracer armed."""
    environment = dict(environ)
    if not settings.tracers:
        environment["SGLANG_TRTLLM_MHA_DEBUG"] = "1"  # to prove that it would work
    with tempfile.TemporaryDirectory(prefix="g4debug-doctor-") as folder:
        out, log = Path(folder) / "facts.json", Path(folder) / "log"
        status = _run([str(out), canary], environment, log)
        if not out.is_file():
            said = log.read_text(errors="replace").strip().splitlines()
            last = one_line(said[-1])[:300] if said else "nothing was printed"
            ended = "took too long" if status is None else f"ended with status {status}"
            d.problems.append(f"loading SGLang's plugins {ended}: {last}")
            d.unchecked = dict.fromkeys(("sites", "fixes", "canary"), "loading SGLang failed")
            return
        facts = json.loads(out.read_text())
    _report(d, settings, facts)


def _run(arguments: list[str], environment: dict[str, str], log: Path) -> int | None:
    """The probe's exit status, None if it took too long; nothing of it is left behind."""
    line, ours = os.pipe()  # ours is closed when this process ends, whatever ends it
    command = [sys.executable, "-m", "g4debug.cli._probe", *arguments, str(line)]
    try:
        with log.open("wb") as sink:
            child = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[line],
            )
            try:
                return child.wait(timeout=PROBE_SECONDS)
            except subprocess.TimeoutExpired:
                return None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    finally:
        os.close(line)
        os.close(ours)


def _report(d: Diagnosis, settings: Settings, facts: Mapping[str, Any]) -> None:
    d.where = (
        "in the installed SGLang, as its server loads it"
        if facts["cuda"]
        else "in the installed SGLang on g4debug's CPU stand-ins: there is no CUDA here"
    )
    if facts["error"]:
        d.problems.append(facts["error"].removesuffix("; run: g4debug doctor"))
    elif not facts["registered"]:
        d.problems.append("SGLang loaded its plugins, but did not call g4debug")
    for site in facts["sites"]:
        owners = ", ".join(dict.fromkeys(site["owners"]))
        detail = {
            "wrapped": f"by {owners}",
            "found": f"NOT wrapped, needed by {owners}" if owners else "",
        }.get(site["state"], site["detail"])
        d.sites.append(Row(site["site"], site["state"], detail))
        if site["state"] == "missing" and not owners:
            d.notes.append(f"hook site {site['site']} is missing; nothing armed needs it")
    for name, text in facts["fixes"].items():
        state, _, why = text.partition(": ")
        d.fixes.append(Row(name, state, why))
        if settings.fixes.get(name) and state != "applied":
            switch = settings.forced_by.get(name, fix_switch(name))
            d.problems.append(f"{switch}=1 cannot be honoured: {text}")
        elif state == "target-missing":
            d.notes.append(f"fix {name} cannot be applied: {why}")
    for name, seen in facts["canary"].items():
        d.canary.append(Row(name, seen["state"], seen["detail"]))
        if seen["state"] == "FAILED":
            d.problems.append(f"the canary of tracer {name} failed: {seen['detail']}")
    if not facts["canary"]:
        why = "it takes GPU memory" if facts["cuda"] else "--no-canary"
        d.unchecked["canary"] = f"{why}; to fire it: g4debug doctor --canary"


def _verdict(d: Diagnosis, settings: Settings) -> str:
    if settings.tracers:
        verdict = f"ready: {', '.join(armed(settings))} armed, mode {settings.mode}"
    else:
        names = ", ".join(r.name for r in d.tracers if not opt_in(r.name))
        verdict = f"ready, nothing armed yet: SGLANG_TRTLLM_MHA_DEBUG=1 will arm {names}"
    return verdict + ("; FAULTS ARMED" if settings.faults else "")
