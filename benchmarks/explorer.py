"""Time the explorer in a real browser: until it can be used, frames of scrolling and hovering, large models.

Interactive: from the answer to a run until the page of 512 tokens, 12 layers and 12 heads takes a key press
and shows the run's tokens. Frames: counted with requestAnimationFrame while the pointer crosses the enlarged
heat map, while the page scrolls through, and in each scene of Play, of a decoder, an encoder-decoder and a
ViT. Deep: the same times for 48 layers over 1,024 tokens, and the
size of its file. First paint: from navigation until the recorded example is visible, while the model takes
long to load. On a machine that others use too, the best of several rounds.

Views: the model's part of each view on one thread, as a ratio to a plain forward pass of the same round, both
in processor time, so that other programs do not count; the median of the rounds. The first view is a text's
run, its answer, its path and the cells of the path. The views after it are answered from the recorded pass,
but for those named as passes of their own: why a head looks where it looks is a backward pass (the first
one makes the graph that the others use), the trace a pass step by step, and one choice followed through all
layers and columns reads the whole vocabulary, for the first choice. The page asks for reasons and trace
before anybody looks, where the model is small. Opened: what a reader waits for on that page, 256 tokens, 12
layers, 12 heads, from the click until nothing is being computed for the view, once it has been still for
two seconds.

Each part is printed and saved as soon as it is measured, so that a run that is cut off keeps what it has.

python benchmarks/run.py explorer [--rounds 2] [--skip-deep] [--only-views] [--only-play]
[--smollm2 FILE.gguf] [--save]
"""

from __future__ import annotations

import argparse
import platform
import shutil
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import uvicorn
from benchmarks.common import KeptParts
from playwright.sync_api import Browser, Page, sync_playwright

import clearhead as ch
from clearhead.app.explorer.app import make_app
from clearhead.app.explorer.record import page_files, record_run, single_file
from clearhead.app.explorer.session import Opened, Session
from clearhead.app.explorer.views import begin
from clearhead.app.views import page_view as view

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
WATCHED = 1.5  # seconds for which frames are counted
DEEP = (48, 12, 48, 1024)  # layers, heads, width and tokens
DEEP_TITLE = "1,024 tokens, 48 layers, 12 heads"
DETAILED = 1  # rounds in which the views after the first one are timed


def model(layers: int, heads: int, width: int, tokens: int, vocabulary: int = 5000) -> ch.Model:
    torch.manual_seed(0)
    return ch.Model(
        ch.Transformer(
            ch.ModelConfig(
                vocab_size=vocabulary, d_model=width, n_layers=layers, n_heads=heads, max_positions=tokens
            )
        ).eval()
    )


def row_of(m: ch.Model, tokens: int, seed: int = 1) -> list[int]:
    """Return token ids drawn at random."""
    made = torch.randint(m.config.vocab_size, (tokens,), generator=torch.Generator().manual_seed(seed))
    return made.tolist()


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
    page.evaluate(f"() => {{ window.counted = ({FRAMES})({WATCHED}); }}")
    start, turn = time.perf_counter(), 0
    while time.perf_counter() - start < WATCHED:
        page.mouse.move(max(box["x"], 200) + 40 + 13 * turn % 500, max(box["y"], 120) + 20 + 7 * turn % 400)
        turn += 1
    found |= {
        f"hovering_{name}": round(value, 1) for name, value in page.evaluate("() => window.counted").items()
    }
    page.evaluate(f"() => {{ window.counted = ({FRAMES})({WATCHED}); }}")
    start = time.perf_counter()
    while time.perf_counter() - start < WATCHED:
        page.mouse.wheel(0, 90 if time.perf_counter() - start < WATCHED / 2 else -90)
    found |= {
        f"scrolling_{name}": round(value, 1) for name, value in page.evaluate("() => window.counted").items()
    }
    page.close()
    return found


