"""Warnings are raised by what they name and by nothing else; the page shows a run as its log has it."""

import json
import random
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

import clearhead as ch
from clearhead.app.watch import address, state_of, watch
from clearhead.learn.training.events import warnings_of


def lines(losses, norms=None, steps=None):
    norms = norms or [1.0] * len(losses)
    return [
        {
            "event": "stepped",
            "step": 10 * number,
            "steps": steps or 10 * len(losses),
            "loss": loss,
            "norm": norm,
        }
        for number, (loss, norm) in enumerate(zip(losses, norms), start=1)
    ]


def falling(count):
    noise = random.Random(0)
    return [4.0 * 0.97**number + 0.05 * noise.random() for number in range(count)]


def validated(pairs):
    return [{"event": "validated", "step": step, "metrics": {"loss": loss}} for step, loss in pairs]


def kinds(log):
    return [(warned.kind, warned.step) for warned in warnings_of(log)]


def test_each_warning_has_its_cause_and_a_good_run_has_none():
    good = lines(falling(60)) + validated([(200, 2.0), (400, 1.5), (600, 1.4)])
    assert kinds(good) == []
    spiked = falling(60)
    spiked[40:43] = [5.0, 4.5, 4.0]
    assert kinds(lines(spiked)) == [("spike", 410)]  # one, not three
    assert kinds(lines(falling(60), [1.0] * 50 + [30.0] + [1.0] * 9)) == [("gradient", 510)]
    assert kinds(lines([4.0] * 60)) == [("stuck", 600)]
    assert kinds(lines([4.0] * 60, steps=6000)) == []  # too early to say
    worse = lines(falling(60)) + validated([(100, 2.0), (200, 1.5), (300, 1.6), (400, 1.7), (600, 1.9)])
    assert kinds(worse) == [("overfitting", 600)]
    assert "than at step 200 (1.5, now 1.9)" in warnings_of(worse)[0].text
    skipped = [{"event": "skipped", "step": 7, "loss": None, "norm": None, "skipped": 1}]
    assert kinds(lines(falling(30)) + skipped) == [("skipped", 7)]
    gaps = lines([None, *falling(30)])  # losses that were not finite are null
    assert kinds(gaps) == []


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("watch")
    (folder / "text.txt").write_text("".join(f"{n} and {n + 1} make {2 * n + 1}. <b>&\n" for n in range(200)))
    settings = {
        "data.max_length": 16, "model.d_model": 16, "model.n_layers": 1, "model.n_heads": 2, "train.steps": 6,
        "train.validate_every": 3, "train.device": "cpu", "train.log_every": 1,
    }  # fmt: skip
    out = folder / "run"
    ch.train(folder / "text.txt", recipe="char-gpt-cpu", settings=settings, out=out)
    return out


def test_the_page_has_the_log_and_answers_to_its_own_names_alone(run: Path):
    server = watch(run)
    try:
        told = json.load(urlopen(f"{address(server)}run"))
        assert told == json.loads(json.dumps(state_of(run)))
        assert [line["step"] for line in told["log"] if line["event"] == "stepped"] == [1, 2, 3, 4, 5, 6]
        assert told["recipe"]["train"]["steps"] == 6 and told["name"] == "run"
        page = urlopen(address(server))
        assert "default-src 'none'" in page.headers["Content-Security-Policy"]
        for path, host, code in (("run", "evil.example", 403), ("../etc", None, 404)):
            request = Request(address(server) + path, headers={"Host": host} if host else {})
            with pytest.raises(HTTPError) as refused:
                urlopen(request)
            assert refused.value.code == code
        with pytest.raises(ch.InputError, match="cannot be used"):
            watch(run, server.server_port)
    finally:
        server.shutdown()
        server.server_close()
