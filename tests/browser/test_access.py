"""Accessibility, by axe, in light and in dark: nothing serious."""

import pytest

from tests.browser.test_every_kind import KINDS

axe = pytest.importorskip("axe_playwright_python.sync_playwright")
SECTIONS = {
    "path": "[data-edge]",
    "head": "[data-source]",
    "flow": "[data-group]",
    "attention": "canvas.heat",
    "lens": "td[data-value]",
    "next": "tbody tr",
    "ablate": ".part",
    "cost": "#cost-flops",
    "worth": "[data-unit]",
    "ribbon": ".ribbon",
    "similar": "td[data-value]",
}
OWN = {
    "vectors": "similar",
    "encoder-decoder": "ribbon",
    "classifier": "worth",
    "tagger": "worth",
    "vit": "worth",
}


QUIET = "() => !document.querySelector('main [aria-busy]')"


@pytest.mark.ledger("F2")
@pytest.mark.parametrize("family", KINDS)
@pytest.mark.slow
def test_axe_finds_nothing_serious(watched, served, family):
    """Check all rules in light, and those about colours again in dark.

    The text is short, so that axe reads the page quickly.
    """
    # Bypass the policy, because axe is put in as a script.
    seen = watched(color_scheme="light", reduced_motion="reduce", bypass_csp=True).open(served(family).url)
    if family != "vit":
        seen.read("speak of", *(["it"] if family == "encoder-decoder" else []))
    if family == "vectors":
        seen.page.fill("#input-pair", "of it")
        seen.read("speak it")
    offered = seen.page.eval_on_selector_all(
        "nav a:not([hidden])", "all => all.map((one) => one.dataset.view)"
    )
    assert {"attention", "head", "flow", "cost", OWN.get(family, "path")} <= set(offered)
    for section in offered:
        seen.look(section, SECTIONS.get(section, "*"))
    seen.look("flow", "[data-group]")
    seen.page.locator("#flow-lane .step").first.click()
    seen.page.locator("#flow-numbers td").first.wait_for()
    if family == "decoder":
        seen.look("ablate", "[data-heads]").first.click()
        seen.page.locator("#ablate-table").wait_for()
        seen.look("compare", "#compare-run").click()
        seen.page.locator("#compare-table").wait_for()
        seen.page.click("#tour")
        seen.page.locator(".tour").wait_for()
    # All views at once, so that axe reads each of them.
    seen.page.evaluate(
        """async () => {
          for (const one of document.querySelectorAll("section")) one.hidden = false;
          for (let frame = 0; frame < 3; frame++) await new Promise(requestAnimationFrame);
        }"""
    )
    seen.page.add_style_tag(content="main [aria-busy] { opacity: 1 !important }")  # faint for a moment
    seen.wait(QUIET)
    assert serious(seen) == []
    seen.page.evaluate("() => { document.getElementById('theme').click(); }")
    assert seen.page.evaluate("document.documentElement.dataset.theme") == "dark"
    seen.wait(QUIET)
    assert serious(seen, {"runOnly": ["color-contrast", "link-in-text-block"]}) == []


def serious(seen, options=None):
    """What axe holds to be serious or worse."""
    found = (
        axe.Axe()
        .run(seen.page, options={"resultTypes": ["violations"], **(options or {})})
        .response["violations"]
    )
    return [
        (one["id"], one["impact"], [node["html"][:160] for node in one["nodes"][:4]])
        for one in found
        if one["impact"] in ("serious", "critical")
    ]
