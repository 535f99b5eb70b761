"""Accessibility, by axe, in light and in dark: nothing serious."""

import pytest

axe = pytest.importorskip("axe_playwright_python.sync_playwright")
SECTIONS = {
    "path": "[data-edge]",
    "graph": "[data-node]",
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
    "denoising": "td.fresh",
}
# The whole page of a decoder, and of the other kinds what a decoder has not.
OWN = {
    "decoder": (),
    "vectors": ("input", "similar"),
    "encoder-decoder": ("input", "ribbon"),
    "classifier": ("answer", "worth"),
    "vit": ("input", "worth"),
    "diffusion": ("input", "denoising"),
}
TEXT_WIDTH = "document.getElementById('input-text').clientWidth || innerWidth"  # 0 where it is hidden
# What nobody has looked at since the last text was read is busy until somebody does.
QUIET = "names => !names.some((name) => document.querySelector(`#${name} [aria-busy]`))"


@pytest.mark.ledger("F2")
@pytest.mark.parametrize("family", OWN)
@pytest.mark.slow
def test_axe_finds_nothing_serious(watched, served, family):
    """Check all rules in light, and those about colours again in dark; and all of it at a phone's width.

    The text is short, so that axe reads the page quickly.
    """
    # Bypass the policy, because axe is put in as a script.
    seen = watched(color_scheme="light", reduced_motion="reduce", bypass_csp=True).open(served(family).url)
    if family != "vit":
        seen.read("speak of", *(["it"] if family == "encoder-decoder" else []))
    if family == "vectors":
        seen.page.fill("#input-pair", "of it")
        seen.read("speak it")
    offered = seen.data("nav a:not([hidden])", "view")
    assert {"attention", "head", "flow", "cost", *OWN[family][1:]} <= set(offered)
    looked = OWN[family] or ["input", *offered]
    for section in looked[1:]:
        seen.look(section, SECTIONS.get(section, "*"))
    if family == "decoder":
        seen.look("flow", "[data-group]")
        seen.page.locator("#flow-lane .step").first.click()
        seen.page.locator("#flow-numbers td").first.wait_for()
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
    seen.wait(QUIET, [*looked])
    colours = {"runOnly": ["color-contrast", "link-in-text-block"]}
    for width in (1280, 390):
        seen.page.set_viewport_size({"width": width, "height": 844})
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
        assert seen.page.evaluate(TEXT_WIDTH) >= 150
        for theme, rules in (("light", {}), ("dark", colours)):
            if seen.page.evaluate("document.documentElement.dataset.theme || 'light'") != theme:
                seen.page.evaluate("() => { document.getElementById('theme').click(); }")
            seen.wait(QUIET, [*looked])
            assert serious(seen, OWN[family], **rules) == [], (width, theme)


def serious(seen, sections, **options):
    """What axe holds to be serious or worse, of some sections or of the whole page."""
    context = {"include": [[f"#{section}"] for section in sections]} if sections else None
    found = (
        axe.Axe().run(seen.page, context, {"resultTypes": ["violations"], **options}).response["violations"]
    )
    return [
        (one["id"], one["impact"], [node["html"][:160] for node in one["nodes"][:4]])
        for one in found
        if one["impact"] in ("serious", "critical")
    ]
