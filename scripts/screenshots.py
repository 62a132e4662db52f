"""Takes the pictures of the console in docs/images/: the demo with its traffic, and a chromium before it.

What is seen differs from run to run, as the traffic does; names, sizes and states of the pictures do not.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from lora_serve.commands.demo import adapter_folders
from lora_serve.commands.server_process import free_port

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu")
DESK, TALL, PHONE = (1280, 800), (1280, 1120), (360, 740)  # CSS pixels
SCALE = 1.5
COMMON, RARE = 160, 96  # colours of a picture's palette: those of most pixels, and those most unlike them
PATIENCE = 240.0  # seconds until the demo is up, or as lively as a picture needs it
CANARY = "lumen/support"
NUM_USERS = 40  # who ask it
QUESTION = "Hello, my friend. How much is the Orbit?"
COLUMNS: list[dict[str, Any]] = [
    {"model": "demo-base"},
    {"model": CANARY, "version": "1"},
    {"kind": "composition", "members": [{"id": CANARY, "scale": 1}, {"id": "tidewater/pirate", "scale": 1}]},
]


@dataclass(frozen=True)
class Demo:
    """The demo's server, up and under load."""

    url: str
    key: str  # the admin's

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """The answer's JSON."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/{path}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)

    def wait_until_busy(self) -> None:
        """Return when many rows of several adapters run and others wait; after a while, whatever runs."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            engine = self.call("GET", "admin/engine")
            if engine["num_running"] >= 12 and engine["num_waiting"] >= 1:
                return
            time.sleep(0.1)


@contextmanager
def demo() -> Iterator[Demo]:
    """`lora-serve demo --traffic` on a free port, with a store of its own that goes with it."""
    port = free_port()
    command = [sys.executable, "-u", "-m", "lora_serve", "demo", "--traffic", "--port", str(port)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            said = []
            for line in child.stdout:
                said.append(line)
                if found := re.match(r"The admin key is in (.+)", line):
                    yield Demo(f"http://127.0.0.1:{port}", Path(found[1].strip()).read_text().strip())
                    break
            else:
                sys.exit(f"scripts/screenshots: the demo ended:\n{''.join(said)}")
        finally:
            child.terminate()


def give_a_canary(to: Demo) -> None:
    """A second version of one adapter for a part of its users, who ask both."""
    with tempfile.TemporaryDirectory() as folder:
        weaker = Path(shutil.copytree(adapter_folders()[CANARY], folder, dirs_exist_ok=True))
        config = weaker / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 30}))
        command = [sys.executable, "-m", "lora_serve", "adapters", "upload", CANARY, folder, "--no-activate"]
        own = {"LORA_SERVE_URL": to.url, "LORA_SERVE_ADMIN_KEY": to.key}
        subprocess.run(command, cwd=ROOT, env={**os.environ, **own}, stdout=subprocess.DEVNULL, check=True)
    to.call("PUT", f"admin/adapters/{CANARY}/route", {"canary": {"version": 2, "percent": 25}})
    with ThreadPoolExecutor(8) as people:
        list(people.map(lambda number: ask(to, f"user-{number}"), range(NUM_USERS)))


def ask(to: Demo, user: str) -> None:
    """One short question to the adapter that has a canary."""
    message = {"role": "user", "content": QUESTION}
    body = {"model": CANARY, "user": user, "max_tokens": 16, "messages": [message]}
    to.call("POST", "v1/chat/completions", body)


@contextmanager
def signed_in(browser: Browser, to: Demo, size: tuple[int, int], theme: str) -> Iterator[Page]:
    """A page of the console in this theme, with the admin signed in."""
    width, height = size
    scheme: Any = theme
    context = browser.new_context(
        viewport={"width": width, "height": height}, device_scale_factor=SCALE, color_scheme=scheme, locale="en-GB"
    )
    context.set_default_timeout(1000 * PATIENCE)
    page = context.new_page()
    page.goto(f"{to.url}/ui/#/live")
    page.get_by_label("Key", exact=True).fill(to.key)
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("heading", level=1).first.wait_for()
    yield page
    context.close()


