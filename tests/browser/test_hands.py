"""Use the page by hand: by keys alone, appending tokens, choosing another place, being told what is wrong."""

import io

import pytest
import torch
from PIL import Image

from clearhead.app.explorer.session import Opened
from clearhead.errors import InputError
from clearhead.inside.ablation import effect
from clearhead.inside.inputs import prepare
from tests.explorer.toys import TEXTS, picture, serving, toy

pytestmark = pytest.mark.ledger("F2")


def focused(watched, attribute):
    return watched.page.evaluate("name => document.activeElement.getAttribute(name)", attribute)


def tab_to(watched, condition, most=80):
    """Press Tab until the focused element is the one that is meant."""
    for _ in range(most):
        watched.page.keyboard.press("Tab")
        if watched.page.evaluate(f"() => {{ const it = document.activeElement; return {condition}; }}"):
            return
    raise AssertionError(f"Tab does not lead to {condition}")


def test_tokens_that_are_read_keep_the_focus(watched, served):
    """The tokens of a text are asked for while one types: an answer that comes late changes nothing."""
    seen = watched().open(served("decoder").url)
    seen.page.locator('#input-tokens [data-token="1"]').focus()
    with seen.page.expect_response("**/tokens"):
        seen.page.evaluate("document.getElementById('input-text').dispatchEvent(new Event('input'))")
    seen.page.wait_for_timeout(50)
    assert focused(seen, "data-token") == "1"


