"""The files that docs/production.md hands out: their queries, and what those ask for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "production"
OF_PROMETHEUS = {"instance"}  # the label that the scraper itself adds


def rules() -> list[dict[str, Any]]:
    """The alert rules, in order."""
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    """The panels of the dashboard, in order."""
    return list(json.loads((FOLDER / "grafana.json").read_text())["panels"])


def queries() -> Iterator[tuple[str, str]]:
    """Each query in PromQL, and the texts beside it that name labels of its result."""
    for rule in rules():
        yield rule["expr"], " ".join(rule["annotations"].values())
    for panel in panels():
        for target in panel["targets"]:
            yield target["expr"], target["legendFormat"]


def metrics(query: str) -> set[str]:
    return set(re.findall(r"\b(?:g4debug_|sglang:)\w+", query))


def labels(query: str, text: str) -> set[str]:
    """The labels that a query selects and groups by, and that a text beside it shows."""
    query = re.sub(r"__name__\s*=~?", "", query)  # Prometheus has it for every metric
    grouped = re.findall(r"\b(?:by|on) \(([^)]*)\)", query)
    selected = re.findall(r"(\w+)\s*(?:=~|!=|!~|=)\s*\"", query)
    shown = re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}", text)
    return {*selected, *shown, *(name.strip() for part in grouped for name in part.split(","))}
