"""Induction on a trained model of two layers: the page finds both of its heads without being told."""

import re

import pytest

from clearhead.app.explorer.session import Opened
from clearhead.inside.attribution import looks, paths
from clearhead.run.api import load
from tests.browser.test_kinds import saved
from tests.explorer.toys import serving
from tests.inside.test_heads import induction_models

IDS = [3, 7, 1, 9, 4, 12] * 2 + [3, 7]
LAST = len(IDS) - 1
BACK = """() => [...document.querySelectorAll("#path-picture .path-why")].map((one) => one.textContent)"""


@pytest.mark.ledger("F2", "K3")
@pytest.mark.slow
def test_the_path_of_a_repeated_token_runs_through_two_heads(watched, tmp_path_factory, tmp_path):
    """The sentence names the head that copies, a dashed arc the head that had looked one token back."""
    m = load(induction_models(tmp_path_factory) / "2")
    with serving(Opened("repeats", lambda: m, {"ids": IDS})) as here:
        seen = watched().open(here.url)
        seen.look("path", "[data-edge]")
        file, tried = saved(seen, watched, tmp_path / "page.html")
        for page in (seen, file):
            copies = next(edge for edge in paths(m, IDS).strongest(20) if edge.value > 0)
            assert copies.part.startswith("1.") and (IDS[copies.source - 1], IDS[copies.source]) == (7, 1)
            said = page.page.locator(".path-said").inner_text()
            head, token, source, value = re.match(
                r"Head (\S+) copied (\d+) from \d+ \(token (\d+)\): the strongest link.*, \+([\d.]+)", said
            ).groups()
            assert (head, token, int(source)) == (copies.part, "1", copies.source)
            assert float(value) == pytest.approx(copies.value, rel=0.01)
            back = next(
                one
                for one in looks(m, IDS, copies.part, LAST, copies.source)
                if one.value > 0 and one.reader == copies.source
            )
            assert back.part.startswith("0.") and back.source == copies.source - 1  # it looks one token back
            words = f"from “7” ({back.source}) to “1” ({back.reader})"
            page.wait(f"() => ({BACK})().some((one) => one.includes('{words}'))")
            arc = next(one for one in page.page.evaluate(BACK) if words in one)
            assert arc.startswith(f"head {back.part}: ")
            assert float(arc.split()[2]) == pytest.approx(back.value, rel=0.01)
        assert (seen.wrong, file.wrong, tried) == ([], [], [])
