"""The first second: an example is there while the model loads, and then makes room for it.

That it is one second, benchmarks/run.py explorer measures.
"""

import threading

import pytest

from clearhead.app.explorer.session import Opened
from clearhead.inside.inputs import prepare
from tests.explorer.toys import serving, toy


@pytest.mark.ledger("F2")
@pytest.mark.slow
def test_an_example_until_the_model_is_there(watched):
    """Every section of the example works; nothing of it stays when the model has come."""
    may = threading.Event()

    def slowly():
        may.wait(60)
        return toy("decoder")

    with serving(Opened("slow", slowly)) as served:
        seen = watched()
        seen.page.goto(served.url)
        seen.page.locator("#input-tokens .chip").first.wait_for()
        assert "loading slow" in seen.texts("#model-name")[0]
        assert "recorded" in seen.page.inner_text("#banner")
        assert seen.page.is_disabled("#input-run")
        for section, ready in {
            "flow": ".step",
            "attention": "canvas.heat",
            "lens": "td[data-value]",
            "next": "tbody tr",
            "cost": "#cost-flops",
        }.items():
            seen.look(section, ready)
        may.set()
        seen.wait("() => window.clearhead && clearhead.store.get('run') && clearhead.source.live")
        given = seen.page.evaluate("clearhead.store.get('model').example.text")
        assert seen.texts("#input-tokens .chip > span") == list(prepare(toy("decoder"), given).tokens.labels)
        assert not seen.page.is_disabled("#input-run")
        seen.read("speak")
        assert seen.page.get_attribute("#export", "href").endswith(
            seen.page.evaluate("clearhead.store.get('run').run")
        )
        assert seen.wrong == []
