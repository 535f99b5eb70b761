"""Take pictures of every section of the explorer for the docs, light and dark, in a real browser.

python tools/screenshots.py --model /tmp/example-model
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
from record_example import SETTINGS, TEXT

import clearhead as ch
from clearhead.explorer.app import make_app
from clearhead.explorer.session import Opened, Session

IMAGES = Path(__file__).parent.parent / "docs" / "images"
SECTIONS = ("input", "answer", "flow", "attention", "head", "lens", "next", "ablate", "compare", "cost")
LARGEST = 250_000  # bytes of a picture
VIEW = {"width": 1280, "height": 1900}
OTHER = "Return the value of the"


def main() -> None:
    """Train unless that is done, serve, look at each section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="where the trained model is kept")
    parser.add_argument("--browser", default="/usr/bin/chromium")
    asked = parser.parse_args()
    if not (asked.model / "config.json").exists():
        ch.train("stdlib-docs", recipe="char-gpt-cpu", out=asked.model, settings=SETTINGS, overwrite=True)
    address = serve(Opened("char-gpt", lambda: ch.load(asked.model), {"text": TEXT}))
    IMAGES.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=asked.browser, args=["--no-sandbox"])
        for theme in ("light", "dark"):
            page = browser.new_page(viewport=VIEW, color_scheme=theme, reduced_motion="reduce")
            page.goto(address)
            page.wait_for_selector("#input-tokens .chip", timeout=120_000)
            page.wait_for_selector("#attention-roles [data-role]", state="attached", timeout=120_000)
            page.evaluate("document.getElementById('sections').style.position = 'static'")
            for section in SECTIONS:
                show(page, section)
                save(page.locator(f"#{section}").screenshot(), IMAGES / f"explorer-{section}-{theme}.png")
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


def show(page: Any, section: str) -> None:
    """Open a view and do there what a reader would."""
    page.evaluate("name => clearhead.open(name)", section)
    page.wait_for_timeout(1500)
    if section == "input":
        page.locator("#input-tokens .chip").nth(7).click()
    elif section == "flow":
        page.locator("#flow-lane .plus").first.click()
        page.wait_for_selector("#flow-numbers td")
    elif section == "attention":
        page.locator("#attention-grid .head .role:not(:empty)").first.click()
        page.select_option("#attention-colour", "direct")
    elif section == "next":
        page.fill("#next-temperature", "0.8")
        page.fill("#next-top-k", "8")
    elif section == "ablate":
        page.locator("#ablate-grid [data-heads]").nth(5).click()
        page.wait_for_selector("#ablate-kl")
    elif section == "compare":
        page.fill("#compare-text", OTHER)
        page.click("#compare-run")
        page.wait_for_selector("#compare-kl")
    page.mouse.move(0, 0)
    page.wait_for_timeout(700)


def save(shot: bytes, path: Path) -> None:
    """Write a picture with as many colours as fit into the limit."""
    image = Image.open(io.BytesIO(shot)).convert("RGB")
    for colours in (256, 128, 64, 32):
        buffer = io.BytesIO()
        image.quantize(colours, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(
            buffer, "PNG", optimize=True
        )
        if buffer.tell() < LARGEST:
            break
    path.write_bytes(buffer.getvalue())
    print(f"{path.name}: {buffer.tell():,} bytes, {image.width} x {image.height}")


if __name__ == "__main__":
    main()
