"""Collects what ``g4debug doctor`` reports.

SGLang is imported only by the probe (``_probe.py``), which runs in a process of its own.
"""

from __future__ import annotations

import getpass
import json
import os
import re
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

from g4debug import __version__, cli, discovery, plugin
from g4debug.backends import adapters
from g4debug.cli import one_line
from g4debug.combinations.refusal import WAYS
from g4debug.combinations.run import there
from g4debug.faults.grammar import GrammarError, parse
from g4debug.hooking import plugins, targets
from g4debug.hooking.neighbours import MEANS
from g4debug.hooking.plugins import GROUP, NAME
from g4debug.reporters.doctor import Diagnosis, Row
from g4debug.settings import Settings, SettingsError, fix_switch

PROBE_SECONDS = 180
SWITCHES = ("G4DEBUG_", "SGLANG_TRTLLM_MHA_DEBUG")
PROBED = ("sites", "shared", "fixes", "canary")  # the sections that the probe fills
NO_SGLANG = "this Python has no SGLang, so no server can be debugged here"


def diagnose(environ: Mapping[str, str], canary: str) -> Diagnosis:
    """Look at everything. ``canary``: 1, 0, or auto, which means 1 where there is no CUDA."""
    d = Diagnosis()
    d.versions, d.gpus = _versions(), _gpus()
    settings = _settings(d, environ)
    installed = targets.sglang_version()
    if settings is not None:
        writes = installed is not None
        d.dumps = _dump_directory(d, settings) if writes else "none are written, without SGLang"
    _catalogue(d, settings)
    if installed is None:
        d.viewer = True
        if settings is not None and (settings.asked or settings.cpu):
            d.problems.append(
                "the environment asks for debugging, but this Python has no SGLang; run doctor "
                f"with the server's Python (this one is {sys.executable})"
            )
        d.unchecked = dict.fromkeys(PROBED, "this Python has no SGLang")
        d.works = cli.without_sglang()
        d.conclude(f"not ready: {NO_SGLANG}; these commands work: {', '.join(d.works)}")
        return d
    _release(d, settings)
    _backends(d, settings or Settings())
    _models(d, settings or Settings())
    _plugin(d, environ)
    _shadowed(d)
    if d.problems:
        d.unchecked = dict.fromkeys(PROBED, "the problem at the top has to be solved first")
    elif settings is not None:
        _probe(d, settings, environ, canary)
    d.conclude(_verdict(d, settings) if settings is not None else "")
    return d


def _release(d: Diagnosis, settings: Settings | None) -> None:
    """Was each tracer that the environment arms, or that would be armed, run on this SGLang?"""
    asked = settings is not None and bool(settings.tracers)
    armed = settings if settings is not None and asked else Settings(debug=True)
    try:
        # Doctor's own probe takes the CPU engine where there is no GPU.
        cpu_engine = armed.cpu or not d.gpus
        gpu = "" if cpu_engine else _kind(d.gpus)
        not_run = plugin.refuse_if_not_run(armed, plugin.chosen(armed), cpu_engine, gpu)
    except SettingsError as e:
        (d.problems if asked else d.notes).append(str(e))
        return
    if not_run:
        d.notes.append(
            f"SGLang {targets.sglang_version()} was never run here with {', '.join(not_run)}; "
            f"releases that were: {', '.join(targets.RUN)}; GPUs: {', '.join(targets.GPUS_RUN)}"
        )


def _versions() -> dict[str, str]:
    from g4debug.trapping.describe import versions

    found = versions()
    return {NAME: __version__, **{k: v for k, v in found.items() if k != NAME}}


def _gpus() -> list[str]:
    """The GPUs and their driver, asked of nvidia-smi.

    torch would make a CUDA context, which takes memory from a server that may be running.
    """
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


def _kind(gpus: list[str]) -> str:
    """The kind of the first GPU, from its line in :func:`_gpus`; '' if it says none."""
    found = re.search(r", (\d+)\.(\d), ", gpus[0])
    return f"sm{found[1]}{found[2]}" if found else ""


