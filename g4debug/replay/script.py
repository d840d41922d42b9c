"""Writes a workload as a file of plain SGLang, and keeps it only if it shows the bug when it runs.

The file uses SGLang's own API and nothing of g4debug's. What lets it run without a GPU comes from
outside, by the environment of its process (:mod:`g4debug.cpu`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from g4debug import cpu
from g4debug.findings.record import Finding, Plain, TrapRecord
from g4debug.findings.tape import (
    LOGPROBS,
    UNCACHED,
    UNCACHED_HOST,
    Abort,
    Flush,
    Recording,
    Request,
)
from g4debug.replay import host, verdict
from g4debug.replay.parent import end_with_parent
from g4debug.replay.setting import Setting
from g4debug.replay.tokens import FIRST_WORD, Tokens
from g4debug.replay.workload import After, Event, Workload
from g4debug.settings import FIX_PREFIX

DRAFT = "speculative_draft_model_path"
DEBUG = "SGLANG_TRTLLM_MHA_DEBUG"
SECONDS = 400.0  # for one run
# SGLang's own checks of its pages that are off by default. Each release has some of them.
CHECKS = {
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK": "1",
}
OWN = ("SGLANG_ENABLE_DETERMINISTIC_INFERENCE",)  # SGLang sets it by an argument
RUNS = 2  # with the tracers, if an exact round became an event
# Begin lines of the script's output.
DIFFERS, PAGES, STANDS = "ANOTHER ANSWER", "WRONG PAGES: ", "STANDS: "
STANDS_FOR = 30  # seconds for a workload with which a server hangs; a toy needs two
WIDTH = 96
FIXED = {"disable_cuda_graph": True, "skip_server_warmup": True}


class NoScript(Exception):
    """The text says why there is none."""


@dataclass(frozen=True)
class Script:
    """A script that was run. shows: what it showed, a sentence. tells: SGLang says it, or the
    answers do."""

    text: str
    shows: str
    tells: bool = True


def made(
    record: TrapRecord,
    setting: Setting,
    recording: Recording,
    workload: Workload,
    reached: Sequence[Mapping[int, int]],
    folder: Path,
    until: float,
    looks: bool = False,
) -> Script:
    """The script for a workload with which this record's finding comes. Raises NoScript.

    until: of the monotonic clock; then no more is run.

    It runs once beside the tracers, which must find the same. Then it runs without anything of
    g4debug's but the CPU engine, for what SGLang itself says: as it is, and if that is nothing,
    with SGLang's own checks. looks: only a script that looks at SGLang's free lists and rows by
    itself, in each step.
    """
    if "G4DEBUG_FAULTS" in setting.environ:
        raise NoScript("the bug is a fault that g4debug injected, and plain SGLang has none")
    finding = record.finding
    events, guessed = in_words_of_the_api(workload.events(recording), reached)
    words = Tokens(
        dataclasses.replace(
            recording, requests={e.id: e for e, _ in events if isinstance(e, Request)}
        ),
        setting.model.vocab - FIRST_WORD,
    )

    def write(shows: str, compares: bool, checks: bool = False) -> str:
        more = CHECKS if checks else {}
        made = dataclasses.replace(setting, environ={**setting.environ, **more})
        return text(finding, made, events, words, shows, compares, looks)

    if looks:
        log = _run(write("", False), setting, (), folder, until).log
        found = [x.removeprefix(PAGES) for x in log.splitlines() if x.startswith(PAGES)]
        if not found:
            raise NoScript("neither a free list nor a row is wrong before a step")
        shows = f"what is wrong with SGLang's pages before a step: {found[0]}"
        return Script(write(shows, compares=False), shows)
    for _ in range(RUNS if guessed else 1):
        run = _run(write("", False), setting, (finding.check,), folder, until)
        same = verdict.first_alike(finding, host.dumps_in(run.dumps))
        if same is None:
            _ended(run)
            why = "in a plain engine the finding does not come"
            if guessed:
                why += f", because {guessed} must come in an exact round of the event loop"
            raise NoScript(f"{why}; it ended so: {run.end}")
        finding = same.finding  # with the names that requests have in the script
    if verdict.hung(finding):
        return _standing(
            _run(write("", False), setting, (), folder, until), lambda s: write(s, False)
        )
    run = _ended(_run(write("", True), setting, (), folder, until))
    said = run.error
    wrong = [line for line in run.log.splitlines() if line.startswith(DIFFERS)]
    if said:
        shows = f"SGLang's own error: {said}"
    elif wrong:
        shows = f"wrong answers: {wrong[0]}"
        return Script(write(shows, compares=True), shows)
    elif checked := _ended(_run(write("", False, checks=True), setting, (), folder, until)).error:
        shows = f"SGLang's own error with its own checks ({', '.join(CHECKS)}): {checked}"
        return Script(write(shows, False, checks=True), shows)
    else:
        shows = (
            "nothing that SGLang itself says, and right answers. g4debug's tracer "
            f"{finding.check} found it from outside, in this very script"
        )
    return Script(write(shows, compares=False), shows, tells=bool(said))


def _ended(run: Run) -> Run:
    """The run, if it came to its end: what another one does not say, it may say later. Raises
    NoScript."""
    if run.status is None and not run.error:
        more = "; give --seconds more" if run.seconds < SECONDS else ""
        raise NoScript(f"{run.end}, so what it shows is not known{more}")
    return run


def _standing(run: Run, write: Callable[[str], str]) -> Script:
    """The script of a server that hangs. Raises NoScript if it does not hang without us."""
    found = [x.removeprefix(STANDS) for x in run.log.splitlines() if x.startswith(STANDS)]
    if not found:
        _ended(run)
        raise NoScript(f"without g4debug the server does not stand; it ended so: {run.end}")
    shows = f"a server that lives, says nothing and serves nobody: {found[0]}"
    if len(found) > 1:
        shows += f", and {len(found) - 1} more like it"
    return Script(write(shows), shows)


# --- when a request is sent ----------------------------------------------------------------------


def in_words_of_the_api(
    events: Sequence[tuple[Event, After | None]], reached: Sequence[Mapping[int, int]]
) -> tuple[list[tuple[Event, After]], str]:
    """Each event with what it comes after, and which ones had to be guessed, in words.

    An exact round of the event loop cannot be said in SGLang's own API: the nearest event is taken.
    """
    found, guessed = [], []
    for place, (event, after) in enumerate(events):
        if after is None:
            whose = f"request {event.id}" if isinstance(event, Request) else "an abort or flush"
            guessed.append(whose)
            state = reached[place] if place < len(reached) else {}
            running = [(whose, n) for whose, n in state.items() if n != After.ENDED]
            after = After(0, After.ENDED)
            if running:
                longest, n = max(running, key=lambda item: item[1])
                after = After(longest, n) if n else After(0, After.TOGETHER)
        found.append((event, after))
    return found, ", ".join(guessed)


# --- the text ------------------------------------------------------------------------------------


def text(
    finding: Finding,
    setting: Setting,
    events: Sequence[tuple[Event, After]],
    tokens: Tokens,
    shows: str,
    compares: bool,
    looks: bool = False,
) -> str:
    """The script. shows: what it showed when it ran. compares: whether answers are compared. looks:
    whether it looks at free lists and rows."""
    pages, prompts = _pages([e for e, _ in events if isinstance(e, Request)], tokens)
    mine = {
        k: v for k, v in setting.environ.items() if not k.startswith("G4DEBUG_") and k not in OWN
    }
    environment = Environment(
        loader=PackageLoader("g4debug.replay"), undefined=StrictUndefined,
        trim_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    return environment.get_template("script.py.j2").render(
        doc=_doc(finding, setting, shows),
        environ=json.dumps(mine) if mine else "",
        arguments=_arguments(setting),
        pages={name: _wrapped(words) for name, words in pages.items()},
        prompts=prompts,
        lines=list(_lines(events)),
        aborts=any(isinstance(e, Abort) for e, _ in events),
        compares=compares,
        looks=looks,
        hangs=STANDS_FOR if verdict.hung(finding) else 0,
    )


def _doc(finding: Finding, setting: Setting, shows: str) -> str:
    words = [finding.headline.removeprefix("g4debug: ")]
    words += [f"Expected: {finding.expected}", f"Got: {finding.got}".split("\n")[0]]
    if not finding.cause.startswith("not known"):
        # Who has SGLang alone has no switch of ours.
        words += [line for line in finding.cause.split("\n") if "G4DEBUG_" not in line]
    words += [f"SGLang {setting.release}. It shows {shows}."]
    more = "model_path=MODEL" + (f" {DRAFT}=ASSISTANT" if setting.drafts else "")
    words += [
        "Run it: python THIS_FILE "
        + more
        + ", and more arguments of sglang.Engine in the same form. "
        f"{setting.model.needed} It was run with a toy model on a CPU (device=cpu dtype=float32), "
        "with stand-ins for the kernels that need a GPU."
    ]
    lines = [textwrap.fill(word, WIDTH) for word in words if word]
    return "\n\n".join(lines).replace("\\", "\\\\").replace('"""', "'''")


