"""The page as one file from disk, without a network, shows what the live page does; so do notebooks.

Hostile tokens, classes, names and texts are shown as text: markup, script or trickery, and none of it runs.
"""

import json

import numpy as np
import pytest

import clearhead as ch
from clearhead.app.explorer.record import export, record, show
from clearhead.app.explorer.session import Opened
from clearhead.hub.tokens.text import visible
from clearhead.run.generate.request import Request
from clearhead.run.generate.sequence import distribution
from tests.browser.test_numbers import INPUTS, SETTINGS
from tests.explorer.toys import HOSTILE, hostile, serving, toy

pytestmark = pytest.mark.ledger("F2")
SECTIONS = {
    "path": "[data-edge]",
    "flow": "[data-group]",
    "attention": ".head",
    "head": "[data-source]",
    "lens": "td[data-value]",
    "next": "tbody tr",
    "cost": "#cost-flops",
}
LED = "() => clearhead.store.get('leading')?.run === clearhead.store.get('run').run"
# The head drawn large is the pinned one, else the one that the story names, where it names one.
LEADS = """() => {
  const head = clearhead.store.get("head") || clearhead.store.get("leading").head;
  const drawn = document.querySelector("#attention-head").dataset.head;
  return (!head || drawn === head) && !document.querySelector("#attention [aria-busy]");
}"""
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


def walk(seen):
    """Every section seen once, all that is drawn late included; then all values."""
    led = seen.page.is_visible('nav a[data-view="path"]')  # views begin with the head that the story names
    own = {"ribbon": ".ribbon"} if seen.page.is_visible('nav a[data-view="ribbon"]') else {}
    for section, ready in (own | SECTIONS).items():
        seen.look(section, ready)
        if section == "path" and led:
            seen.wait(LED, seconds=60)
    for drawn in ("#attention-large canvas.heat", "#lens-logit"):
        seen.page.locator(drawn).wait_for(state="attached")
    seen.wait("() => !document.querySelector('#input-tinted').hidden")
    if led:
        seen.wait(LEADS)
    return seen.page.evaluate(VALUES)


