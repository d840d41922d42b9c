"""What a log says of the server itself: its release, its arguments, and what g4debug did in it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_RELEASE = re.compile(
    r"\bsglang(?:[ =:@v]{1,4}|-)(\d+\.\d+\.\d+(?:\.?(?:post|rc|dev)\d+)*(?:\+[\w.]+)?)", re.I
)
_IS = r"(?:[= ]|['\"]: )['\"]?"  # of ServerArgs(x='y'), of --x y, and of the dict of 0.5.23
_ARGUMENT = {
    name: re.compile(rf"(?<![A-Za-z_]){argument}{_IS}{value}")
    for name, argument, value in (
        ("model", r"(?:model_path|--model(?:-path)?)", r"([^'\",\s]{1,200})"),
        ("attention", "attention_backend", "([a-z0-9_]{1,40})"),
        ("decode attention", "decode_attention_backend", "([a-z0-9_]{1,40})"),
        ("speculative", "(?:--)?speculative[_-]algorithm", "([A-Z0-9_]{2,40})"),
        ("draft", "(?:--)?speculative[_-]draft[_-]model[_-]path", r"([^'\",\s]{1,200})"),
        ("tp", "(?:--)?tp[_-]size", r"(\d{1,4})"),
    )
}
_ARMED = re.compile(r"g4debug \S{1,40} \[\w{1,20}\] armed: (.{0,400}?) \(([\w, ]{1,40})\);")
_RUNS = re.compile(
    r"g4debug: this server runs (\w{1,80})[^.]{0,200}? on (\w{1,40})(?:, draft (\w{1,40}))?"
)
_FIXES = re.compile(r"; fixes: \d+ in force \(([^)]{0,2000})\)")
_DUMPS = re.compile(r"; dumps: (.{1,400})$")
MATCHED = ("gemma-4", "trtllm_mha", "mtp", "tp", "piecewise enforced", "eagle forced")
NEVER_HAD_1 = "0.5.12.post1"  # no wheel from here on has the bug of entry 1
HAD_22 = (0, 5, 22)  # releases before this have the bug of entry 22
# 0.5.15.post1 prints its arguments as ``ServerArgs(…)``, 0.5.23 as a dict.
FORMS = (
    (re.compile(r"server_args=ServerArgs\("), range(12, 23), "before 0.5.23"),
    (re.compile(r"server_args=\{"), range(16, 24), "after 0.5.15.post1"),
)


@dataclass
class Server:
    """release: '' if the log does not say it. arguments: those that triage uses, by a short name.

    armed: g4debug's tracers by its line at start, '' if it was not there. fixes: those in force
    by the same line. dumps: the folder of that line. drill: faults were injected. installed: the
    release of this machine, if the user says that it is the server's; '' otherwise. bounds: what
    the form of the log says of the release. minors: those that it leaves, of 0.5.x.
    """

    release: str = ""
    arguments: dict[str, str] = field(default_factory=dict)
    armed: str = ""
    fixes: tuple[str, ...] = ()
    dumps: str = ""
    drill: bool = False
    installed: str = ""
    bounds: str = ""
    minors: tuple[int, ...] = tuple(range(12, 24))
    flags: set[str] = field(default_factory=set)

    @property
    def started(self) -> bool:
        return bool(self.arguments)

    @property
    def known(self) -> str:
        """The release that is taken for the server's, '' if there is none."""
        return self.release or self.installed

    def words(self) -> set[str]:
        """The facts that a pattern may ask for."""
        said = self.arguments
        found = set(self.flags)
        if re.search(r"gemma-?_?4", said.get("model", ""), re.I):
            found.add("gemma-4")
        if "trtllm_mha" in (said.get("attention"), said.get("decode attention")):
            found.add("trtllm_mha")
        if said.get("speculative") in ("FROZEN_KV_MTP", "NEXTN", "EAGLE") and (
            "assistant" in said.get("draft", "") or said["speculative"] == "FROZEN_KV_MTP"
        ):
            found.add("mtp")
        if int(said.get("tp", "1")) > 1:
            found.add("tp")
        numbers = tuple(int(n) for n in re.findall(r"\d+", self.known)[:3])
        if re.search(r"dev|\+g", self.known):
            found |= {"may have entry 1", "may have entry 22"}
        elif self.known and numbers < HAD_22:
            found.add("may have entry 22")
        return found

    def take(self, text: str) -> None:
        """Learn what a line says. Most lines say nothing."""
        if "server_args=" in text or "launch_server" in text or "sglang serve" in text:
            for name, regex in _ARGUMENT.items():
                if found := regex.search(text):
                    self.arguments.setdefault(name, found[1])
            if re.search(r"enforce[_-]piecewise[_-]cuda[_-]graph(?:=True|': True| |$)", text):
                self.flags.add("piecewise enforced")
            for form, minors, bounds in FORMS:
                if form.search(text):
                    self.minors, self.bounds = tuple(minors), bounds
        if "SGLANG_GEMMA4_FORCE_EAGLE=1" in text:
            self.flags.add("eagle forced")
        if not self.release and (found := _RELEASE.search(text)):
            self.release = found[1]
        if "g4debug" in text:
            self.drill |= "g4debug fault (seed=" in text
            if found := _RUNS.search(text):
                for name, value in zip(
                    ("model", "attention", "speculative"), found.groups(), strict=True
                ):
                    if value and value != "None":
                        self.arguments.setdefault(name, value)
            if found := _ARMED.search(text):
                self.armed = self.armed or f"{found[1]} ({found[2]})"
                if fixes := _FIXES.search(text):
                    self.fixes = tuple(re.findall(r"[a-z0-9-]+", fixes[1]))
                if dumps := _DUMPS.search(text):
                    self.dumps = dumps[1].strip()