def _arguments(setting: Setting) -> dict[str, str]:
    values: dict[str, Plain] = {**setting.arguments, **FIXED}
    if setting.drafts:
        algorithm = setting.model.algorithm or "NEXTN"
        values = {"speculative_algorithm": algorithm, "speculative_num_steps": 3, **values}
    named = {k: v for k, v in values.items() if v is not None and v is not False}
    return {k: json.dumps(v) if isinstance(v, str) else repr(v) for k, v in named.items()}


def _pages(
    requests: Iterable[Request], tokens: Tokens
) -> tuple[dict[str, list[int]], dict[int, str]]:
    """The pages that several prompts have in common, by name, and each prompt in terms of them."""
    prompts = {r.id: tokens.prompt(r) for r in requests}
    size = tokens.recording.page
    names: dict[tuple[int, ...], str] = {}
    parts: dict[int, list[str]] = {}
    pages: dict[str, list[int]] = {}
    for who, words in prompts.items():
        parts[who] = []
        for at in range(0, len(words), size):
            page = words[at : at + size]
            name = names.setdefault(tuple(page), f"P{len(names) + 1}")
            pages[name] = page
            parts[who].append(name)
    return pages, {who: " + ".join(found) for who, found in parts.items()}


def _wrapped(words: Sequence[int]) -> str:
    return textwrap.indent(textwrap.fill(", ".join(map(str, words)), WIDTH - 4), "    ")


