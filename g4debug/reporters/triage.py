"""The verdict of ``g4debug triage``, on one screen."""

from __future__ import annotations

import re
from typing import IO, Any

from rich.console import Console
from rich.text import Text

from g4debug.dumps import calling
from g4debug.findings.names import clean
from g4debug.reporters import json
from g4debug.reporters.text import hang
from g4debug.triage.entry import Entry, entries
from g4debug.triage.lookup import Hit
from g4debug.triage.patterns import Stage
from g4debug.triage.verdict import Verdict

LONGEST = 240  # characters of a line of the log
COLLECT = (
    "No entry explains this, so nothing is blamed. To find out more: g4debug doctor, beside that "
    "server, says whether g4debug would start there; SGLANG_TRTLLM_MHA_DEBUG=watch stops no "
    "server, and leaves a dump when it ends again. What a report needs is in the file that "
    "--bundle OUT.tar writes; it asks first."
)
NOTHING = (
    "Not known: nothing in it ends or slows a server, as far as triage knows. If the log ends "
    "before the server did, give the whole log (kubectl logs --previous). If the server lives and "
    "serves nobody: g4debug triage 8. If answers are wrong: TRIAGE.md, 'Answers are wrong'."
)
FOREIGN = (
    "This is no log of SGLang, as far as triage can see: no line has SGLang's form, and none names "
    "it. g4debug is for SGLang, so nothing is blamed. If it is one, give the whole of it, as the "
    "server wrote it."
)
WORDS = (
    "No entry has these words. Give a shorter piece of the line, without numbers and names, or the "
    "whole log: g4debug triage LOG finds the first cause in it."
)
STATES = {"by release": "yellow", "in force": "green", "applies": "yellow", "off": "bold red"}


def render(found: Verdict, console: Console) -> None:
    """Print the verdict: first cause, facts, entry, fixes, dumps, next command."""
    _first(found, console)
    if found.entry is not None:
        _entry(found.entry, console)
        if found.also:
            said = ", ".join(f"{calling.program()} triage {n}" for n in found.also)
            _said(console, "See also", said)
    elif found.state == "elsewhere":
        _said(console, "It is", "known, and no matter of g4debug. " + found.advice, "bold")
    elif found.state == "several":
        one = len(found.hits) == 1
        said = "an entry has these words" if one else "entries have these words"
        said += f"; {calling.program()} triage N prints {'it' if one else 'one'}:"
        _said(console, "PERHAPS" if one else "SEVERAL", said, "bold")
        for hit in found.hits:
            _hit(hit, console)
        if found.more:
            _said(console, "", f"and {found.more} more: give more words, or a whole line")
    elif found.asked and found.state == "nothing":
        _said(console, "NOTHING", WORDS, "bold")
    elif found.state == "unknown":
        _said(console, "NOT KNOWN", found.why or COLLECT, "bold yellow")
    elif found.state == "foreign":
        _said(console, "NOT SGLANG", FOREIGN, "bold yellow")
    else:
        _said(console, "NOTHING", NOTHING, "bold")
    if found.errors and (found.first is None or found.first.stage > Stage.ENDED):
        line, text = found.error
        said = f"speak of errors in a form that triage does not know; the first is line {line}:"
        _said(console, "But", f"{found.errors:,} of its lines {said} {text[:LONGEST]}")
    for mark in found.survived[:3]:
        said = f"line {mark.line} is no cause: the server served on (line {found.served}):"
        _said(console, "Survived", f"{said} {mark.text[:LONGEST]}")
    if len(found.survived) > 3:
        _said(console, "Survived", f"and {len(found.survived) - 3} more such lines")
    for mark in found.neighbours[:3]:
        said = f"line {mark.line} is about another process, or container, and not the server's:"
        _said(console, "Beside", f"{said} {mark.text[:LONGEST]}")
    if found.stacks[0]:
        first, last = found.stacks
        said = f"SGLang's own (py-spy's) begin in lines {first} to {last}"
        _said(console, "Stacks", f"{said}: what each scheduler was doing")
    for fix in found.fixes:
        style = STATES.get(fix.state, "dim")
        hang(console, Text(f"{clean(fix.state)}: {clean(fix.why)}", style), f"  fix {fix.id}  ", 6)
    for dump in found.dumps[:3]:
        _said(console, "Dump", f"{dump.path}  {dump.head.headline}")
    if len(found.dumps) > 3:
        _said(console, "Dump", f"and {len(found.dumps) - 3} more of that time: g4debug list")
    for core in found.cores[:3]:
        _said(console, "Core", f"{core}; {calling.program()} autopsy {core}")
    for name in found.absent[:1]:
        said = f"{name} is not on this machine: go to the server's, or kubectl cp POD:{name} ."
        _said(console, "Dump", said)
    for line, what in found.earlier:
        _said(console, "Earlier", f"a start at line {line} ended, too: {what[:80]}")
    for line, what in found.later:
        _said(console, "Later", f"another start at line {line}: {what}")
    if found.next_command:
        console.print(Text(f"NEXT  {clean(found.next_command)}", "bold cyan"), soft_wrap=True)


