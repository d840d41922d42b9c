"""Reads from a dump which server its tape needs to run again, or why it cannot run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from g4debug import discovery
from g4debug.findings import decisive, decisive_arguments, tape
from g4debug.findings.kinds import Place, place_of
from g4debug.findings.record import Plain, Tape, TrapRecord
from g4debug.findings.tape import Recording
from g4debug.findings.tape_record import data
from g4debug.replay.model import Model, NoToy, chosen
from g4debug.replay.tokens import STOPS, children


class CannotReplay(Exception):
    """The text says why, after "cannot be replayed, because"."""


class NeverReplayed(CannotReplay):
    """No server like this one was ever replayed. Nothing is wrong with its tape."""


RELEASES = (  # on which replays were run
    "0.5.12.post1", "0.5.13.post1", "0.5.14", "0.5.15.post1", "0.5.18", "0.5.23"
)  # fmt: skip
# The server's arguments that decide where pages go and are not in ``Tape.scheduler``.
CARRIED = (
    "decode_attention_backend", "disable_radix_cache", "max_queued_requests",
    "num_continuous_decode_steps", "prefill_attention_backend", "radix_eviction_policy",
    "retraction_policy", "schedule_conservativeness", "speculative_num_steps",
)  # fmt: skip
BACKENDS = "attention_backend", "decode_attention_backend", "prefill_attention_backend"
# Variables of SGLang that say how it is watched, where its files and its machine are.
_ELSEWHERE = re.compile(
    r"SGLANG_(TRTLLM_MHA_DEBUG|PLUGINS|USE_|RUN_ID|FLASHINFER|DISABLE_OUTLINES|LOG|CACHE|HOST|PORT"
    r"|LOCAL_IP|TORCH|PROFIL|BLOCK_|NCCL|ENABLE_TORCH|CPU|.*(_DIR|_PATH|_CACHE|_TIMEOUT|_IP|_PORT)$)"
)
HIDDEN = "set"
# The values that a variable may get: dumps may come from strangers, and some name code to import.
_PLAIN = re.compile(r"[0-9.]{1,16}|true|false|on|off|yes|no", re.I)
_NAME = re.compile(r"SGLANG_[A-Z0-9_]{1,80}")
MOST_TOKENS = 1 << 23  # of a pool: they take some 2 kB each here, if they are used
MOST_GIVEN = 1 << 28  # tokens of all requests; 16 MiB of tape have half of that, in pages of 64
VOCAB, MOST_WORDS, CENTROIDS = 512, 1 << 18, 32


@dataclass(frozen=True)
class Setting:
    """The server that is started for a replay.

    model: the toy that it serves. drafts: whether with a draft. arguments: of SGLang's server.
    environ: variables of SGLang and g4debug. notes: differences to the recorded server, in words.
    elsewhere: those of them that are code which ran there and does not run here. left_out: the
    names of the server's arguments that are not set here.
    """

    release: str
    drafts: bool
    arguments: dict[str, Plain]
    model: Model
    environ: dict[str, str]
    notes: list[str] = field(default_factory=list)
    elsewhere: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def recording_of(record: TrapRecord) -> tuple[Tape, Recording]:
    """The dump's tape. Raises CannotReplay if it has none or it cannot be read."""
    on = record.tape
    if on is None and place_of(record.finding) is Place.ENDED:
        raise CannotReplay(
            "the dump has no tape: the scheduler was killed or died outside of Python, and such a "
            "dump is made of its black box, which has none; a server that still runs is asked for "
            "its tape by g4debug doctor --pid PID --tape FILE"
        )
    if on is None:
        raise CannotReplay(
            "the dump has no tape: the server had not begun, flight-recorder was not armed, "
            "G4DEBUG_TAPE was 0, the tape did not fit into G4DEBUG_MAX_DUMP_MB, or the dump is of "
            "an older g4debug"
        )
    if on.format not in tape.FORMATS:
        known = ", ".join(map(str, tape.FORMATS))
        raise CannotReplay(f"its tape has the format {on.format}, and this g4debug reads {known}")
    if on.limits:
        raise CannotReplay(f"a tape cannot carry what was used there: {'; '.join(on.limits)}")
    try:
        recording = tape.read(data(on), on.page, on.firsts)
    except tape.TapeError as e:
        raise CannotReplay(f"its tape is damaged: {e}") from e
    # A server may hang or die over the requests that it has before it begins a step.
    stopped = place_of(record.finding) in (Place.STANDS, Place.SURFACED)
    if not recording.steps and not (stopped and recording.requests):
        before = f": it began anew after {'; '.join(on.ended)}" if on.ended else ""
        raise CannotReplay(f"there is no step on its tape{before}")
    tokens = sum(r.prompt + r.output for r in recording.requests.values())
    if tokens > MOST_GIVEN:
        raise CannotReplay(f"its requests have {tokens} tokens, at most {MOST_GIVEN} can be made")
    return on, recording


