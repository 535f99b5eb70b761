"""The head atlas, the bench of two texts, and what a saved file has of them."""

import pytest

from clearhead.explorer.record import export, record
from tests.browser.test_export import offline
from tests.browser.test_numbers import INPUTS
from tests.explorer.toys import toy


@pytest.mark.ledger("F2")
@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
def test_a_file_has_the_inside_of_the_heads_it_opens_on(watched, family, tmp_path):
    """Every head where the page begins; elsewhere the file says what it has, and offers nothing else."""
    given, *target = INPUTS[family]
    seen, tried = offline(watched)
    made = record(toy(family), family, given, *target)
    seen.open(export(made, tmp_path / "page.html").as_uri())
    seen.look("head", "[data-source]")
    assert seen.texts("#head .problem") == [""] and seen.texts("#head-recorded") == [""]
    for entry in made["views"]["model"]["attentions"]:
        prefix = "" if entry["kind"] == "self" else f"{entry['kind']}."
        seen.page.evaluate("name => clearhead.store.set('head', name)", f"{prefix}{entry['layer']}.2")
        seen.page.locator("#head-which", has_text=f"Head {prefix}{entry['layer']}.2, read at").wait_for()
        assert seen.texts("#head .problem") == [""] and seen.texts("#head-recorded") == [""]
    if family == "decoder":
        seen.page.locator("#input-tokens .chip").nth(2).click()
        seen.page.locator("#head-recorded", has_text="only").wait_for()
        seen.look("path", "[data-go]").first.click()
        seen.page.locator("#path [data-edge]").first.wait_for()
        for edge in seen.page.eval_on_selector_all(
            "#path-table tr", "rows => rows.map((row) => [row.dataset.edge, row.textContent])"
        )[1:]:
            part, reader, source = edge[0].split("/")
            paths = (("Inside", f"stops/{part}/{reader}"), ("Why?", f"looks/{part}/{reader}/{source}"))
            for word, path in paths:
                assert (word in edge[1]) == (f"run/recorded/{path}" in made["views"])
    assert (seen.wrong, tried) == ([], [])


@pytest.mark.ledger("F2")
def test_a_file_opens_on_the_selection_it_was_saved_with(watched, served, tmp_path):
    """Another token, another head, one answer against another: all of it is in the file."""
    seen = watched().open(served("decoder").url)
    seen.read(INPUTS["decoder"][0])
    seen.look("path", "[data-edge]")
    seen.page.locator("#input-tokens .chip").nth(2).click()
    seen.page.locator("#answer-words", has_text="comes").wait_for()
    seen.page.locator("#answer-list [data-foil]").nth(1).click()
    seen.page.evaluate("() => clearhead.store.set('head', '1.2')")
    seen.wait("() => ['position=2', 'foil=', 'head=1.2'].every((one) => location.hash.includes(one))")
    seen.wait("() => document.querySelector('#path-sum').textContent.includes('less that of')")
    logit = seen.values("#path-logit")
    with seen.page.expect_download() as waiting:
        seen.page.click("#export")
    waiting.value.save_as(tmp_path / "page.html")
    saved, tried = offline(watched)
    saved.open((tmp_path / "page.html").as_uri())
    saved.look("path", "[data-edge]")
    assert saved.values("#path-logit") == pytest.approx(logit, abs=1e-6)
    saved.look("head", "[data-source]")
    assert (
        saved.texts("#head-which")[0].startswith("Head 1.2, read at")
        and "(2)" in saved.texts("#head-which")[0]
    )
    assert saved.texts("#head-recorded") == [""]
    assert (saved.wrong, tried) == ([], [])