@pytest.mark.slow
def test_keys_alone(watched, served):
    """No pointer is ever used: text, run, heads, an ablation, the lens, a slider, theme, tour."""
    m, text = toy("decoder"), "they speak of England"
    seen = watched().open(served("decoder").url)
    keys = seen.page.keyboard
    tab_to(seen, "it.id === 'input-text'")
    keys.press("Control+a")
    keys.type(text)
    with seen.another_run():
        keys.press("Control+Enter")
    assert seen.texts("#input-tokens .chip > span") == list(prepare(m, text).tokens.labels)

    tab_to(seen, "it.dataset.token !== undefined")  # the list is one stop: arrow keys move within it
    keys.press("Home")
    keys.press("ArrowRight")
    assert focused(seen, "data-token") == "1"
    keys.press("Enter")
    assert focused(seen, "aria-pressed") == "true"
    tab_to(seen, "it.dataset.view !== undefined")
    while focused(seen, "data-view") != "flow":
        keys.press("ArrowRight")
    keys.press("Enter")
    seen.page.locator("[data-group]").first.wait_for()
    tab_to(seen, "it.dataset.group !== undefined")
    tab_to(seen, "it.dataset.step !== undefined")
    keys.press("Enter")
    seen.page.locator("#flow-numbers td").first.wait_for()

    seen.look("attention", ".head")
    tab_to(seen, "it.dataset.head !== undefined")
    assert focused(seen, "data-head") == seen.page.get_attribute("#story", "data-head")  # the story names it
    seen.page.locator('#attention-grid [data-head="0.0"]').focus()
    for move in ("Right 0.1", "Up 1.1", "Right 1.2", "Right 1.2", "Left 1.1", "Down 0.1"):
        key, name = move.split()
        keys.press(f"Arrow{key}")
        assert focused(seen, "data-head") == name
    keys.press("Enter")
    seen.page.wait_for_selector('#attention-head[data-head="0.1"]')
    assert "previous token" in seen.texts("#attention-head")[0]
    tab_to(seen, "it.classList.contains('heat')")
    keys.press("ArrowDown")
    keys.press("ArrowDown")
    labels = prepare(m, text).tokens.labels
    assert seen.texts("#attention-large .cell-words")[0].startswith(f"{labels[1]} looks at {labels[0]}: ")

    seen.look("lens", "td[tabindex='0']")
    tab_to(seen, "it.dataset.layer !== undefined")
    keys.press("ArrowDown")  # layers go from bottom to top
    keys.press("ArrowLeft")
    assert (focused(seen, "data-layer"), focused(seen, "data-column")) == ("1", "0")

    seen.look("next", "#next-table tbody tr")
    tab_to(seen, "it.id === 'next-position'")
    keys.press("ArrowUp")
    assert focused(seen, "id") == "next-position", "the choice of a place takes the focus away"
    tab_to(seen, "it.id === 'next-temperature'")
    keys.press("ArrowRight")
    assert seen.page.input_value("#next-temperature") == "1.05"

    seen.look("ablate", "[data-heads]")
    tab_to(seen, "it.dataset.heads === '0.0'")
    keys.press("Enter")
    place = seen.page.evaluate("clearhead.store.get('position')")
    expected = effect(m, text, heads=["0.0"], position=place).kl
    seen.near("#ablate-kl", expected, 1e-6)
    assert focused(seen, "data-heads") == "0.0"

    seen.page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    tab_to(seen, "it.id === 'theme'")
    keys.press("Enter")
    theme = seen.page.evaluate("document.documentElement.dataset.theme")
    keys.press("Enter")
    assert {theme, seen.page.evaluate("document.documentElement.dataset.theme")} == {"light", "dark"}
    assert focused(seen, "id") == "theme"
    keys.press("Shift+Tab")
    keys.press("Enter")
    seen.page.locator(".tour").wait_for()
    for _ in range(3):
        keys.press("ArrowRight")
    assert seen.texts("#tour-place")[0].startswith("4 of ")
    assert 8 <= int(seen.texts("#tour-place")[0].split()[-1]) <= 14
    keys.press("Escape")
    assert seen.page.locator(".tour").count() == 0
    assert focused(seen, "id") == "tour"
    assert seen.wrong == []


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
@pytest.mark.slow
def test_append_and_step_back(watched, served, family):
    """Append the likeliest token and keep its probability; the model then reads one more; then step back."""
    m, text = toy(family), TEXTS[family]
    target = ["speak"] if family == "encoder-decoder" else []
    seen = watched().open(served(family).url)
    seen.read(text, *target)
    prepared = prepare(m, text, *target)
    ids = list(prepared.tokens.ids)
    seen.look("next", "#next-table tbody tr")
    for step in range(2):
        with torch.no_grad():
            given = {"source": prepared.source} if target else {}
            probabilities = m.model(torch.tensor([ids]), **given).logits[0, -1].double().softmax(-1)
        seen.wait("count => clearhead.store.get('run').tokens.ids.length === count", len(ids))
        seen.near("#next-table td.number", float(probabilities.max()), 1e-6)
        seen.page.click("#next-greedy")
        ids.append(int(probabilities.argmax()))
        shown = "ids => JSON.stringify(clearhead.store.get('run').tokens.ids) === ids"
        seen.wait(shown, str(ids).replace(" ", ""))
        assert seen.values("#next-history small")[step] == pytest.approx(float(probabilities.max()), abs=1e-6)
    seen.page.click("#next-sample")
    seen.wait("count => clearhead.store.get('run').tokens.ids.length === count", len(ids) + 1)
    for left in (len(ids), len(ids) - 1, len(ids) - 2):
        seen.page.click("#next-back")
        seen.wait("count => clearhead.store.get('run').tokens.ids.length === count", left)
    assert seen.page.is_disabled("#next-back")
    assert seen.wrong == []


@pytest.mark.slow
def test_another_source_gets_its_own_answer(watched, served):
    """Send along what somebody wrote, and explain it; never send what the model wrote of the last text."""
    m = toy("encoder-decoder")
    seen = watched().open(served("encoder-decoder").url)
    for text in ("Ein Hund", "the king"):
        seen.read(text)
        assert seen.texts("#input-tokens .chip > span") == list(prepare(m, text).tokens.labels)
    seen.read("Ein Hund", "speak of it")
    tokens = prepare(m, "Ein Hund", "speak of it").tokens
    stages = "`run/${clearhead.store.get('run').run}/stages`"
    seen.wait(f"async () => (await clearhead.source.get({stages})).target")
    for place, token in enumerate(tokens.ids):
        seen.page.locator("#input-tokens .chip").nth(place).click()
        assert seen.texts("#input-stages li")[-1] in (f"as a number: {token}", f"id {token}")