def _settings(d: Diagnosis, environ: Mapping[str, str]) -> Settings | None:
    """The environment as the server would read it; None if the server would not start with it."""
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
    if settings.watch:
        d.notes.append(
            "with SGLANG_TRTLLM_MHA_DEBUG=watch no finding stops the server, and only what is "
            "listed as armed is looked at: no page is known to be another's, free or stale. "
            "SGLANG_TRTLLM_MHA_DEBUG=1 looks at all of it"
        )
    elif settings.tracers and settings.mode == "contain":
        d.notes.append(
            "with G4DEBUG_MODE=contain the server goes on after a finding, and the tokens of that "
            "step are wrong"
        )
    if settings.tracers and settings.mode == "log":
        d.notes.append("with G4DEBUG_MODE=log a finding is only reported: the crash still happens")
    if settings.faults:
        d.notes.append(f"G4DEBUG_FAULTS breaks this server on purpose: {settings.faults}")
    return settings


def _dump_directory(d: Diagnosis, settings: Settings) -> str:
    """Whether a dump could be written now. This leaves no file and makes no directory."""
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
        d.problems.append(
            f"no dump can be written to {directory}: {reason} (as the user {_user()})"
        )
        return f"{directory}: not writable: {reason}"
    needed = settings.max_dumps * settings.max_dump_mb << 20
    if free < needed:
        d.notes.append(
            f"{directory} has {free >> 20} MiB free, but {settings.max_dumps} dumps may take up "
            f"to {needed >> 20} MiB"
        )
    there = "" if place == directory else ", will be created when it is needed"
    return f"{directory}: writable{there}, {free / (1 << 30):.1f} GiB free"


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        return str(os.getuid())


def _fixes() -> list[Any]:
    names = discovery.names("fix")
    return [discovery.load("fix", name) for name in names]


def _catalogue(d: Diagnosis, settings: Settings | None) -> None:
    """Every tracer, and whether the environment arms it; and the faults that it injects."""
    settings = settings or Settings()
    for name in discovery.names("tracer"):
        tracer = _declared("tracer", name)
        state = "opt-in" if _opt_in(name) else "off"
        if name in _armed(settings):
            state = f"armed ({settings.mode})"
            if settings.watch:
                tracer, state = discovery.load_watch(name), f"armed (watch, {settings.mode})"
        d.tracers.append(Row(name, state, getattr(tracer, "title", "")))
    injected = parse(settings.faults).chains
    for name in discovery.names("fault"):
        fault = _declared("fault", name)
        catchers = tuple(getattr(fault, "caught_by", ()))
        caught = f"caught by {', '.join(catchers)}" if catchers else "no tracer may report it"
        what = f"{fault.title}; {caught}" if fault else ""
        if name in injected:  # the others are listed by g4debug faults
            d.faults.append(Row(name, "injected", what))
        missed = catchers and not set(catchers) & set(_armed(settings))
        if name in injected and settings.tracers and missed:
            d.notes.append(
                f"the fault {name} is injected, but no tracer that catches it is armed; "
                f"it is caught by {', '.join(catchers)}"
            )


def _backends(d: Diagnosis, settings: Settings) -> None:
    """Whether page-table would judge what each attention backend hands to its kernels."""
    if targets.sglang_version() is None:
        return
    on_cpu = settings.cpu or not d.gpus
    for adapter in adapters():
        if adapter.is_judged(settings, on_cpu):
            told = ", ".join(adapter.phases).replace("draft", "and the draft of FROZEN_KV_MTP")
            d.backends.append(Row(adapter.name, "judged", told))
        else:
            why = (
                f"too little of it was run on a GPU with SGLang {targets.sglang_version()}. "
                "G4DEBUG_MODE=log judges it and only reports; G4DEBUG_NOT_RUN_ON_THIS_RELEASE=1 "
                "judges it in every mode"
            )
            d.backends.append(Row(adapter.name, "not judged", why))


