"""Play on each kind of model and from a file, words and their definitions, the phone, the way by keys."""

import pytest

from clearhead.app.explorer.views import begin
from tests.explorer.toys import toy

pytestmark = pytest.mark.ledger("F2")
STATE = "() => ({at: document.querySelector('.play-scenes [aria-pressed=true]')?.dataset.scene,"
STATE += " scrub: Number(document.getElementById('play-scrub').value),"
STATE += " painted: (() => { const stage = document.getElementById('play-stage');"
STATE += " const copy = document.createElement('canvas').getContext('2d', {willReadFrequently: true});"
STATE += (
    " copy.drawImage(stage, 0, 0, 300, 150); return copy.getImageData(0, 0, 300, 150).data.some(Boolean);"
)
STATE += " })()})"
WORDS = "document.getElementById('play-words').textContent"
STOPS = """([prefix, kind]) => {
  const own = [...clearhead.source.kept.keys()].filter((path) => path.startsWith(prefix));
  const named = (path) => path.slice(prefix.length).match(/^[a-z]*/)[0] || "self";
  return clearhead.source.get(own.find((path) => named(path) === kind));
}"""
KINDS = {
    "decoder": (["scores-self", "sampling"], "self"),
    "encoder-decoder": (["scores-encoder", "scores-cross", "sampling"], "cross"),
    "vit": (["scores-self", "sampling"], "self"),
    "vectors": (["scores-self", "vector"], "self"),
}


def scenes(seen):
    """Open Play and wait for its scenes."""
    seen.look("play", "[data-scene] >> visible=true")
    return seen.data("#play .play-scenes button", "scene")


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.slow
def test_play_tells_the_numbers_of_this_run(live, family):
    """Each scene has the formula and the shape of a step of the trace; the shares are those of the head."""
    seen = live(family)
    there = scenes(seen)
    wanted, kind = KINDS[family]
    assert there[0] == "tokens" and set(wanted) <= set(there) and len(there) >= 9
    run = seen.page.evaluate("clearhead.store.get('run').run")
    trace = seen.page.evaluate("run => clearhead.source.get(`run/${run}/trace`)", run)
    steps = {
        (step["formula"], f"{step['symbols']}  =  {' × '.join(map(str, step['shape']))}")
        for step in trace["steps"]
    }
    for number, scene in enumerate(there):
        seen.page.locator("#play .play-scenes button").nth(number).click()
        seen.wait(f"() => !['', '…'].includes({WORDS})")
        stated = seen.texts("#play-formula")[0], seen.texts("#play-shapes")[0]
        assert stated in steps, scene
        seen.wait(f"() => ({STATE})().painted")
    seen.page.click(f"[data-scene='softmax-{kind}']")
    body = seen.page.evaluate(STOPS, [f"run/{run}/stops/", kind])
    shares = next(stop["values"] for stop in body["stops"] if stop["stop"] == "softmax")
    seen.wait(f"share => {WORDS}.includes(share)", f"{100 * max(shares):.1f} %")
    assert seen.wrong == []


@pytest.mark.slow
def test_play_by_keys_and_from_a_file(live, saved, tmp_path):
    """Arrow keys step, space plays; a saved file plays with no network; who wants less motion sees none."""
    seen = live("decoder")
    there = scenes(seen)
    page, tried = saved(seen, tmp_path / "play.html")
    assert scenes(page) == there and tried == []
    stage = page.page.locator("#play-stage")
    stage.focus()
    page.page.keyboard.press("ArrowRight")
    before = page.page.evaluate(STATE)
    page.page.keyboard.press(" ")
    page.wait(f"before => ({STATE})().scrub > before + 10", before["scrub"])
    assert page.texts("#play-play") == ["Pause"]
    page.page.keyboard.press(" ")
    assert page.texts("#play-play") == ["Play"]
    page.page.fill("#play-scrub", "350")
    assert page.page.evaluate(STATE)["at"] == there[3]
    page.page.emulate_media(reduced_motion="reduce")
    page.page.click("#play-play")
    page.page.wait_for_timeout(100)
    frames = [page.page.evaluate("document.getElementById('play-stage').toDataURL()") for _ in range(2)]
    assert frames[0] == frames[1]
    page.page.click("#play-play")
    assert page.wrong == []