@pytest.mark.slow
def test_wrong_is_said_in_words(watched, served):
    seen = watched().open(served("decoder").url)
    seen.page.fill("#input-text", "")
    seen.page.click("#input-run")
    seen.page.locator("#input .problem", has_text="empty").wait_for()
    seen.wrong.clear()  # the browser itself notes an answer of 400
    seen.read("speak")
    assert seen.texts("#input .problem") == [""]
    vit = watched().open(served("vit").url)
    file = {"name": "no.png", "mimeType": "image/png", "buffer": b"not an image"}
    vit.page.set_input_files("#input-image", file)
    vit.page.locator("#input .problem", has_text="cannot be read").wait_for()

    def fails():
        raise InputError("the weights <b>are</b> gone")

    with serving(Opened("gone", fails)) as broken:
        page = watched().page
        page.goto(broken.url)
        page.locator("#status.error", has_text="the weights <b>are</b> gone").wait_for()


@pytest.mark.slow
def test_two_models(watched):
    """The same image and the same text, read by two models side by side."""
    with serving(Opened("one", lambda: toy("vit")), Opened("two", lambda: toy("vit"))) as both:
        seen = watched().open(both.url)
        image = picture(8)
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "PNG")
        seen.see("a.png", buffer.getvalue())
        seen.look("compare", "#compare-run")
        seen.page.click("#compare-run")
        seen.page.locator("#compare-kl").wait_for()
        assert seen.values("#compare-kl") == [0]
        assert seen.texts("#compare-shown h3") == ["A: one", "B: two"]
        assert seen.wrong == []


@pytest.mark.slow
def test_pictures_can_be_saved(live):
    """A drawing as SVG is XML with its colours in it; as PNG it is a PNG."""
    seen = live("decoder")
    seen.look("lens", ".save button")
    for kind, begins in (("SVG", b"<svg"), ("PNG", b"\x89PNG")):
        with seen.page.expect_download() as waiting:
            seen.page.click(f'#lens [aria-label="Save contributions as {kind}"]')
        data = waiting.value.path().read_bytes()
        assert data.startswith(begins)
        assert len(data) > 1000


# What is wider than its box and cannot be seen to be: no dots, no shade at the side, no scroll bar's place.
CUT = """() => [...document.querySelectorAll("body *")].filter((one) => {
  const style = getComputedStyle(one);
  const wider = one.offsetParent && one.scrollWidth > one.clientWidth + 1 && style.overflowX !== "visible";
  const shaded = style.backgroundImage.includes("gradient") || style.maskImage.includes("gradient");
  const hidden = style.clipPath.includes("inset") || one.tagName === "TEXTAREA";
  return wider && !shaded && !hidden && style.textOverflow !== "ellipsis";
}).map((one) => `${one.tagName}.${one.className} of ${one.closest("section")?.id}`)"""


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.slow
def test_no_page_is_wider_than_its_window_and_nothing_is_cut_without_a_cue(watched, served, width):
    for family in ("decoder", "vit"):
        seen = watched(viewport={"width": width, "height": 720}).open(served(family).url)
        offered = seen.data("nav a:not([hidden])", "view")
        for section in offered if width == 360 else ("flow", "attention", "ablate"):
            seen.look(section, "h2")
            assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
            assert seen.page.evaluate(CUT) == [], section
        if width == 360:  # without its shade, a wide table would be found
            wide = "document.querySelectorAll('.wide')"
            seen.page.evaluate(f"() => {wide}.forEach((one) => (one.style.background = 'none'))")
            assert any(seen.look(one, "h2") and seen.page.evaluate(CUT) for one in offered)
