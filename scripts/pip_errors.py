"""Turns the output of a pip that failed into one line that says what to do."""

import re

NO_SPACE = ("No space left on device", "Errno 28", "Disk quota exceeded")
NO_NETWORK = (
    "Failed to establish a new connection",
    "NewConnectionError",
    "Connection refused",
    "Connection reset",
    "Name or service not known",
    "Temporary failure in name resolution",
    "Network is unreachable",
    "timed out",
    "ProxyError",
    "Max retries exceeded",
    "SSLError",
    "ConnectionError",
)
REFUSED = re.compile(r"HTTP error (\d{3})|(\d{3}) (?:Client|Server) Error")
MISSING = re.compile(r"No matching distribution found for (\S+)")


def explain(said: str) -> str:
    """The cause, and what the user can do. The most certain causes are tried first."""
    if any(words in said for words in NO_SPACE):
        return "the disk is full: make room, then run make again"
    if "ead-only file system" in said or "Permission denied" in said:
        return f"the files cannot be written: {last_error(said)}"
    if refused := REFUSED.search(said):
        code = refused[1] or refused[2]
        return (
            f"the package registry answered {code}: check pip's index settings, or try again later"
        )
    # If the index cannot be reached, pip also says "no matching distribution", so check this first.
    if any(words in said for words in NO_NETWORK):
        return "the package registry cannot be reached: check the network and the proxy"
    if "DO NOT MATCH THE HASHES" in said:
        return "a downloaded file is damaged: run make again"
    if "(from versions: none)" in said:  # pip does not say why if it may not retry
        return (
            "the package registry offers no version at all: check the network and pip's index "
            "settings"
        )
    if missing := MISSING.search(said):
        return (
            f"the package registry has no ready-made {missing[1]} for this Python and machine: "
            "try PYTHON=python3.11 on 64-bit Linux"
        )
    return last_error(said)


def last_error(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no reason given"])[-1]