def _lines(events: Iterable[tuple[Event, After]]) -> Iterator[str]:
    for number, (event, after) in enumerate(events):
        if number:
            yield from _wait(after)
        if isinstance(event, Flush):
            yield "await run.engine.tokenizer_manager.flush_cache()"
        elif isinstance(event, Abort):
            yield f"run.abort({event.whose})"
        elif isinstance(event, Request):
            asked = event.asked_priority
            more = "" if asked is None else f", priority={asked}"
            if event.options & LOGPROBS:
                more += f", return_logprob=True, logprob_start_len={event.logprobs_from}"
            if event.options & UNCACHED:
                more += f', bootstrap_host="{UNCACHED_HOST}"'
            longest = event.longest if event.longest > 0 else event.output
            yield f"run.ask({event.id}, {longest}{more})"


def _wait(after: After) -> Iterator[str]:
    if after.tokens == After.TOGETHER:
        return
    if after.tokens == After.ENDED:
        yield f"await run.ended({after.whose or ''})"
    else:
        yield f"await run.tokens({after.whose}, {after.tokens})"


# --- a run ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """log: all that was printed. dumps: the folder of its dumps."""

    log: str
    status: int | None  # None: it did not end in time
    dumps: Path
    seconds: float = SECONDS  # that it had

    @property
    def error(self) -> str:
        """The error of which the scheduler died, as SGLang prints it; '' if it did not."""
        _, found, rest = self.log.partition("Traceback (most recent call last):")
        lines = re.findall(r"^(?:\[[^\]]*\] )?([A-Za-z_][\w.]*(?:Error|Exception)\b.*)", rest, re.M)
        return lines[0][:300] if found and lines and self.status != 0 else ""

    @property
    def end(self) -> str:
        if self.status is None:
            return f"it did not end in {self.seconds:.0f} s"
        return self.error or f"exit status {self.status}, and no finding"


def begun(command: list[str], environ: dict[str, str], log: int) -> subprocess.Popen[bytes]:
    """The process of a script, in a session of its own. log: a descriptor."""
    return subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=end_with_parent,  # a server that hangs would turn for ever
    )


def _run(text: str, setting: Setting, trace: Sequence[str], folder: Path, until: float) -> Run:
    """Run a script on the CPU engine. trace: the tracers to arm, () for none. Raises NoScript."""
    seconds = min(SECONDS, until - time.monotonic())
    if seconds < 1:
        raise NoScript("there was no time left to run it; give --seconds more")
    dumps = Path(tempfile.mkdtemp(prefix="script-", dir=folder))
    path, log = dumps / "script.py", dumps / "script.log"
    path.write_text(text)
    environ = host.environment(setting, tuple(trace), dumps)
    if not trace:
        environ = {k: v for k, v in environ.items() if not k.startswith(("G4DEBUG_", DEBUG))}
    without = {k: v for k, v in environ.items() if not k.startswith(FIX_PREFIX)}
    environ = cpu.environment(without | {"G4DEBUG_FIXES": "none"})
    target, *draft = setting.model.write()
    arguments = [f"model_path={target}", "device=cpu", "dtype=float32"]
    arguments += [f"{DRAFT}={folder}" for folder in draft if setting.drafts]
    with log.open("wb") as sink:
        command = [host.python(setting.release), str(path), *arguments]
        process = begun(command, environ, sink.fileno())
    status: int | None = None
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return Run(log.read_text(errors="replace"), status, dumps, seconds)