def _models(d: Diagnosis, settings: Settings) -> None:
    """With which classes of models, backends and drafts g4debug was run here.

    What a server runs is known in its scheduler only, which judges it by the same table.
    """
    release, on_cpu = str(targets.sglang_version()), settings.cpu or not d.gpus
    kind = "" if on_cpu else _kind(d.gpus)
    # All runs on a GPU were on these kinds.
    for run in there(release, on_cpu) if kind in ("", *targets.GPUS_RUN) else ():
        d.models.append(Row(run.models, "run", f"{run.attention}, {run.window}: {run.with_what}"))
    state = "judged" if settings.takes_the_risk else "refused"
    why = "" if state == "judged" else f"by the server's scheduler at its start. {WAYS}"
    d.models.append(Row("any other", state, why))


def _armed(settings: Settings) -> tuple[str, ...]:
    """The tracers that the server will arm. An opt-in tracer is armed only if it is named."""
    return tuple(n for n in settings.tracers if settings.trace or not _opt_in(n))


def _opt_in(tracer: str) -> bool:
    return bool(getattr(_declared("tracer", tracer), "opt_in", False))


def _declared(noun: discovery.Noun, name: str) -> Any:
    """The declaration of an item, None if it cannot be imported here (a laptop has no triton)."""
    try:
        return discovery.load(noun, name)
    except ImportError:
        return None


def _plugin(d: Diagnosis, environ: Mapping[str, str]) -> None:
    """Would SGLang's plugin loader find g4debug, load it, and call it?"""
    found = [e for e in metadata.entry_points(group=GROUP) if e.name == NAME]
    owners = sorted({f"{e.dist.name} {e.dist.version}" for e in found if e.dist is not None})
    if not found:
        d.plugin.append(Row("entry point", "missing", f"no {NAME} in group {GROUP}"))
        d.problems.append(
            "SGLang does not see g4debug, because it is not installed in this Python; "
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
    problem = not_loaded(environ)
    if problem:
        d.problems.insert(0, problem)
    if plugins.allowed_by(environ) is not None:
        state = "EXCLUDES g4debug" if problem else "allows g4debug"
        d.plugin.append(Row(plugins.ALLOW_LIST, state, environ[plugins.ALLOW_LIST]))
    others = [p for p in plugins.installed(environ) if p.name != NAME]
    for other in others:
        state, _, what = str(other).partition(": ")
        d.plugin.append(Row(other.name, state, what))
    if others:
        names = ", ".join(dict.fromkeys(p.name for p in others))
        d.notes.append(f"other plugins for SGLang are also installed: {names}")


def not_loaded(environ: Mapping[str, str]) -> str:
    """Why SGLang does not load g4debug in such an environment, '' if it does.

    ``environ`` may come from another process. A server whose ``SGLANG_PLUGINS`` leaves g4debug out
    runs no code of ours, so nothing but this can say that its debug switches do nothing.
    """
    problem = plugins.left_out(environ)
    asked = [name for name in sorted(environ) if name.startswith(SWITCHES)]
    if problem and asked:
        problem += (
            f"; until then {', '.join(asked)} {'do' if len(asked) > 1 else 'does'} nothing, and no "
            "line in the server's log says so"
        )
    return problem


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
            f"the installed version is {entry.dist.version}, but the code is {__version__}; "
            "run: pip install --force-reinstall g4debug"
        )


def _shadowed(d: Diagnosis) -> None:
    """Would a folder ``g4debug`` in the current directory (of dumps, say) hide the package?

    ``python -m`` looks in that directory first. Such a folder hides an editable install that was
    made by an older g4debug, and SGLang would only log it.
    """
    spec = PathFinder.find_spec(NAME, [os.getcwd(), *sys.path])
    if spec is not None and spec.origin is None:
        folder = next(iter(spec.submodule_search_locations or []), NAME)
        d.problems.append(
            f"the folder {folder} hides the package g4debug from a server started in this "
            "directory; start it in another one"
        )


