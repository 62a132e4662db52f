"""The page's files: what was vendored is what npm has, nothing is fetched from elsewhere, and all of it is small."""

from __future__ import annotations

import hashlib
import json
import re
import runpy
from pathlib import Path

from lora_serve.console.files import FOLDER, page_files

ROOT = Path(__file__).parents[2]
VENDOR = FOLDER / "vendor"
MAX_BYTES = 250_000  # over the wire, of the whole page
OWN = {"preact.js", "preact.d.ts", "uplot.d.ts", "vendor.json"}


def test_vendored_files_are_those_that_were_fetched() -> None:
    listed = json.loads((VENDOR / "vendor.json").read_text())
    for card in listed:
        assert hashlib.sha256((VENDOR / card["file"]).read_bytes()).hexdigest() == card["sha256"], card["file"]
        assert (VENDOR / f"LICENSE.{card['name']}").stat().st_size > 500
        assert card["licence"] in ("MIT", "Apache-2.0")
    licences = {f"LICENSE.{card['name']}" for card in listed}
    assert {path.name for path in VENDOR.iterdir()} == {card["file"] for card in listed} | licences | OWN


def test_script_that_fetches_them_names_the_same_versions() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "vendor_console"))
    listed = json.loads((VENDOR / "vendor.json").read_text())
    said = {(one.name, one.version, one.integrity, name) for one in script["PACKAGES"] for name in one.files.values()}
    assert {(card["name"], card["version"], card["integrity"], card["file"]) for card in listed} == said
    assert (VENDOR / "preact.js").read_text() == script["DOOR"]


def test_whole_page_is_small_over_the_wire() -> None:
    sizes = {name: len(file.compressed) for name, file in page_files().items() if name != "vendor/vendor.json"}
    assert 50_000 < sum(sizes.values()) < MAX_BYTES, sorted(sizes.items(), key=lambda item: -item[1])[:10]


def test_nothing_of_the_page_is_fetched_from_elsewhere() -> None:
    """Addresses in comments are no requests; a namespace is a name."""
    for path in sorted(FOLDER.rglob("*")):
        if path.suffix in (".js", ".css", ".html") and path.parent != VENDOR:
            text = re.sub(r"/\*.*?\*/|//[^\n\"'`]*$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
            assert re.findall(r"""(?:https?:)?//[\w.-]+\.\w+/|url\(["']?(?!#)[a-z]+:""", text) == [], path
    style = (VENDOR / "uplot.css").read_text()
    assert "url(" not in style
    assert "@import" not in style


def test_every_word_that_people_read_stands_among_the_texts() -> None:
    """Words between tags of a template are those of TEXTS, so that all English is in one place."""
    for path in sorted(FOLDER.rglob("*.js")):
        if path.parent.name in ("vendor", "texts"):
            continue
        text = path.read_text()
        words = re.findall(r"(?<!=)>([^<>{}()=;`$]*[A-Za-z]{3,}[^<>{}()=;`$]*)</", text)
        words += re.findall(
            r"""\b(?:title|label|placeholder|hint|text|alt)=["']([^"'$]*[A-Za-z]{3,}[^"'$]*)["']""", text
        )
        assert words == [], path