def _hit(hit: Hit, console: Console) -> None:
    """An entry that has the words, and where they must stand."""
    where = f"; only {hit.where}" if hit.where else ""
    if not hit.entry:
        _said(console, "", f"no matter of g4debug: {hit.text}{where}. {hit.advice}")
        return
    title = entries()[hit.entry].title
    said = f": {hit.text}{where}" if hit.text != title else where
    _said(console, "", f"{hit.entry}. {title}{said}")


def _first(found: Verdict, console: Console) -> None:
    mark = found.first
    if found.asked:
        return
    if mark is None:
        if found.read:
            console.print(Text(f"{found.read:,} lines were read.", "dim"))
        return
    when = f", {mark.at}" if mark.at else ""
    rank = f", {mark.rank}" if mark.rank else ""
    hang(console, Text(clean(mark.text[:LONGEST]), "bold"), f"{mark.line}: ")
    facts = f"This came first, in line {mark.line} of {found.read}{when}{rank}"
    if mark.frame:
        facts += f"; raised in {mark.frame[:LONGEST]}"
    if found.after > 0:
        more = "1 more error line follows" if found.after == 1 else ""
        facts += f". {more or f'{found.after} more error lines follow'} from it"
        facts += f" ({', '.join(found.ranks)})" if found.ranks else ""
    console.print(Text(clean(facts) + ".", "dim"))
    server = found.server
    here = f"; taken for {server.installed}, which is installed here (--here)"
    unsaid = "its SGLang release is not in the log"
    unsaid += f" ({server.bounds}, by its form)" if server.bounds else ""
    unsaid += here if server.installed else ""
    parts = [f"SGLang {server.release}" if server.release else unsaid]
    parts += [f"{name} {value}" for name, value in server.arguments.items()]
    parts.append(f"g4debug armed: {server.armed}" if server.armed else "no g4debug in it")
    console.print(Text(clean("Server: " + "; ".join(parts)) + ".", "dim"))
    if server.drill:
        _said(
            console, "DRILL", "faults were injected in this server (G4DEBUG_FAULTS)", "bold yellow"
        )


def _entry(entry: Entry, console: Console) -> None:
    console.print()
    console.print(Text(f"{entry.number}. {entry.title}", "bold"))
    for name, said in (
        ("You see", entry.sees),
        ("Run this", entry.runs),
        ("It means", entry.means),
        ("Helps", entry.helps),
        ("Releases", entry.releases),
    ):
        prose, *blocks = re.split(r"```\n?", said)
        if prose.strip():
            _said(console, name, prose)
        else:
            console.print(Text(f"{name}:", "bold"))
        for i, block in enumerate(blocks):
            if i % 2:
                _said(console, "", block)
            else:
                for line in block.rstrip().splitlines():
                    console.print(Text(f"    {line}", "cyan"), soft_wrap=True)
    _said(console, "More", f"{calling.program()} triage {entry.number} --case")


def _said(console: Console, name: str, said: str, style: str = "") -> None:
    text = re.sub(r"\*([^*]+)\*", r"\1", " ".join(said.split())).replace("`", "")
    if text:
        hang(console, Text(clean(text), style), Text(f"{name:<9} ", "bold"), 10)


def render_json(found: Verdict, stream: IO[str]) -> None:
    """The same as JSON."""
    mark, entry = found.first, found.entry
    value: dict[str, Any] = {
        "state": found.state,
        "entry": entry and entry.number,
        "title": entry and entry.title,
        "also": list(found.also),
        "advice": found.advice or None,
        "first": mark
        and {
            "line": mark.line,
            "time": mark.at and mark.at.isoformat(),
            "rank": mark.rank,
            "text": mark.text,
            "raised_in": mark.frame,
            "stage": mark.stage.name.lower(),
            "check": mark.kind and mark.kind.check,
            "kind": mark.kind and mark.kind.name,
        },
        "lines_read": found.read,
        "errors_not_known": found.errors,
        "followed_by": found.after,
        "ranks": list(found.ranks),
        "server": {
            "release": found.server.release or None,
            "release_by_form": found.server.bounds or None,
            "release_taken": found.server.known or None,
            "arguments": found.server.arguments,
            "armed": found.server.armed or None,
            "fixes_in_force": list(found.server.fixes),
            "faults_injected": found.server.drill,
        },
        "launch_begins": found.begins,
        "earlier": [{"line": line, "what": what} for line, what in found.earlier],
        "later": [{"line": line, "what": what} for line, what in found.later],
        "why": found.why or None,
        "neighbours": [{"line": mark.line, "text": mark.text} for mark in found.neighbours],
        "stacks": list(found.stacks) if found.stacks[0] else None,
        "dumps_elsewhere": list(found.absent),
        "survived": [{"line": mark.line, "text": mark.text} for mark in found.survived],
        "served_until": found.served or None,
        "words_in": [
            {"entry": hit.entry or None, "text": hit.text, "where": hit.where or None}
            for hit in found.hits
        ],
        "words_in_more": found.more,
        "fixes": [{"id": f.id, "state": f.state, "why": f.why} for f in found.fixes],
        "dumps": [str(d.path) for d in found.dumps],
        "cores": [str(path) for path in found.cores],
        "see": entry
        and {
            "you_see": entry.sees,
            "run_this": entry.runs,
            "it_means": entry.means,
            "what_helps": entry.helps,
            "releases": entry.releases,
            "case": entry.case,
        },
        "next": found.next_command or None,
    }
    json.write(value, stream)