def _probe(d: Diagnosis, settings: Settings, environ: Mapping[str, str], canary: str) -> None:
    """Load SGLang's plugins in another process, with every tracer armed."""
    environment = {**environ, "G4DEBUG_NOT_RUN_ON_THIS_RELEASE": "1"}  # _release has told of it
    if not settings.tracers:
        environment["SGLANG_TRTLLM_MHA_DEBUG"] = "1"  # to prove that it would work
    with tempfile.TemporaryDirectory(prefix="g4debug-doctor-") as folder:
        out, log = Path(folder) / "facts.json", Path(folder) / "log"
        status = _run([str(out), canary], environment, log)
        if not out.is_file():
            said = log.read_text(errors="replace").strip().splitlines()
            last = one_line(said[-1])[:300] if said else "it printed nothing"
            ended = (
                f"took longer than {PROBE_SECONDS} s"
                if status is None
                else f"ended with status {status}"
            )
            d.problems.append(f"loading SGLang's plugins {ended}: {last}")
            d.unchecked = dict.fromkeys(PROBED, "loading SGLang failed")
            return
        facts = json.loads(out.read_text())
    _report(d, settings, facts)


def _run(arguments: list[str], environment: dict[str, str], log: Path) -> int | None:
    """Run the probe. Returns its exit status, or None if it took too long. None of it is left."""
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
        "as a server of the installed SGLang loads them"
        if facts["cuda"]
        else "in the installed SGLang on g4debug's CPU engine, because there is no CUDA here"
    )
    if facts["error"]:
        d.problems.append(facts["error"].removesuffix("; run: g4debug doctor"))
    elif not facts["registered"]:
        d.problems.append("SGLang loaded its plugins, but did not call g4debug")
    for site in facts["sites"]:
        owners = ", ".join(dict.fromkeys(site["owners"]))
        detail = {
            "wrapped": f"by {owners}",
            "found": f"NOT wrapped, although {owners} needs it" if owners else "",
        }.get(site["state"], site["detail"])
        d.sites.append(Row(site["site"], site["state"], detail))
        if site["state"] == "missing" and not owners:
            d.notes.append(
                f"the hook site {site['site']} is missing, but nothing that is on needs it"
            )
    outside: dict[str, list[str]] = {}
    for other in facts["neighbours"]:
        what = f"{other['who']}: {other['function']} {MEANS[other['side']]}"
        d.shared.append(Row(other["site"], other["side"], what))
        if other["side"] == "outside":
            outside.setdefault(other["who"], []).append(other["site"])
    for who, shared in outside.items():
        d.notes.append(
            f"{who} wraps g4debug's hooks at {', '.join(dict.fromkeys(shared))}: its changes "
            "there are not checked"
        )
    for name, text in facts["fixes"].items():
        state, _, why = text.partition(": ")
        d.fixes.append(Row(name, state, why))
        if settings.switches.get(name) and state != "applied":
            switch = settings.forced_by.get(name, fix_switch(name))
            d.problems.append(f"{switch}=1 cannot be honoured: {text}")
        elif state == "target-missing":
            d.notes.append(f"the fix {name} cannot be applied: {why}")
    for name, seen in facts["canary"].items():
        d.canary.append(Row(name, seen["state"], seen["detail"]))
        if seen["state"] == "FAILED":
            d.problems.append(f"the canary of tracer {name} failed: {seen['detail']}")
    if not facts["canary"]:
        why = (
            "it takes GPU memory, so it has to be asked for"
            if facts["cuda"]
            else "--no-canary was given"
        )
        d.unchecked["canary"] = f"{why}; to fire the canaries, run: g4debug doctor --canary"


def _verdict(d: Diagnosis, settings: Settings) -> str:
    if settings.tracers:
        names = ", ".join(_armed(settings))
        part = "what watch has of " if settings.watch else ""
        verdict = f"ready: a server will arm {part}{names} in mode {settings.mode}"
    else:
        names = ", ".join(r.name for r in d.tracers if not _opt_in(r.name))
        verdict = f"ready, but nothing is armed: SGLANG_TRTLLM_MHA_DEBUG=1 would arm {names}"
    return verdict + ("; FAULTS ARE INJECTED" if settings.faults else "")
