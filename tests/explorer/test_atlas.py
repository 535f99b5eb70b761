"""Interventions of the page: every single part off, patches from a second text, and their jobs."""

import json

import pytest

from clearhead.app.explorer.interventions import _activations, ablated
from clearhead.app.explorer.record import record_run
from clearhead.app.explorer.session import Ended, Opened, Session
from clearhead.app.explorer.views import begin
from clearhead.app.views import page_view as view
from clearhead.errors import InputError
from clearhead.inside.ablation import effect, single_parts
from clearhead.inside.lens import followed, lens
from clearhead.inside.patch import patch
from tests.explorer.toys import serving, toy

ONE, TWO = "they speak of the king", "they speak of the men"


@pytest.fixture
def session():
    opened = Opened("decoder", lambda: toy("decoder"))
    opened.open()
    return Session([opened])


def finished(session, run, path):
    """Ask about a job until its body is there."""
    session.job(run, path)
    session.jobs._jobs[f"{run}/{path}"].thread.join(60)
    answer = session.job(run, path)
    assert answer["ready"] and answer["done"] == answer["total"] > 0
    return answer["body"]


@pytest.mark.ledger("K3")
def test_a_job_computes_what_inside_says_of_every_part(session):
    m, run = toy("decoder"), session.begin({"text": ONE})["run"]
    body = finished(session, run, "effects/zero?position=3")
    assert list(body["parts"]) == list(single_parts(m.config))
    for name, one in list(single_parts(m.config).items())[::2]:
        alone = effect(m, ONE, **one, position=3)
        assert body["parts"][name]["kl"] == pytest.approx(alone.kl, abs=1e-5)
        after = alone.after.softmax(-1)
        for number, p in body["parts"][name]["after"].items():
            assert p == pytest.approx(float(after[int(number)]), abs=1e-5)
    assert body == view(session.run(run), "effects/zero?position=3")


@pytest.mark.ledger("K3")
def test_patches_are_those_of_patch_and_taking_a_head_is_one_of_them(session):
    m = toy("decoder")
    one, two = (session.begin({"text": text})["run"] for text in (ONE, TWO))
    for part in ("heads", "residual"):
        body = finished(session, one, f"patch/{two}/{part}?position=5")
        expected = patch(m, ONE, TWO, parts=(part,), position=5)
        assert body == json.loads(json.dumps(expected.to_dict()))
    # What `ablate` says with a head from the second text is the patch of that head the other way round.
    made = patch(m, TWO, ONE, parts=("heads",))
    taken = ablated(session.run(one), ["1.2"], [], [], "second", 5, session.run(two))
    whole = effect(m, ONE, ["1.2"], how="mean", means=_activations(session.run(one), session.run(two)))
    good, bad = (session.run(one).choices.find(name) for name in (made.answer, made.wrong))
    difference = float(whole.after[good] - whole.after[bad])
    share = (difference - made.corrupt_difference) / (made.clean_difference - made.corrupt_difference)
    assert share == pytest.approx(float(made.maps[0].values[1, 2]), abs=1e-5)
    assert taken["kl"] == pytest.approx(whole.kl, abs=1e-6) and taken["how"] == "second"


def test_what_cannot_be_taken_is_refused(session):
    one, longer = (session.begin({"text": text})["run"] for text in (ONE, f"{ONE} and the men"))
    with pytest.raises(InputError, match="equal length"):
        ablated(session.run(one), ["0.0"], [], [], "second", 0, session.run(longer))
    with pytest.raises(InputError, match="no second text"):
        ablated(session.run(one), ["0.0"], [], [], "second", 0)
    with pytest.raises(InputError, match="tokens"):  # the first answer may be that it is being computed
        finished(session, one, f"patch/{longer}/heads")
    with pytest.raises(InputError, match="no second run"):
        view(begin(toy("decoder"), ONE), "patch/r9/heads")


def test_a_job_that_nobody_asks_about_ends_and_begins_again(session, monkeypatch):
    monkeypatch.setattr("clearhead.app.explorer.session.FORGOTTEN", -1.0)
    run, path = session.begin({"text": ONE})["run"], "effects/zero?position=0"
    session.job(run, path)
    first = session.jobs._jobs[f"{run}/{path}"]
    first.thread.join(60)
    assert isinstance(first.error, Ended) and first.body is None
    assert first.view()["ready"] is False  # who asks just after it ended is told to ask again
    monkeypatch.undo()
    assert finished(session, run, path)["parts"]


@pytest.mark.ledger("K3")
def test_one_choice_followed_through_the_layers():
    seen = lens(toy("decoder"), ONE)
    found = followed(toy("decoder"), ONE, int(seen.chosen[-1]))
    assert found[:, -1].tolist() == pytest.approx(seen.chosen_probabilities[:, -1].tolist(), abs=1e-6)
    assert found.shape == seen.entropy.shape


def test_a_second_text_is_in_the_file(session):
    """What the bench asks of both sides, and the patches between them; the routes say the same."""
    with serving(Opened("decoder", lambda: toy("decoder"))) as served:
        while served.session.models[0].m is None:
            pass
        one, two = (served.json("run", {"text": text})["run"] for text in (ONE, TWO))
        assert served.ask(f"/inside/export?run={one}&second=r99")[0] == 404
        made = record_run(served.session.run(one), "decoder", "position=5", served.session.run(two))["views"]
        kept = [path for path in made if path.startswith("run/recorded/patch/second/")]
        assert len(kept) == 4 and made["second"]["run"] == "second"
        asked = kept[0].removeprefix("run/recorded/").replace("second", two)
        assert served.json(f"run/{one}/{asked}") == json.loads(json.dumps(made[kept[0]]))
        how = {"heads": ["1.0"], "how": "second", "second": two, "position": 5}
        assert served.json(f"run/{one}/ablate", how)["how"] == "second"
        assert served.ask(f"/inside/run/{one}/ablate", {**how, "second": "r99"})[0] == 404