def setting_of(record: TrapRecord, on: Tape, recording: Recording) -> Setting:
    """Raises CannotReplay, and NeverReplayed if no toy stands for this server."""
    facts = on.scheduler
    notes: list[str] = []
    release = record.versions.get("sglang", "")
    if release not in RELEASES:
        raise CannotReplay(
            f"it is of SGLang {release or '(unknown)'}, and dumps of these releases only are "
            f"replayed: {', '.join(RELEASES)}"
        )
    page = facts.get("page_size")
    if on.page != page:
        raise CannotReplay(f"its tape has pages of {on.page} tokens, and its scheduler had {page}")
    words = children(recording) * 5 // 4 + STOPS
    vocab = max(VOCAB, CENTROIDS * math.ceil((words + 8) / CENTROIDS))
    if vocab > MOST_WORDS:
        raise CannotReplay(f"{words} prompts go on differently at one place, too many to tell")
    serves = str(record.geometry.get("serves", ""))
    swa, window = facts.get("size_swa"), facts.get("sliding_window_size")
    try:
        model = chosen(
            facts,
            release,
            vocab,
            0 if swa is None and window is None else _whole(facts, "sliding_window_size"),
            _whole(record.geometry, "context_len"),
            serves,
        )
    except NoToy as e:
        raise NeverReplayed(str(e)) from e
    given = {**record.defaults, **record.arguments}
    arguments = _arguments(record, given, facts, model, notes)
    if serves and not serves.startswith(model.architecture):
        notes.append(f"the model was {serves[:200]}, and is {model.name} here")
    elsewhere = _backends(given, arguments)
    if _has_graphs(given):
        notes.append("CUDA graphs were on, and nothing is captured here")
        elsewhere.append("CUDA graphs")
    ranks = given.get("tp_size")
    if isinstance(ranks, int) and ranks > 1:
        notes.append(f"{ranks} tensor-parallel ranks, which decide alike, are one here")
        elsewhere.append(f"{ranks} tensor-parallel ranks")
    return Setting(
        release=release,
        drafts=facts.get("speculative_algorithm") is not None,
        arguments=arguments,
        model=model,
        environ=_environ(record, on, notes),
        notes=notes,
        elsewhere=tuple(elsewhere),
        left_out=tuple(sorted(record.arguments.keys() - arguments.keys())),
    )


def _backends(given: Mapping[str, Plain], here: Mapping[str, Any]) -> list[str]:
    """The attention backends that ran there and do not run here."""

    def run(arguments: Mapping[str, Any]) -> list[Any]:
        both, *each = (arguments.get(name) for name in BACKENDS)
        return list(dict.fromkeys(name or both for name in each))

    there, here_too = run(given), {None, HIDDEN, "default", *run(here)}
    return [f"the attention backend {name}" for name in there if name not in here_too]


def _has_graphs(given: Mapping[str, Plain]) -> bool:
    """Whether CUDA graphs were on. A dump that does not know says nothing of them."""
    each = given.get("disable_decode_cuda_graph"), given.get("disable_prefill_cuda_graph")
    off = given.get("device") == "cpu" or each == (True, True)
    return given.get("disable_cuda_graph") is False and not off


def _whole(values: Mapping[str, Plain], name: str) -> int:
    value = values.get(name)
    if type(value) is not int or not 0 < value <= MOST_TOKENS:
        raise CannotReplay(
            f"{name} is {value!r} in the dump, and a number from 1 to {MOST_TOKENS} is needed"
        )
    return value


def _arguments(
    record: TrapRecord,
    given: Mapping[str, Plain],
    facts: Mapping[str, Plain],
    model: Model,
    notes: list[str],
) -> dict[str, Any]:
    page = _whole(facts, "page_size")
    found = {
        name: value
        for name in CARRIED
        if (value := given.get(name)) not in (None, HIDDEN, "default")
    }
    release = record.versions.get("sglang", "")
    for name in BACKENDS:
        value = given.get(name)
        if value not in (None, HIDDEN, "default"):
            found[name] = model.backend(value, page, release)
            if value != found[name]:
                notes.append(f"{name}={value} is {found[name]} here")
    found.setdefault("attention_backend", model.backend(None, page, release))
    chunk = facts.get("chunked_prefill_size")
    return found | {
        "page_size": page,
        "context_length": _whole(record.geometry, "context_len"),
        **_pools(facts, page),
        **_running(facts, given),
        "max_prefill_tokens": _whole(facts, "max_prefill_tokens"),
        "chunked_prefill_size": -1 if chunk is None else chunk,
        "enable_mixed_chunk": bool(facts.get("is_mixed_chunk")),
        "disable_overlap_schedule": not facts.get("enable_overlap"),
        "schedule_policy": facts.get("schedule_policy"),
        **_priorities(facts),
        **decisive_arguments.given(facts),
        **_speculation(facts),
    }