def test_sampling_beside_the_answer_and_writing_on(live):
    """The sliders beside the answer and those of the view are one; `Continue` writes until it is stopped."""
    seen = live("decoder")
    seen.look("answer", "[data-id]")
    seen.page.fill("#next-temperature-here", "0.5")
    assert seen.page.input_value("#next-temperature") == "0.5"
    m = toy("decoder")
    run = begin(m, seen.page.evaluate("clearhead.store.get('run').tokens.text"))
    logits = run.scores(len(run.prepared.tokens) - 1).double()
    expected = (logits / 0.5).softmax(-1).max().item()
    seen.near("#answer-list [data-value]", expected, 1e-5)
    seen.page.fill("#next-temperature-here", "1")
    count = len(seen.texts("#input-tokens .chip"))
    seen.page.click("#answer-continue")
    seen.wait("count => document.querySelectorAll('#input-tokens .chip').length >= count + 2", count)
    seen.page.click("#answer-continue")
    seen.wait("() => document.getElementById('answer-continue').textContent === 'Continue'")


def test_every_term_is_defined_where_it_stands(live):
    """A term shows its one line on focus, and names it for those who hear the page."""
    seen = live("decoder")
    seen.look("flow", "[data-group]")
    terms = seen.page.locator("#flow .hint .term")
    assert terms.count() >= 1
    terms.first.focus()
    described = terms.first.get_attribute("aria-describedby")
    line = seen.page.locator(f"#{described}").text_content()
    assert seen.page.locator("[role=tooltip]").inner_text() == line
    seen.page.keyboard.press("Escape")
    assert not seen.page.is_visible("[role=tooltip]")
    lines = seen.texts("#glossary dd")
    assert len(lines) > 30 and all(20 < len(line) < 130 for line in lines)


def test_the_path_is_on_the_first_screen_of_a_phone(watched, served):
    """At 390 pixels: nothing runs off sideways, the tokens of the path are seen, and a finger can choose."""
    seen = watched(viewport={"width": 390, "height": 844}, has_touch=True).open(served("decoder").url)
    seen.page.locator("#story").wait_for(timeout=60_000)
    assert seen.page.evaluate("document.querySelector('.path-picture').getBoundingClientRect().bottom") <= 844
    assert seen.page.evaluate("scrollY") == 0
    for view in seen.data("nav a:not([hidden])", "view"):
        seen.page.evaluate("id => clearhead.open(id)", view)
        seen.page.wait_for_timeout(150)
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= 390, view
        small = seen.page.evaluate(
            """() => [...document.querySelectorAll("button, select, summary, nav a")]
              .filter((one) => !one.matches(".term, .in-words, .plus, .head, .path-acts *"))
              .filter((one) => one.offsetParent)
              .map((one) => [one.id || one.textContent.slice(0, 30), one.getBoundingClientRect().height])
              .filter(([, height]) => height < 40)"""
        )
        assert small == [], view


@pytest.mark.slow
def test_few_keys_lead_to_the_views(watched, served):
    """The skip link leads there at once; without it, lists of tokens and answers are one stop each."""
    seen = watched().open(served("decoder").url)
    keys = seen.page.keyboard
    here = "document.activeElement.dataset.view"
    keys.press("Tab")
    keys.press("Enter")
    assert seen.page.evaluate(here) == "path"
    keys.press("ArrowRight")
    assert seen.page.evaluate(here) == "play"
    seen.page.evaluate("document.activeElement.blur()")
    seen.page.reload()
    seen.ready()
    seen.page.locator("#answer-list [data-id]").first.wait_for()
    presses = 0
    while not seen.page.evaluate(here):
        keys.press("Tab")
        presses += 1
        assert presses <= 20