OPENED = """async ([name, ready]) => {
  const start = performance.now();
  const section = document.getElementById(name);
  clearhead.open(name);
  const there = () => section.querySelector(ready) && !section.querySelector("[aria-busy]");
  do await new Promise(requestAnimationFrame); while (!there() && performance.now() - start < 20000);
  return performance.now() - start;
}"""
ASKED = """async ([button, answer]) => {
  const start = performance.now();
  const before = document.querySelector(answer)?.textContent;
  document.querySelector(button).click();
  const there = () => document.querySelector(answer) && document.querySelector(answer).textContent !== before;
  do await new Promise(requestAnimationFrame); while (!there() && performance.now() - start < 20000);
  return performance.now() - start;
}"""
LOOKED_AT = {"attention": "canvas.heat", "head": "table", "lens": "td[data-value]"}
LOOKED_AT |= {"next": "#next-table td", "flow": "[data-group]", "cost": "#cost-flops", "path": ".path-said"}


def opened(browser: Browser, url: str) -> dict[str, float]:
    """Milliseconds from a click until each view is there, after the page has been still."""
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.goto(url)
    until(page, "() => Boolean(window.clearhead && document.querySelector('.path-said'))", 300)
    still = 0
    while still < 40:
        still = still + 1 if page.evaluate("() => clearhead.source.waited.size === 0") else 0
        page.wait_for_timeout(50)
    why = "#path-table tr:nth-child(6) [aria-label^=Why]"
    found = {"why, of the sixth arc": page.evaluate(ASKED, [why, "#path-why"])}
    found |= {name: page.evaluate(OPENED, [name, ready]) for name, ready in LOOKED_AT.items()}
    found["neurons"] = page.evaluate(OPENED, ["drawers", "#drawer-neurons [data-neuron]"])
    page.evaluate("() => clearhead.open('compare')")
    # One token fewer: patches go token by token, and are new interventions, which nobody waits for here.
    page.fill("#compare-text", " ".join(str(7 * n % 5000) for n in range(255)))
    page.click("#compare-run")
    until(page, "() => document.querySelector('#bench-lens')", 300)
    until(page, "() => !document.querySelector('#compare [aria-busy]')", 300)
    found["Compare, read elsewhere"] = page.evaluate(ASKED, ["#compare [data-position='200']", "#compare-kl"])
    found["Compare, its maps"] = page.evaluate(OPENED, ["compare", "#bench-lens"])
    page.close()
    return {f"{name}_ms": round(value, 1) for name, value in found.items()}


PLAYED = """async (seconds) => {
  const found = [];
  for (const button of document.querySelectorAll(".play-scenes button")) {
    button.click();
    const scrub = document.getElementById("play-scrub");
    scrub.value = Math.floor(scrub.value / 100 - 0.001) * 100;
    for (let still = 0; still < 5; still++) await new Promise((done) => setTimeout(done, 60));
    scrub.dispatchEvent(new Event("input"));
    document.getElementById("play-play").click();
    const stamps = [await new Promise(requestAnimationFrame)];
    while (stamps.at(-1) - stamps[0] < 1000 * seconds) stamps.push(await new Promise(requestAnimationFrame));
    document.getElementById("play-play").click();
    const taken = stamps.slice(1).map((stamp, place) => stamp - stamps[place]).sort((a, b) => a - b);
    const fps = (1000 * taken.length) / (stamps.at(-1) - stamps[0]);
    const late = taken.filter((one) => one > 25).length / taken.length;
    found.push({ scene: button.dataset.scene, fps, late, frames: taken.length });
  }
  return found;
}"""


def play_frames(browser: Browser, m: ch.Model, given: dict[str, object], title: str) -> dict[str, object]:
    """Frames a second in each scene of Play, the share of frames that came late, by their timestamps, and
    what a frame takes of the page's own time: script, style and layout, without painting in software.
    """
    shown = Opened(title, lambda: m, given)
    shown.roles, shown.findings = {}, []
    with serving(shown) as (_, url):
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(url)
        until(page, "() => Boolean(window.clearhead && clearhead.store.get('run'))", 300)
        page.evaluate("() => clearhead.open('play')")
        until(page, "() => document.querySelectorAll('.play-scenes button').length > 8", 300)
        page.wait_for_timeout(1500)
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable")
        before = {
            entry["name"]: entry["value"] for entry in session.send("Performance.getMetrics")["metrics"]
        }
        scenes = page.evaluate(PLAYED, WATCHED)
        after = {entry["name"]: entry["value"] for entry in session.send("Performance.getMetrics")["metrics"]}
        page.close()
    rates = [scene["fps"] for scene in scenes]
    frames = sum(scene["frames"] for scene in scenes)
    taken = {
        f"{part.lower()}_ms_a_frame": round(
            1000 * (after[f"{name}Duration"] - before[f"{name}Duration"]) / frames, 2
        )
        for part, name in {"script": "Script", "style": "RecalcStyle", "layout": "Layout"}.items()
    }
    return {
        "title": f"play: {title}",
        "scenes": len(scenes),
        "median_fps": round(statistics.median(rates), 1),
        "least_fps": round(min(rates), 1),
        **taken,
        "late_frames": round(max(scene["late"] for scene in scenes), 3),
    }


