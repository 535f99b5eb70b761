"""Show hostile tokens, classes, names and texts as text: markup, script or trickery, and none of it runs."""

import pytest

from clearhead.app.explorer.record import export, record, show
from clearhead.app.explorer.session import Opened
from clearhead.hub.tokens.text import visible
from tests.browser.test_export import offline
from tests.explorer.toys import HOSTILE, hostile, serving

NAME = "</title><script>window.pwned=1</script><img src=x onerror=window.pwned=1>"
TEXT = "¦".join(HOSTILE)
ROLES = {"0.0": HOSTILE[0], "0.1": HOSTILE[1], "1.1": HOSTILE[4]}
FOREIGN = """() => [...document.querySelectorAll("main *")].filter((node) =>
  ["SCRIPT", "IFRAME", "OBJECT", "EMBED", "STYLE", "LINK", "BASE", "B"].includes(node.tagName)
  || (node.tagName === "IMG" && node.id !== "input-preview")
  || [...node.attributes].some((attribute) => attribute.name.startsWith("on"))
).map((node) => node.outerHTML.slice(0, 200))"""


def walk(seen):
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


@pytest.mark.ledger("F2")
@pytest.mark.parametrize("head", ["lm", "classifier"])
@pytest.mark.slow
def test_inert_live_and_in_a_file(watched, head, tmp_path):
    m = hostile(head)
    labels = [visible(token) for token in HOSTILE]
    with serving(Opened(NAME, lambda: m)) as served:
        served.session.models[0].roles = ROLES
        seen = watched().open(served.url)
        seen.read(TEXT)
        walk(seen)
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
        inert(seen)
    made = record(m, NAME, TEXT, roles=ROLES)
    export(made, tmp_path / "page.html")
    seen, tried = offline(watched)
    seen.open((tmp_path / "page.html").as_uri())
    walk(seen)
    assert seen.texts("#input-tokens .chip > span") == labels
    inert(seen)
    assert tried == []
    source = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert source.count("<script") == source.count("</script") == 2
    assert not any(token in source for token in HOSTILE[:7])


@pytest.mark.ledger("F2")
def test_inert_in_a_notebook(watched, tmp_path):
    (tmp_path / "n.html").write_text(
        f"<!doctype html><title>n</title><body>{show(hostile(), TEXT)._repr_html_()}</body>", encoding="utf-8"
    )
    seen, tried = offline(watched)
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


@pytest.mark.ledger("F2")
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
