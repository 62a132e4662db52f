"""The site builds without a warning, fetches nothing from elsewhere, and every link of every page leads somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import ROOT

DOCUMENTS = sorted(
    str(path.relative_to(ROOT))
    for path in [
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    ]
)
FILES = [
    str(file)
    for folder in ("lora_serve", "tests", "scripts", "benchmarks", "deploy")
    for file in (ROOT / folder).rglob("*.*")
]
FENCED = re.compile(r"^```.*?^```$", re.M | re.S)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


def test_site_builds_strictly_with_every_page(site: Path) -> None:
    for document in (ROOT / "docs").rglob("*.md"):
        assert (site / document.relative_to(ROOT / "docs").with_suffix(".html")).is_file(), document
    for figure in (ROOT / "docs").rglob("*.svg"):
        assert (site / figure.relative_to(ROOT / "docs")).is_file(), figure


def test_pages_fetch_nothing_from_another_host(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text()
        fetched = re.findall(r"<(?:script|img|iframe|source)[^>]+src=\"?(https?:[^\" >]+)", text)
        fetched += re.findall(r"<link[^>]+rel=\"?(?:stylesheet|preconnect|icon)\"?[^>]+href=\"?(https?:[^\" >]+)", text)
        assert fetched == [], page
    for figure in site.rglob("*.svg"):
        assert re.findall(r"(?:href|src|url)[=(]\"?'?https?:", figure.read_text()) == [], figure


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_and_anchors_lead_somewhere(document: str) -> None:
    path = ROOT / document
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", path.read_text())):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), f"{document} links to {target}"
        if anchor:
            assert anchor in anchors(linked), f"{document} links to {target}"


def anchors(page: Path) -> set[str]:
    """The ids of a page's headings, as mkdocs and the usual forges make them."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_readme_leads_to_every_page_group_and_stays_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    linked = set(re.findall(r"\]\((docs/[^)#]+)", text))
    for folder in ("tutorial", "how-to"):
        pages = {str(page.relative_to(ROOT)) for page in (ROOT / "docs" / folder).glob("*.md")}
        assert pages <= linked, f"the README's table lacks {sorted(pages - linked)}"


def test_every_page_begins_with_one_heading() -> None:
    for document in DOCUMENTS:
        assert len(re.findall(r"^# ", FENCED.sub("", (ROOT / document).read_text()), re.M)) == 1, document


def test_navigation_names_each_page_once() -> None:
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)["nav"]
    named = re.findall(r"[\w/-]+\.md", str(nav))
    assert sorted(named) == sorted(set(named))
    assert set(named) == {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}


class _Loader(yaml.BaseLoader):
    """Reads mkdocs.yml, whose tags for Python are of no interest here."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_are_named_exist(document: str) -> None:
    text = FENCED.sub("", (ROOT / document).read_text())
    for name in re.findall(r"`((?:[\w-]+/)+[\w-]+\.(?:py|c|h|json|png))\b", text):
        assert any(file.endswith(f"/{name}") for file in FILES), f"{document} names {name}"
    for name in re.findall(r"`((?:tests|lora_serve|benchmarks|scripts)/[\w/]+)`", text):
        assert (ROOT / name).exists(), f"{document} names {name}"


# docker's, redis-server's, systemctl's, kubectl's, helm's
OTHERS = {
    "--build",
    "--appendonly",
    "--maxmemory-policy",
    "--daemonize",
    "--now",
    "--from-literal",
    "--cascade",
    "--set",
    "--build-arg",
    "--create-namespace",
    "--for",
    "--generate",
    "--fix",
}


def test_flags_that_are_named_exist() -> None:
    """In every page but the one about other servers. Whose flags: a setting, a command, a script, or what it runs."""
    from dataclasses import fields

    from lora_serve.core.settings import Settings
    from lora_serve.core.tenant import Quota

    names = {*Settings.model_fields, *(field.name for field in fields(Quota))}
    known = {"--" + name.replace("_", "-") for name in names}
    for folder in ("lora_serve", "scripts", "benchmarks", "tests/fuzz", "tests/mutation"):
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in (".py", "") and file.is_file():
                known |= set(re.findall(r"--[a-z][a-z-]+", file.read_text(errors="ignore")))
    known |= {flag.replace("--", "--no-", 1) for flag in known}
    for document in DOCUMENTS:
        if document != "docs/how-to/moving.md":
            found = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", (ROOT / document).read_text()))
            assert found <= known | OTHERS, f"{document}: {sorted(found - known - OTHERS)}"
