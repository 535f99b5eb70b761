"""The page as one file from disk, without a network, shows what the live page does; so do notebooks."""

import json

import numpy as np
import pytest

import clearhead as ch
from clearhead.app.explorer.record import export, record, show
from clearhead.run.generate.request import Request
from clearhead.run.generate.sampling import distribution
from tests.browser.test_numbers import FAMILIES, INPUTS, SETTINGS
from tests.explorer.toys import toy

SECTIONS = {
    "path": "[data-edge]",
    "flow": "[data-group]",
    "attention": ".head",
    "head": "[data-source]",
    "lens": "td[data-value]",
    "next": "tbody tr",
    "cost": "#cost-flops",
}
VALUES = """() => {
  const all = {};
  const selector = "main [data-value], main [data-id], main [data-entropy], main [data-parameters]";
  for (const node of document.querySelectorAll(selector)) {
    if (node.closest("#cost")) continue; // live, it begins with another length
    const key = `${node.closest("section").id} ${node.tagName} ${node.id || node.className}`;
    (all[key] ??= []).push(JSON.stringify(node.dataset));
  }
  const canvas = document.querySelector("#attention-large canvas.heat");
  all.pixels = [...canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data];
  const words = document.querySelectorAll("#input-tokens .chip, #attention-head, #lens-detail, #next-kept");
  all.text = [...words].map((node) => node.textContent);
  return all;
}"""


def offline(watched, **options):
    """A page that can reach nothing but files, and a list of what it tried."""
    seen, tried = watched(offline=True, **options), []

    def decide(route):
        if route.request.url.startswith(("file:", "data:", "blob:")):
            return route.continue_()
        tried.append(route.request.url)
        return route.abort()

    seen.page.route("**/*", decide)
    return seen, tried


def walk(seen):
    """Every section seen once, all that is drawn late included; then all values."""
    own = {"ribbon": ".ribbon"} if seen.page.is_visible('nav a[data-view="ribbon"]') else {}
    for section, ready in (own | SECTIONS).items():
        seen.look(section, ready)
    for drawn in ("#attention-large canvas.heat", "#lens-logit"):
        seen.page.locator(drawn).wait_for(state="attached")
    seen.wait("() => !document.querySelector('#input-tinted').hidden")
    return seen.page.evaluate(VALUES)


@pytest.mark.ledger("F2")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow
def test_a_file_shows_what_the_live_page_shows(watched, served, family, tmp_path):
    """Values, pixels of a head, and texts are equal; no console error; nothing is asked for."""
    online = watched().open(served(family).url)
    if family != "vit":
        online.read(*INPUTS[family])
    first = walk(online)
    with online.page.expect_download() as waiting:
        online.page.click("#export")
    waiting.value.save_as(tmp_path / "page.html")
    seen, tried = offline(watched)
    seen.open((tmp_path / "page.html").as_uri())
    assert walk(seen) == first
    online_only = {"A / B"}  # it needs a second text, and is in the file of a page that has one
    assert set(online.texts("nav a:not([hidden])")) - set(seen.texts("nav a:not([hidden])")) == online_only
    assert not seen.page.is_visible("#input-run")
    assert "recording" in seen.texts("#status")[0]
    assert seen.wrong == []
    assert tried == []
    assert (tmp_path / "page.html").stat().st_size < 3_000_000


@pytest.mark.ledger("F2")
def test_sliders_and_steps_of_a_file(watched, tmp_path):
    """Without a model, sliders still move the distribution, steps still open, the tour still runs."""
    m, text = toy("decoder"), INPUTS["decoder"][0]
    seen, tried = offline(watched, color_scheme="dark")
    seen.open(export(record(m, "decoder", text), tmp_path / "page.html").as_uri())
    logits = ch.trace(m, text).logits[0, -1]
    seen.look("next", "tbody tr")
    for temperature, top_k, top_p, min_p in SETTINGS[:5]:
        for name, value in (
            ("temperature", temperature),
            ("top-k", top_k),
            ("top-p", top_p),
            ("min-p", min_p),
        ):
            seen.page.fill(f"#next-{name}", str(value))
        expected = distribution(
            logits[None], Request(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        )[0]
        ids = [int(one) for one in seen.values("#next-table tbody tr", "data-id")]
        assert seen.values("#next-table td.number:not(.soft)") == pytest.approx(
            expected[ids].tolist(), abs=1e-6
        )
    seen.look("flow", "[data-step]").first.click()
    seen.page.locator("#flow-numbers td").first.wait_for()
    seen.page.click("#tour")
    seen.page.locator(".tour").wait_for()
    seen.page.keyboard.press("Escape")
    seen.page.click("#theme")
    assert seen.wrong == []
    assert tried == []


@pytest.mark.ledger("F2")
def test_a_long_file_says_what_it_left_out(watched, tmp_path, monkeypatch):
    """With little room, attention is put into cells: the page says so, and each row still sums to 1."""
    monkeypatch.setattr("clearhead.app.explorer.record.PATTERN_BYTES", 2_000)
    made = record(toy("decoder"), "decoder", list(range(60)))
    cells = made["views"]["run/recorded/attention/self/0"]["aggregated"]
    assert cells > 1
    seen, _ = offline(watched)
    seen.open(export(made, tmp_path / "page.html").as_uri())
    assert f"cells of {cells} tokens" in seen.texts("#status")[0]
    seen.look("attention", "canvas.heat")
    assert f"Each cell stands for {cells} tokens" in seen.texts("#attention-large")[0]


@pytest.mark.ledger("F2")
def test_a_notebook_shows_the_same(watched, tmp_path):
    """The frame that a notebook gets has the same values, and its links stay in it."""
    m, text = toy("decoder"), INPUTS["decoder"][0]
    cell = show(m, text)
    (tmp_path / "notebook.html").write_text(
        f"<!doctype html><title>n</title><body>{cell._repr_html_()}</body>", encoding="utf-8"
    )
    seen, tried = offline(watched)
    seen.page.goto((tmp_path / "notebook.html").as_uri())
    frame = seen.page.frame_locator("iframe")
    frame.locator("#input-tokens .chip").first.wait_for()
    assert frame.locator("#input-tokens .chip > span").all_text_contents() == list(ch.trace(m, text).tokens)
    frame.locator("#sections a", has_text="Next token").click()
    frame.locator("#next-table tbody tr").first.wait_for()
    shown = frame.locator("#next-table td.number:not(.soft)").evaluate_all(
        "nodes => nodes.map((node) => Number(node.dataset.value))"
    )
    best = ch.trace(m, text).logits[0, -1].double().softmax(-1).topk(20).values
    assert shown == pytest.approx(best.tolist(), abs=1e-6)
    assert frame.locator("nav a:not([hidden])").count() == 9
    assert seen.wrong == []
    assert tried == []
    assert json.dumps(cell.recorded)
    assert np.isfinite(shown).all()