def play_models() -> Iterator[tuple[ch.Model, dict[str, object], str]]:
    """A model of each kind that Play has scenes of its own for, what it reads, and its name."""
    torch.manual_seed(0)
    size = {"d_model": 96, "n_heads": 6, "n_layers": 6}
    ids = {"ids": [7 * n % 400 for n in range(24)]}
    kinds: dict[str, tuple[dict[str, object], dict[str, object]]] = {
        "a decoder": ({"vocab_size": 400, "max_positions": 64}, ids),
        "an encoder-decoder": ({"family": "encoder-decoder", "vocab_size": 400, "max_positions": 64}, ids),
        "a ViT": (
            {"family": "encoder", "head": "classifier", "n_classes": 10, "input": "patches"}
            | {"image_size": (28, 28), "patch_size": 7, "class_token": True},
            {"image": None},
        ),
    }
    for name, (more, given) in kinds.items():
        special = {"bos": 1, "eos": 2, "decoder_start": 1} if "decoder" in name else {}
        config = ch.ModelConfig(**size, **more)  # type: ignore[arg-type]
        labels = tuple(map(str, range(10))) if "ViT" in name else ()
        yield ch.Model(ch.Transformer(config).eval(), special=special, labels=labels), given, name


def best(rounds: list[dict[str, float]]) -> dict[str, float]:
    """The best of each: the most frames, the fewest seconds."""
    return {
        name: (max if name.endswith("_frames") else min)(each[name] for each in rounds) for name in rounds[0]
    }


def measured(
    browser: Browser,
    m: ch.Model,
    tokens: int,
    rounds: int,
    title: str,
    look: Callable[[Browser, str], dict[str, float]] = answered,
) -> dict[str, object]:
    shown = Opened(title, lambda: m, {"ids": row_of(m, tokens)})
    shown.roles, shown.findings = {}, []
    with serving(shown) as (_, url):
        found: dict[str, object] = {"title": title, **best([look(browser, url) for _ in range(rounds)])}
    return found


