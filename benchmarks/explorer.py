"""Time the explorer in a real browser: until it can be used, frames of scrolling and hovering, large models.

Interactive: from the answer to a run until the page of 512 tokens, 12 layers and 12 heads takes a key press
and shows the run's tokens. Frames: counted with requestAnimationFrame while the pointer crosses the enlarged
heat map, and while the page scrolls through. Deep: the same times for 48 layers over 1,024 tokens, and the
size of its file. First paint: from navigation until the recorded example is visible, while the model takes
long to load. On a machine that others use too, the best of several rounds.

python benchmarks/explorer.py [--rounds 3] [--skip-deep] [--save]
"""

from __future__ import annotations

import argparse
import platform
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import uvicorn
from playwright.sync_api import Browser, Page, sync_playwright

import clearhead as ch
from clearhead.explorer.app import make_app
from clearhead.explorer.pages import page_files, single_file
from clearhead.explorer.record import record_run
from clearhead.explorer.session import Opened, Session
from common import save

FRAMES = """async (seconds) => {
  let frames = 0, worst = 0, last = performance.now();
  const end = last + 1000 * seconds;
  while (last < end) {
    const now = await new Promise(requestAnimationFrame);
    worst = Math.max(worst, now - last);
    last = now;
    frames += 1;
  }
  return { frames: frames / seconds, worst };
}"""


def model(layers: int, heads: int, width: int, tokens: int) -> ch.Model:
    torch.manual_seed(0)
    return ch.Model(
        ch.Transformer(
            ch.ModelConfig(
                vocab_size=5000, d_model=width, n_layers=layers, n_heads=heads, max_positions=tokens
            )
        ).eval()
    )


@contextmanager
def serving(opened: Opened) -> Iterator[tuple[Session, str]]:
    session = Session([opened])
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(make_app(session), log_level="critical"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    session.start()
    thread.start()
    yield session, f"http://127.0.0.1:{listener.getsockname()[1]}/"
    server.should_exit = True
    thread.join(10)


def until(page: Page, condition: str, seconds: float = 120) -> None:
    """Poll from outside: the page's policy allows no evaluation from within."""
    end = time.perf_counter() + seconds
    while not page.evaluate(condition):
        if time.perf_counter() > end:
            raise TimeoutError(condition)
        page.wait_for_timeout(5)


def answered(browser: Browser, url: str) -> dict[str, float]:
    """Seconds from the answer to a run until the page is usable, and frames per second."""
    page = browser.new_page(viewport={"width": 1280, "height": 720})
    answers: list[float] = []
    page.on(
        "response",
        lambda answer: answers.append(time.perf_counter()) if answer.url.endswith("/inside/run") else None,
    )
    page.goto(url)
    until(
        page,
        "() => Boolean(window.clearhead && clearhead.store.get('run') "
        "&& document.querySelectorAll('#input-tokens .chip').length > 100)",
    )
    page.keyboard.press("Tab")
    page.evaluate(FRAMES, 0.05)  # two frames were drawn after it
    found = {"interactive_s": round(time.perf_counter() - answers[0], 3)}
    page.evaluate("() => clearhead.open('attention')")
    page.locator("#attention canvas.heat").wait_for(timeout=300_000)
    until(page, "() => !document.querySelector('#attention [aria-busy]')", 300)
    box = page.locator("#attention canvas.heat").bounding_box()
    assert box is not None
    page.evaluate("top => scrollBy({top, behavior: 'instant'})", box["y"] - 120)
    box = page.locator("#attention canvas.heat").bounding_box()
    assert box is not None
    page.evaluate(f"() => {{ window.counted = ({FRAMES})(2.5); }}")
    start, turn = time.perf_counter(), 0
    while time.perf_counter() - start < 2.5:
        page.mouse.move(max(box["x"], 200) + 40 + 13 * turn % 500, max(box["y"], 120) + 20 + 7 * turn % 400)
        turn += 1
    found |= {
        f"hovering_{name}": round(value, 1) for name, value in page.evaluate("() => window.counted").items()
    }
    page.evaluate(f"() => {{ window.counted = ({FRAMES})(2.5); }}")
    start = time.perf_counter()
    while time.perf_counter() - start < 2.5:
        page.mouse.wheel(0, 90 if time.perf_counter() - start < 1.25 else -90)
    found |= {
        f"scrolling_{name}": round(value, 1) for name, value in page.evaluate("() => window.counted").items()
    }
    page.close()
    return found


def best(rounds: list[dict[str, float]]) -> dict[str, float]:
    """The best of each: the most frames, the fewest seconds."""
    return {
        name: (max if name.endswith("_frames") else min)(each[name] for each in rounds) for name in rounds[0]
    }


def measured(
    browser: Browser, m: ch.Model, tokens: int, rounds: int, title: str, file: bool = False
) -> dict[str, object]:
    ids = torch.randint(m.config.vocab_size, (tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    opened = Opened(title, lambda: m, {"ids": ids})
    opened.roles = {}
    with serving(opened) as (session, url):
        found: dict[str, object] = {"title": title, **best([answered(browser, url) for _ in range(rounds)])}
        if file:
            run = session.run(next(reversed(session._runs)))
            page = single_file(record_run(run, title))
            found |= {"file_megabytes": round(len(page.encode()) / 1e6, 2)}
    print(found)
    return found


def first_paint(browser: Browser, rounds: int) -> dict[str, object]:
    """From navigation until the example's tokens are there, with a model that takes long."""

    def slowly() -> ch.Model:
        time.sleep(60)
        return model(2, 2, 32, 64)

    seconds = []
    for _ in range(rounds):
        with serving(Opened("slow", slowly)) as (_, url):
            page = browser.new_page(viewport={"width": 1280, "height": 720})
            start = time.perf_counter()
            page.goto(url, wait_until="commit")
            page.locator("#input-tokens .chip").first.wait_for()
            seconds.append(time.perf_counter() - start)
            page.close()
    found: dict[str, object] = {
        "title": "first paint of the recorded example, while a model loads",
        "seconds": round(min(seconds), 3),
    }
    print(found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--skip-deep", action="store_true")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        results = [
            measured(browser, model(12, 12, 96, 512), 512, options.rounds, "512 tokens, 12 layers, 12 heads")
        ]
        if "example.json" in page_files():
            results.append(first_paint(browser, options.rounds))
        if not options.skip_deep:
            results.append(
                measured(
                    browser, model(48, 12, 48, 1024), 1024, 1, "1,024 tokens, 48 layers, 12 heads", file=True
                )
            )
        machine = {
            "browser": f"Chromium {browser.version}, headless, software rendering",
            "device": f"CPU {platform.machine()}, shared",
        }
        browser.close()
    if options.save:
        save("cpu_explorer", [{**each, **machine} for each in results])


if __name__ == "__main__":
    main()
