"""The site has every page and each of its links, and what production.md hands out fits /metrics."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import production_files
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "docs" / "site"
# A scheduler's metrics by way of the files that a server's /metrics is made of.
EXPORT = """
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from g4debug.findings.metrics import Metrics
from g4debug.findings.steps import Recorder
status = Recorder(4).status
part = status.part("page-table")
part.mode = "log"
part.checked(3, "tables")
status.found("page-table", "out-of-range")
ranks = {name: "0" for name in ("tp_rank", "pp_rank", "dp_rank")}
Metrics(status, {"model_name": "toy", **ranks}).update()
registry = CollectorRegistry()
MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    """The hook of mkdocs, as a module."""
    pytest.importorskip("mkdocs", reason="mkdocs is among the tools of `make env` only")
    spec = importlib.util.spec_from_file_location("site_pages", SITE / "pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Loader(yaml.SafeLoader):
    """mkdocs names a function of Python in its file; here its name is enough."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def test_the_nav_has_every_page_once(pages: ModuleType) -> None:
    nav = yaml.load((SITE / "mkdocs.yml").read_text(), Loader)["nav"]
    named = pages.named(pages.expanded(nav, pages.named(nav)))
    assert sorted(named) == pages.pages()
    assert {str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")} <= set(named)


@pytest.mark.once("SGLang is not asked")
def test_it_builds_offline_and_each_link_leads_somewhere(pages: ModuleType, tmp_path: Path) -> None:
    """``--strict`` makes an error of each warning: a link, an anchor or a page that is missing.

    With ``--quiet`` mkdocs counts no warnings, and any site passes.
    """
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "HTTPS_PROXY": "http://127.0.0.1:9"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path / "s")]
    done = subprocess.run(
        [*command, "-f", str(SITE / "mkdocs.yml")],
        env=environ,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    fetched = re.compile(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=[\"']?(https?:[^\"'\s>]+)")
    for page in pages.pages():
        path = tmp_path / "s" / re.sub(r"(?:README)?\.md$", ".html", page)
        there = path.with_name("index.html") if path.name == ".html" else path
        assert not fetched.findall(there.read_text()), page


def test_the_alerts_and_the_dashboard_ask_for_what_is_exported(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXPORT],
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    exported: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^(g4debug_\w+)\{(.*)\} ", done.stdout, re.M):
        exported.setdefault(name, set()).update(re.findall(r"(\w+)=\"", labels))
    assert len(exported) == 6, done.stdout
    asked: set[str] = set()
    for query, text in production_files.queries():
        metrics = production_files.metrics(query)
        ours = {name for name in metrics if name.startswith("g4debug_")}
        assert ours <= set(exported), query
        known = set[str]().union(production_files.OF_PROMETHEUS, *(exported[n] for n in ours))
        assert production_files.labels(query, text) <= known, (query, text)
        asked |= ours
    assert asked == set(exported)  # each is shown somewhere


def test_no_list_is_in_another_one(pages: ModuleType) -> None:
    """GitHub nests by two spaces, and the site by four: it shows such a list at the same level."""
    nested = [
        f"{page}: {line}"
        for page in pages.pages()
        for line in (ROOT / page).read_text().splitlines()
        if re.match(r" {1,3}[-*] \S", line)
    ]
    assert not nested


def test_production_md_tells_how_many_rules_there_are() -> None:
    page = (ROOT / "docs" / "production.md").read_text()
    assert len(production_files.rules()) == 4
    assert "has four rules for Prometheus" in page
    assert "[six metrics of g4debug]" in page
