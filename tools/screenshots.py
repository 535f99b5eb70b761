"""Take pictures of the explorer for the docs, light and dark, in a browser: the first screen, every view.

python tools/screenshots.py --model stories260K/hf --tokenizer stories260K/tok512.bin
python tools/screenshots.py --model /tmp/example-model --text "Return the name of the"   # trains it first
"""

from __future__ import annotations

import argparse
import io
import threading
import time
from pathlib import Path
from typing import Any

import uvicorn
from PIL import Image
from playwright.sync_api import sync_playwright
from record_example import SETTINGS

import clearhead as ch
from clearhead.app.explorer.app import make_app
from clearhead.app.explorer.session import Opened, Session

IMAGES = Path(__file__).parent.parent / "docs" / "images"
FIRST = "path"  # the picture of this view is the whole first screen
SECTIONS = (
    "path",
    "play",
    "graph",
    "attention",
    "head",
    "lens",
    "next",
    "ablate",
    "compare",
    "drawers",
    "flow",
    "cost",
)
LARGEST = 250_000  # bytes of a picture
TALLEST = 1690  # pixels of a picture: of all the drawers, the first three
SCREEN = {"width": 1440, "height": 880}
VIEW = {"width": 1440, "height": 1900}
TEXT = 'Once upon a time, there was a cat named Tom. Tom liked to run. "Hello,'
OTHER = 'Once upon a time, there was a cat named Sam. Sam liked to run. "Hello,'


def main() -> None:
    """Train unless that is done, serve, look at each section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="where the trained model is kept")
    parser.add_argument("--tokenizer", type=Path, help="where its tokenizer lies, if not with it")
    parser.add_argument("--text", default=TEXT)
    parser.add_argument("--other", default=OTHER, help="the second text of Compare")
    parser.add_argument("--browser", default="/usr/bin/chromium")
    asked = parser.parse_args()
    if not (asked.model / "config.json").exists():
        ch.train("stdlib-docs", recipe="char-gpt-cpu", out=asked.model, settings=SETTINGS, overwrite=True)
    name = asked.model.name if asked.model.name != "hf" else asked.model.parent.name
    address = serve(
        Opened(name, lambda: ch.load(asked.model, tokenizer=asked.tokenizer), {"text": asked.text})
    )
    IMAGES.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=asked.browser, args=["--no-sandbox"])
        for theme in ("light", "dark"):
            page = browser.new_page(viewport=SCREEN, color_scheme=theme, reduced_motion="reduce")
            page.goto(address)
            page.wait_for_selector("#path-table [data-edge]", timeout=120_000)
            while not page.evaluate("Object.keys(clearhead.store.get('roles')).length"):
                page.wait_for_timeout(100)
            for section in SECTIONS:
                show(page, section, asked.other)
                whole = section == FIRST
                shot = page.screenshot() if whole else page.locator(f"#{section}").screenshot()
                save(shot, IMAGES / f"explorer-{section}-{theme}.png")
                page.set_viewport_size(VIEW)
                page.evaluate("document.getElementById('sections').style.position = 'static'")
            page.close()
        browser.close()


def serve(opened: Opened) -> str:
    """The address of a page for one model, served until this program ends; its heads have their roles."""
    session = Session([opened])
    server = uvicorn.Server(uvicorn.Config(make_app(session), port=0, log_level="warning"))
    threading.Thread(target=server.run, daemon=True).start()
    session.start()
    while not server.started or opened.roles is None:
        time.sleep(0.1)
    return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"


def show(page: Any, section: str, other: str) -> None:
    """Open a view and do there what a reader would."""
    page.evaluate("name => clearhead.open(name)", section)
    page.wait_for_timeout(1500)
    head = page.evaluate("document.querySelector('#path-table [data-edge]')?.dataset.edge.split('/')[0]")
    if section == "path":
        page.wait_for_selector("#path-picture .path-why")
    elif section == "drawers":
        for number in range(1, page.locator("#drawers summary").count()):
            page.locator("#drawers summary").nth(number).click()
        page.wait_for_selector("#drawers [data-neuron]")
    elif section == "play":
        page.click('[data-scene="values-self"]')
    elif section == "graph":
        page.wait_for_selector("#graph-picture [data-edge]", timeout=120_000)
    elif section == "flow":
        page.locator("#flow-lane .plus").first.click()
        page.wait_for_selector("#flow-numbers td")
    elif section == "attention":
        page.click(f'#attention-grid [data-head="{head}"]')
        page.select_option("#attention-colour", "direct")
    elif section == "next":
        page.fill("#next-temperature", "0.8")
        page.fill("#next-top-k", "8")
    elif section == "ablate":
        page.click(f'#ablate-grid [data-heads="{head}"]')
        page.wait_for_selector("#ablate-kl")
    elif section == "compare":
        page.fill("#compare-text", other)
        page.click("#compare-run")
        page.wait_for_selector("#patch-tokens canvas.heat")
        page.wait_for_selector("#compare [aria-busy]", state="detached")
    page.mouse.move(0, 0)
    page.wait_for_timeout(700)


def save(shot: bytes, path: Path) -> None:
    """Write a picture with as many colours as fit into the limit."""
    image = Image.open(io.BytesIO(shot)).convert("RGB")
    image = image.crop((0, 0, image.width, min(image.height, TALLEST)))
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    for colours in (256, 128, 64, 32):
        if buffer.tell() < LARGEST:
            break
        buffer = io.BytesIO()
        image.quantize(colours, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(
            buffer, "PNG", optimize=True
        )
    path.write_bytes(buffer.getvalue())
    print(f"{path.name}: {buffer.tell():,} bytes, {image.width} x {image.height}")


if __name__ == "__main__":
    main()
