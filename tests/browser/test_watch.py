"""The page of a training run, in a browser."""

from pathlib import Path

from clearhead.app.watch import address, state_of, watch
from tests.training.test_watch import run as run


def test_a_browser_draws_the_run(run: Path, chromium):
    server = watch(run)
    page = chromium.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    try:
        page.goto(address(server))
        page.wait_for_selector("#loss svg")
        assert "Finished at step 6" in page.inner_text("#status")
        points = page.get_attribute("#loss polyline >> nth=0", "points")
        assert points is not None and len(points.split()) == 6
        rows = page.locator("#validations tr").count()
        assert rows == 1 + 2 + sum(
            line["event"] == "validated" and line["step"] == 0 for line in state_of(run)["log"]
        )
        assert page.locator("#samples pre").count() > 0
        assert not [problem for problem in problems if "favicon" not in problem]
    finally:
        page.close()
        server.shutdown()
        server.server_close()