def test_sliders_and_steps_of_a_file(offline, tmp_path):
    """Without a model, sliders still move the distribution, steps still open, the tour still runs."""
    m, text = toy("decoder"), INPUTS["decoder"][0]
    file = export(record(m, "decoder", text), tmp_path / "page.html")
    seen, tried = offline(file, color_scheme="dark")
    logits = ch.trace(m, text).logits[0, -1]
    seen.look("next", "tbody tr")
    for temperature, top_k, top_p, min_p in SETTINGS[:5]:
        seen.sample_by(temperature, top_k, top_p, min_p)
        request = Request(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        expected = distribution(logits[None], request)[0]
        ids = [int(one) for one in seen.values("#next-table tbody tr", "data-id")]
        shown = seen.values("#next-table td.number:not(.soft)")
        assert shown == pytest.approx(expected[ids].tolist(), abs=1e-6)
    seen.look("flow", "[data-step]").first.click()
    seen.page.locator("#flow-numbers td").first.wait_for()
    seen.page.click("#tour")
    seen.page.locator(".tour").wait_for()
    seen.page.keyboard.press("Escape")
    seen.page.click("#theme")
    assert seen.wrong == []
    assert tried == []


def test_a_long_file_says_what_it_left_out(offline, tmp_path, monkeypatch):
    """With little room, attention is put into cells: the page says so, and each row still sums to 1."""
    monkeypatch.setattr("clearhead.app.explorer.record.PATTERN_BYTES", 2_000)
    made = record(toy("decoder"), "decoder", list(range(60)))
    cells = made["views"]["run/recorded/attention/self/0"]["aggregated"]
    assert cells > 1
    seen, _ = offline(export(made, tmp_path / "page.html"))
    assert f"cells of {cells} tokens" in seen.texts("#status")[0]
    seen.look("attention", "canvas.heat")
    assert f"Each cell stands for {cells} tokens" in seen.texts("#attention-large")[0]


@pytest.mark.slow
def test_a_notebook_shows_the_same(offline, tmp_path):
    """The frame that a notebook gets has the same values, and its links stay in it."""
    m, text = toy("decoder"), INPUTS["decoder"][0]
    cell = show(m, text)
    (tmp_path / "notebook.html").write_text(
        f"<!doctype html><title>n</title><body>{cell._repr_html_()}</body>", encoding="utf-8"
    )
    seen, tried = offline()
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
    assert frame.locator("nav a:not([hidden])").count() == 11
    assert seen.wrong == []
    assert tried == []
    assert json.dumps(cell.recorded)
    assert np.isfinite(shown).all()


NAME = "</title><script>window.pwned=1</script><img src=x onerror=window.pwned=1>"
TEXT = "¦".join(HOSTILE)
ROLES = {"0.0": HOSTILE[0], "0.1": HOSTILE[1], "1.1": HOSTILE[4]}
FOREIGN = """() => [...document.querySelectorAll("main *")].filter((node) =>
  ["SCRIPT", "IFRAME", "OBJECT", "EMBED", "STYLE", "LINK", "BASE", "B"].includes(node.tagName)
  || (node.tagName === "IMG" && node.id !== "input-preview")
  || [...node.attributes].some((attribute) => attribute.name.startsWith("on"))
).map((node) => node.outerHTML.slice(0, 200))"""


def open_all(seen):
    """Every section, with what each opens."""
    seen.look("input", ".chip").last.hover()
    seen.look("flow", ".step").first.click()
    seen.page.locator("#flow-numbers td").first.wait_for()
    seen.look("attention", "canvas.heat").hover()
    seen.look("lens", "td[data-value]").last.click()
    seen.page.locator("#lens-logit").wait_for()
    seen.look("next", "tbody tr")
    seen.look("cost", "#cost-flops")
    seen.page.click("#tour")
    seen.page.locator(".tour").wait_for()
    for _ in range(12):
        if seen.page.locator("#tour-next").count():
            seen.page.click("#tour-next")


def inert(seen, ran="() => window.pwned"):
    assert seen.page.evaluate(ran) is None
    assert seen.page.evaluate(FOREIGN) == []
    assert seen.wrong == []


@pytest.mark.parametrize("head", ["lm", "classifier"])
@pytest.mark.slow
def test_inert_live_and_in_a_file(watched, offline, head, tmp_path):
    m = hostile(head)
    labels = [visible(token) for token in HOSTILE]
    with serving(Opened(NAME, lambda: m)) as served:
        served.session.models[0].roles = ROLES
        seen = watched().open(served.url)
        seen.read(TEXT)
        open_all(seen)
        seen.look("ablate", "[data-heads]").first.click()
        seen.page.locator("#ablate-table").wait_for()
        seen.look("compare", "#compare-run").click()
        seen.page.locator("#compare-table").wait_for()
        assert seen.texts("#input-tokens .chip > span") == labels
        assert seen.texts("#model-name")[0].startswith(NAME)
        named = dict(zip(seen.values("#next-table tbody tr", "data-id"), seen.texts("#next-table tbody th")))
        expected = dict(enumerate(["[UNK]", *labels] if head == "lm" else HOSTILE))
        assert named
        assert all(text == expected[number] for number, text in named.items())
        assert len(named) == len(HOSTILE) + (head == "lm")
        if seen.page.is_visible("#next-find"):
            seen.page.fill("#next-find", HOSTILE[0])
        # The comparison that the view began with is left for the one clicked: its job may end in a refusal.
        seen.wrong[:] = [said for said in seen.wrong if "/job/patch/" not in said]
        inert(seen)
    made = record(m, NAME, TEXT, roles=ROLES)
    seen, tried = offline(export(made, tmp_path / "page.html"))
    open_all(seen)
    assert seen.texts("#input-tokens .chip > span") == labels
    inert(seen)
    assert tried == []
    source = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert source.count("<script") == source.count("</script") == 2
    assert not any(token in source for token in HOSTILE[:7])


def test_inert_in_a_notebook(offline, tmp_path):
    (tmp_path / "n.html").write_text(
        f"<!doctype html><title>n</title><body>{show(hostile(), TEXT)._repr_html_()}</body>", encoding="utf-8"
    )
    seen, tried = offline()
    seen.page.goto((tmp_path / "n.html").as_uri())
    frame = seen.page.frame_locator("iframe")
    frame.locator("#sections a", has_text="Next token").click()
    frame.locator("#next-table tbody tr").first.wait_for()
    assert frame.locator("#input-tokens .chip > span").all_text_contents() == [
        visible(token) for token in HOSTILE
    ]
    assert frame.locator("main").evaluate("() => window.pwned") is None
    assert seen.page.evaluate("() => document.querySelectorAll('body > *').length") == 1
    inert(seen)
    assert tried == []


@pytest.mark.slow
def test_the_policy_stops_what_would_get_through(live):
    """If a text ever became markup, the policy would neither run it nor let it reach another machine."""
    seen = live("classifier")
    said = seen.page.evaluate(
        """async () => {
          const node = document.createElement("div");
          document.body.append(node);
          const setter = Object.getOwnPropertyDescriptor(Element.prototype, "inner" + "HTML").set;
          setter.call(node, "<img src=data:, onerror='window.pwned=1'>");
          const script = document.createElement("script");
          script.textContent = "window.pwned=1";
          document.body.append(script);
          const away = await fetch("https://example.org/").then(() => "reached", () => "stopped");
          await new Promise((done) => setTimeout(done, 100));
          node.remove();
          return [window.pwned ?? null, away];
        }"""
    )
    assert said == [None, "stopped"]
    seen.wrong.clear()
    seen.requests[:] = [address for address in seen.requests if "example.org" not in address]