def _running(facts: Mapping[str, Plain], given: Mapping[str, Plain]) -> dict[str, Plain]:
    """How many requests may run at once; None where SGLang has to find it by itself.

    If the prefix cache is off and somebody says how many may run, SGLang 0.5.23 makes the SWA pool
    for just as many, and takes no heed of swa_full_tokens_ratio (SWARequestCapPoolConfigurator).
    """
    asked = given.get("max_running_requests")
    if given.get("disable_radix_cache") is True and asked in (None, "default"):
        return {"max_running_requests": None}
    return {"max_running_requests": _whole(facts, "max_running_requests")}


def _pools(facts: Mapping[str, Plain], page: int) -> dict[str, Plain]:
    """The arguments that give the pools their sizes."""
    if facts.get("size_swa") is None:
        return {"max_total_tokens": _whole(facts, "size")}
    full, swa = _whole(facts, "size_full"), _whole(facts, "size_swa")
    return {
        "max_total_tokens": full,
        # So that it is rounded down to the size of the SWA pool.
        "swa_full_tokens_ratio": (swa + page / 2) / full if swa < full else 1.0,
    }


def _priorities(facts: Mapping[str, Plain]) -> dict[str, Plain]:
    if not facts.get("enable_priority_scheduling"):
        return {}
    names = (
        "enable_priority_scheduling",
        "schedule_low_priority_values_first",
        "priority_scheduling_preemption_threshold",
    )
    return {name: facts[name] for name in names if facts.get(name) is not None}


def _speculation(facts: Mapping[str, Plain]) -> dict[str, Plain]:
    if facts.get("speculative_algorithm") is None:
        return {}
    found: dict[str, Plain] = {
        "speculative_num_draft_tokens": _whole(facts, "speculative_num_draft_tokens")
    }
    if facts.get("speculative_eagle_topk") is not None:  # NGRAM has none
        found["speculative_eagle_topk"] = 1
    return found


def _environ(record: TrapRecord, on: Tape, notes: list[str]) -> dict[str, str]:
    """SGLang's variables, and g4debug's fixes, faults and mode that were in force."""
    found = decisive.variables(on.variables)
    for name, value in record.environment.items():
        if not _NAME.fullmatch(name) or _ELSEWHERE.match(name) or name in found:
            continue
        if name in decisive.ON_TAPE:
            continue
        if _PLAIN.fullmatch(value):
            found[name] = value
        else:
            notes.append(f"{name} is not set here, because its value is no number and no switch")
    found["G4DEBUG_FIXES"] = "none"
    for fix, state in record.fixes.items():
        if state.startswith("applied") and re.fullmatch("[a-z0-9-]{1,60}", fix):
            found["G4DEBUG_FIX_" + fix.upper().replace("-", "_")] = "1"
    modes = {t.mode for t in record.tracers if t.mode}
    found["G4DEBUG_MODE"] = "raise" if modes <= {"raise"} else "log"
    faults = record.environment.get("G4DEBUG_FAULTS", "")
    if faults and faults != HIDDEN and faults.isprintable():
        found["G4DEBUG_FAULTS"] = faults
    elif record.faults:
        notes.append(
            "the faults that were injected there are not injected here, because the dump does not "
            "show G4DEBUG_FAULTS"
        )
    if place_of(record.finding) is Place.STANDS:
        found["G4DEBUG_HANG_SECONDS"] = "2"  # nobody waits for 20 s if it stands again
    for name in ("G4DEBUG_LEAK_STEPS", "G4DEBUG_STARVED_STEPS"):
        if record.environment.get(name, "").isdecimal():
            found[name] = record.environment[name]
    return found


def tracers_of(record: TrapRecord) -> tuple[str, ...]:
    """The tracers that were armed there, if one of them made the finding, and else all: what the
    server paid for does not count here.

    Not the one that compares ranks, as one rank is replayed.
    """
    if record.finding.check != "flight-recorder":
        return tuple(t.name for t in record.tracers if t.mode)
    return tuple(name for name in discovery.names("tracer") if name != "rank-divergence")