def live(page: Page, to: Demo) -> None:
    """The lanes, after as many seconds as they show, at a moment with a full batch and a queue."""
    page.locator(".live-name").nth(11).wait_for()
    time.sleep(16)
    to.wait_until_busy()
    time.sleep(0.5)


def adapters(page: Page, to: Demo) -> None:
    """The list."""
    goto(page, "#/adapters")
    page.locator("[data-adapter]").nth(8).wait_for()


def adapter(page: Page, to: Demo) -> None:
    """The adapter with a canary."""
    goto(page, f"#/adapters/{CANARY.replace('/', '%2F')}")
    page.locator("[data-live-canary]").wait_for()


def playground(page: Page, to: Demo) -> None:
    """Three columns that have answered."""
    goto(page, "#/playground")
    sampling = {"temperature": "0", "max_tokens": "48"}
    play = {"mode": "chat", "prompt": QUESTION, "columns": [{"sampling": sampling, **column} for column in COLUMNS]}
    page.get_by_role("button", name="Settings as text").click()
    page.get_by_role("textbox", name="Settings").fill(json.dumps(play))
    page.get_by_role("button", name="Use these settings").click()
    page.get_by_role("button", name="Run", exact=True).click()
    page.locator('.outcome[data-state="done"]').nth(2).wait_for()


def usage(page: Page, to: Demo) -> None:
    """The tenants' usage."""
    goto(page, "#/tenants?tab=usage")
    page.locator("canvas").first.wait_for()


def engine(page: Page, to: Demo) -> None:
    """The limits and their learned effect."""
    goto(page, "#/engine")
    page.get_by_role("heading", level=2).nth(2).wait_for()


def goto(page: Page, fragment: str) -> None:
    page.evaluate("address => { location.hash = address; }", fragment)


@dataclass(frozen=True)
class Picture:
    """What is done before a picture is taken, and of which size and theme the page is then."""

    show: Callable[[Page, Demo], None]
    size: tuple[int, int] = DESK
    theme: str = "light"


PICTURES = {
    "live-dark": Picture(live, theme="dark"),
    "live-light": Picture(live),
    "live-phone": Picture(live, PHONE, "dark"),
    "adapters": Picture(adapters),
    "adapter": Picture(adapter, TALL),
    "playground": Picture(playground, TALL),
    "usage": Picture(usage),
    "engine": Picture(engine, TALL, "dark"),
}


def main(names: list[str]) -> int:
    """Takes the pictures of these names, all without one; the exit code."""
    if unknown := set(names) - set(PICTURES):
        sys.exit(f"scripts/screenshots: no picture {', '.join(sorted(unknown))}; there are {', '.join(PICTURES)}")
    chromium = next(filter(None, map(shutil.which, BROWSERS)), None)
    if chromium is None:
        sys.exit("scripts/screenshots: no chromium is installed: apt-get install chromium")
    IMAGES.mkdir(exist_ok=True)
    with demo() as to, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(FLAGS))
        give_a_canary(to)
        for name in names or PICTURES:
            picture = PICTURES[name]
            with signed_in(browser, to, picture.size, picture.theme) as page:
                page.mouse.move(0, 0)  # or a row is under it
                picture.show(page, to)
                page.wait_for_timeout(700)  # what fades in has
                save(IMAGES / f"console-{name}.png", page.screenshot())
        browser.close()
    return 0


def save(path: Path, png: bytes) -> None:
    """The picture with a palette of its own: a third of the bytes, with its planes nearly as they are."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    counted: list[Any] = sorted(image.getcolors(image.width * image.height) or (), reverse=True)
    colours = [band for _, colour in counted[:COMMON] for band in colour]
    colours += (image.quantize(RARE, Image.Quantize.MAXCOVERAGE).getpalette() or [])[: 3 * RARE]
    palette = Image.new("P", (1, 1))
    palette.putpalette(colours)
    image.quantize(palette=palette, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
