"""Replays a dump, from its record to the result that is printed."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from g4debug.dumps import writing
from g4debug.findings.record import Finding, Tape, TrapRecord
from g4debug.findings.tape import Recording
from g4debug.replay import host, script, setting, verdict
from g4debug.replay.host import STOPPED
from g4debug.replay.setting import CannotReplay
from g4debug.replay.shrink import INTERRUPTED, Shown, Shrinking
from g4debug.replay.workload import BEHIND, IDLE, Workload
from g4debug.reporters.replay import Kept, Replayed, Scripted, Shrunk
from g4debug.settings import fix_switch

CONTENT = frozenset({"kv-integrity"})  # tracers of numbers that a model computes
MANY = 40  # names of arguments in a sentence
TRAILS = 4  # workloads that are tried as a script, the smallest first
EACH = 120.0  # seconds for one try
MORE_IDLE = 20  # idle rounds that a try may have behind those with which the finding came


def replayed(
    dump: Path,
    record: TrapRecord,
    trace: tuple[str, ...],
    seconds: float,
    folder: Path,
    progress: Callable[[int, int], None],
    shrink: Path | None = None,
    pages_only: bool = False,
    fixes: Mapping[str, bool] | None = None,
    releases: Sequence[str] = (),
    plain: Path | None = None,
    until: int = 0,
) -> Replayed:
    """trace: the tracers to arm, () for those that were armed there.

    shrink: the file that gets the dump of the fewest requests with which the finding comes.
    pages_only: nobody looks at what the model computes. fixes, releases: a finding is replayed
    once more with each of these fixes on or off, and on each of these releases of SGLang. plain:
    the file that gets the fewest requests as plain SGLang. until: the last step, as the server
    counted, that is replayed; 0 for all. After Ctrl-C it is the last step that was.
    """
    shrunk, tried, scripted, untried, table_of = None, [], None, "", ""
    try:
        on, recording = setting.recording_of(record)
        made = setting.setting_of(record, on, recording)
        if until and until <= on.first:
            raise CannotReplay(f"its tape begins with step {on.first + 1}")
        until = until - on.first if 0 < until < on.first + recording.steps else 0
        armed = trace or setting.tracers_of(record)
        if pages_only:
            if record.finding.check in CONTENT or CONTENT & set(trace):
                raise CannotReplay(f"{', '.join(sorted(CONTENT))} looks at what is computed")
            armed = tuple(name for name in armed if name not in CONTENT)
            made.notes.append("what the model computes is not looked at (--pages-only)")

        def told(steps: int) -> None:
            progress(steps, recording.steps)

        with host.started(dump, on, made, armed, folder, told, pages_only) as running:
            outcome = running.run(seconds, told, until=until)
            stopped = outcome.ended == STOPPED
            if stopped and outcome.recording is not None:
                # What was found in the last steps may not have been told.
                until = max(1, outcome.recording.steps - BEHIND)
            judged = verdict.judge(record, on, recording, outcome, until, made.elsewhere)
            if judged.states is not None and judged.states.differs:
                more = (*judged.more, *_not_carried(made, on))
                judged = dataclasses.replace(judged, more=more)
            if stopped and judged.found is None:
                why = outcome.error or INTERRUPTED
                more = (*judged.more, *([_further(pages_only)] if outcome.error else ()))
                judged = dataclasses.replace(
                    judged, code=verdict.NOTHING, text=f"{why}; {judged.text}", more=more
                )
            search = None
            if (shrink or plain) and judged.found is not None and not stopped:
                shrunk, search = _shrink(
                    running, judged.found, recording, seconds, shrink, progress
                )
                stopped = search.why == INTERRUPTED  # of all that would come behind it, too
                if stopped and plain is not None:
                    scripted = Scripted("", INTERRUPTED)
        if plain is not None and not stopped:
            scripted = _script(search, made, folder, plain, time.monotonic() + seconds)
            stopped = scripted.text == INTERRUPTED
        if fixes or releases:
            untried = _untried(judged, stopped)
        if judged.found is not None and (fixes or releases) and not untried:
            if not verdict.alike(record.finding, judged.found):
                table_of = judged.found.headline
            for name, other in _others(made, fixes or {}, releases):
                try:
                    host.made(other.release)
                    with host.started(dump, on, other, armed, folder, told, pages_only) as running:
                        ran = running.run(seconds, told, to_the_end=True)
                        text = _with_it(judged.found, ran, record, on.first)
                        if running.without:
                            text += f" (it has no {', '.join(running.without)})"
                except CannotReplay as e:
                    text = f"cannot be replayed, because {e}"
                except KeyboardInterrupt:
                    text = INTERRUPTED
                tried.append((name, text))
                if text == INTERRUPTED:
                    break
    except CannotReplay as e:
        return Replayed(verdict.NOTHING, f"cannot be replayed, because {e}")
    if pages_only and judged.code == verdict.OTHERWISE and judged.found is None:
        why = "With --pages-only only what goes wrong with pages is found; run it without."
        judged = dataclasses.replace(
            judged,
            code=verdict.NOTHING,
            text=verdict.UNTOLD,
            more=(*judged.more[:1], why),
        )
    states = judged.states
    return Replayed(
        code=judged.code,
        text=judged.text,
        more=judged.more,
        notes=tuple(made.notes),
        release=made.release,
        requests=len(recording.requests),
        steps=recording.steps,
        equal=-1 if states is None else states.equal,
        pages_compared=-1 if states is None else states.pages,
        differs=0 if states is None else states.differs,
        begins=on.begins,
        seconds=outcome.seconds,
        faults=made.environ.get("G4DEBUG_FAULTS", ""),
        shrunk=shrunk,
        tried=tuple(tried),
        table_of=table_of,
        untried=untried,
        script=scripted,
    )


def _untried(judged: verdict.Verdict, stopped: bool) -> str:
    """Why no finding is looked for with other fixes and releases, in words; '' if one is."""
    if stopped:
        return "this replay was stopped"
    if judged.states is not None and judged.states.differs:
        return "the states differ already with the fixes and the release that were there"
    if judged.found is None:
        return "nothing was found here, so there is nothing that could come or stay away"
    return ""


def _further(pages_only: bool) -> str:
    """What to do where time or memory were up."""
    ways = ["more --seconds", *([] if pages_only else ["--pages-only"]), "fewer tracers (--trace)"]
    return f"It comes further with {', with '.join(ways[:-1])}, and with {ways[-1]}."


def _not_carried(made: setting.Setting, on: Tape) -> Iterator[str]:
    """What may have decided there and is not on the tape, for whoever looks for it."""
    if on.ended:
        had = ", ".join(on.ended)
        yield f"Before its tape began anew, the server had what no tape carries: {had}."
    if made.left_out:
        names = ", ".join(made.left_out[:MANY])
        more = f" and {len(made.left_out) - MANY} more" if len(made.left_out) > MANY else ""
        yield f"Of the server's arguments these are not set here: {names}{more}."


def _others(
    made: setting.Setting, fixes: Mapping[str, bool], releases: Sequence[str]
) -> Iterator[tuple[str, setting.Setting]]:
    """Further settings to replay with: a name for each, and the setting."""
    for fix, on in fixes.items():
        environ = {**made.environ, fix_switch(fix): str(int(on))}
        name = f"fix {fix} {'on' if on else 'off'}"
        yield name, dataclasses.replace(made, environ=environ)
    for release in releases:
        yield f"SGLang {release}", dataclasses.replace(made, release=release)


def _with_it(found: Finding, outcome: host.Outcome, record: TrapRecord, first: int) -> str:
    """Whether a finding like this one comes. Pages and steps may be others. first: the steps before
    the tape."""
    like = verdict.first_alike(found, outcome.records)
    if like is not None:
        return f"it comes, in step {like.finding.location.step + first}"
    if outcome.records:
        return f"another finding comes: {outcome.records[0].finding.headline}"
    if outcome.ended == STOPPED:
        return f"cannot be told: {outcome.error}" if outcome.error else INTERRUPTED
    if outcome.ended != "tape" or outcome.recording is None:
        return f"cannot be told: it {verdict.end_of(outcome)}"
    steps = f"{outcome.recording.steps} steps"
    if outcome.works:
        return f"cannot be told: it did not come in {steps}, and requests still ran or waited then"
    blind = verdict.blind((found.check,), outcome.last)
    if record.faults:
        blind = verdict.FAULTY
    if blind:
        return f"cannot be told: it did not come in {steps}, but {blind}"
    return f"it does not come in {steps}, by which all requests had ended"


def _shrink(
    running: host.Host,
    found: Finding,
    recording: Recording,
    seconds: float,
    target: Path | None,
    progress: Callable[[int, int], None],
) -> tuple[Shrunk, Shrinking]:
    """Find the smallest workload with which a finding like this one comes, and write its dump."""
    begin, idle = time.monotonic(), IDLE

    def try_it(workload: Workload) -> Shown | None:
        nonlocal idle
        left = max(1.0, search.until - time.monotonic())
        outcome = running.run(min(left, EACH), lambda steps: None, workload, idle)
        same = verdict.first_alike(found, outcome.records)
        if same is None:
            return None
        # SGLang counts its pages in each idle round, so these take long.
        idle = min(idle, outcome.idle + MORE_IDLE)
        return Shown(outcome.reached, same)

    def told(tried: int, left: int) -> None:
        progress(-tried, left)

    search = Shrinking(recording, try_it, begin + seconds, told, running.drafts)
    best, record = search.run(), search.shown.record
    file, why = "", search.why
    if target is not None and record is not None:
        try:
            writing.write(writing.encode(record), target.absolute().parent, target.name)
            file = str(target)
        except OSError as e:
            why = f"{target} was not written: {e.strerror or e}"
    shrunk = Shrunk(
        before=len(recording.requests),
        tried=search.tried,
        seconds=time.monotonic() - begin,
        whole=search.whole,
        file=file,
        kept=() if best is None else tuple(_kept(best, recording)),
        why=why,
    )
    return shrunk, search


def _script(
    search: Shrinking | None, made: setting.Setting, folder: Path, target: Path, until: float
) -> Scripted:
    """Write the smallest workload as plain SGLang, if it shows the bug when it runs.

    until: of the monotonic clock. Whatever ends it, the verdict and the shrunk dump are there.
    """
    try:
        return _write_script(search, made, folder, target, until)
    except KeyboardInterrupt:
        return Scripted("", INTERRUPTED)
    except CannotReplay as e:
        return Scripted("", str(e))
    except OSError as e:
        return Scripted("", f"{e.filename or target}: {e.strerror or e}")


def _write_script(
    search: Shrinking | None, made: setting.Setting, folder: Path, target: Path, until: float
) -> Scripted:
    if search is None:
        return Scripted("", "nothing was found that a script could show")
    if search.best is None:
        return Scripted("", "the finding did not come here a second time")
    last, reason = (search.best, search.shown), ""
    trail = [*(step for step in search.trail if step[0] != search.best), last]
    best: script.Script | None = None
    # A smaller one may hang on how many tokens are accepted, which a model decides for itself, or
    # its answers are too short to be wrong.
    for workload, shown in trail[: -TRAILS - 1 : -1]:
        assert shown.record is not None
        try:
            found = script.made(
                shown.record, made, search.recording, workload, shown.reached, folder, until
            )
        except script.NoScript as e:
            reason = reason or str(e)
            continue
        if found.tells or best is None:
            best, smallest = found, (workload, shown)
        if found.tells:
            break
    if best is None:
        return Scripted("", reason)
    if not best.tells:
        workload, shown = smallest
        assert shown.record is not None
        with contextlib.suppress(script.NoScript):
            best = script.made(
                shown.record, made, search.recording, workload, shown.reached, folder, until, True
            )
    target.write_text(best.text)
    return Scripted(str(target), best.shows)


def _kept(best: Workload, recording: Recording) -> Iterator[Kept]:
    for index, r in best.requests(recording):
        after = best.after.get(index)
        when = f"round {r.round}" if after is None else after.text
        yield Kept(r.id, when, r.prompt, r.output, r.longest, r.how.name.lower())