def deep_file() -> dict[str, object]:
    """The size of the deep model's page as one file, and the processor seconds that writing it takes."""
    m = model(*DEEP)
    run, start = begin(m, row_of(m, DEEP[-1])), time.process_time()
    size = len(single_file(record_run(run, DEEP_TITLE)).encode())
    taken = round(time.process_time() - start, 1)
    return {
        "title": f"the file of {DEEP_TITLE}",
        "file_megabytes": round(size / 1e6, 2),
        "processor_s": taken,
    }


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Processor seconds and wall seconds."""
    processor, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - processor, time.perf_counter() - wall


def views(m: ch.Model, tokens: int, rounds: int, title: str) -> dict[str, object]:
    """What each view costs, beside a plain forward pass."""
    last, heads = tokens - 1, m.config.main.n_heads
    cells = ",".join(str(place) for place in range(tokens - 18, tokens))
    first = [f"next?position={last}", f"paths?position={last}", f"said/{cells}"]
    later = [
        *(f"next?position={last - 1}", f"paths?position={last - 1}", f"contributions?position={last}"),
        *("attention/self/3", "thumbnails/self", "rollout/self", f"stops/3.{heads - 1}/{last}"),
        *(f"lens?first={last}", "lens?first=0&count=8", f"said/{last}", "followed/7?first=0&count=16"),
        *(f"neurons?position={last}", f"map?position={last}", "stages"),
    ]
    own = [f"looks/3.1/{last}/5", f"looks/11.1/{last}/5", f"looks/3.1/{last}/6", "trace", "followed/7"]
    after = ["step/blocks.3.attention.q", "followed/8"]  # of the trace, and of a lens that was read through
    ratios: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {}
    for turn in range(rounds + 1):
        ids = row_of(m, tokens, turn)
        with torch.no_grad():
            plain, wall = timed(lambda ids=ids: m.model(torch.tensor([ids])))  # type: ignore[misc]
        run = begin(m, ids)
        made = {"first view": timed(lambda run=run: [view(run, path) for path in first])}  # type: ignore[misc]
        if not turn:
            continue  # to warm up
        for path in (*later, *own, *after) if turn <= DETAILED else ():
            made[path] = timed(lambda run=run, path=path: view(run, path))  # type: ignore[misc]
        for name, (processor, _) in {"plain": (plain, wall), **made}.items():
            ratios.setdefault(name, []).append(processor / plain)
            seconds.setdefault(name, []).append(processor)
        ratios.setdefault("first view, wall", []).append(made["first view"][1] / wall)
    middle = {name: statistics.median(values) for name, values in ratios.items()}
    found: dict[str, object] = {
        "title": title,
        "plain_forward_s": round(statistics.median(seconds["plain"]), 3),
        "first_view_ratio": round(middle["first view"], 3),
        "first_view_ratio_wall": round(middle["first view, wall"], 3),
        "from_the_recorded_pass_ms": {
            path: round(1000 * statistics.median(seconds[path]), 1) for path in (*later, *after)
        },
        "passes_of_their_own_ratio": {path: round(middle[path], 2) for path in own},
    }
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
    return found


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless browser, closed at the end."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--skip-deep", action="store_true")
    parser.add_argument("--only-views", action="store_true", help="measure no browser")
    parser.add_argument(
        "--smollm2", type=Path, help="its GGUF file: measure its views at 98 tokens, nothing else"
    )
    parser.add_argument("--only-play", action="store_true", help="measure the frames of Play, nothing else")
    parser.add_argument("--save", action="store_true", help="keep each part once it is measured")
    options = parser.parse_args()
    rounds, keep = options.rounds, KeptParts(options.save)
    torch.set_num_threads(1)
    deep = not (options.skip_deep or options.only_views)
    device = f"CPU {platform.machine()}, two cores, shared; one thread"
    if options.only_play:
        with chromium() as browser:
            about = {"browser": f"Chromium {browser.version}, headless, software rendering", "device": device}
            for m, given, title in play_models():
                keep("cpu_explorer_play", play_frames(browser, m, given, title), **about)
        return
    if options.smollm2 is not None:
        title = "views: SmolLM2-135M-Instruct, 98 tokens, one thread"
        keep("cpu_explorer_views", views(ch.load(options.smollm2), 98, 1, title), device=device)
        return
    small = model(12, 12, 96, 256)
    title = "views: 256 tokens, 12 layers, 12 heads, width 96"
    keep("cpu_explorer_views", views(small, 256, rounds, title), device=device)
    large = model(12, 12, 768, 1024, 50257)
    title = "views: GPT-2's size, 241 tokens, one thread"
    keep("cpu_explorer_views", views(large, 241, rounds, title), device=device)
    if options.only_views:
        return
    with chromium() as browser:
        about = {
            "browser": f"Chromium {browser.version}, headless, software rendering",
            "device": f"CPU {platform.machine()}, shared",
        }
        if "example.json" in page_files():
            keep("cpu_explorer", first_paint(browser, rounds), **about)
        title = "opened: 256 tokens, 12 layers, 12 heads, one thread"
        keep("cpu_explorer", measured(browser, small, 256, rounds, title, look=opened), **about)
        title = "512 tokens, 12 layers, 12 heads"
        keep("cpu_explorer", measured(browser, model(12, 12, 96, 512), 512, rounds, title), **about)
        if deep:
            keep("cpu_explorer", measured(browser, model(*DEEP), DEEP[-1], 1, DEEP_TITLE), **about)
    if deep:
        torch.set_num_threads(2)
        keep("cpu_explorer", deep_file(), device=f"CPU {platform.machine()}, shared")
