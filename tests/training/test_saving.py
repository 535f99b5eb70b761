"""Checkpoints are written while training goes on."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import clearhead as ch
from clearhead.errors import CheckpointError
from clearhead.learn.training import loop
from clearhead.learn.training.events import Saved, Stepped
from clearhead.learn.training.state import newest

SETTINGS = {
    **{"model.d_model": 8, "model.n_layers": 1, "model.n_heads": 2, "train.steps": 6, "train.save_every": 2},
    **{"train.samples": 0, "train.log_every": 1, "train.validate_every": 6, "train.device": "cpu"},
}


def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint of step 2 is held up until step 3 is done, and holds the weights of step 2."""
    (tmp_path / "a.txt").write_text("one two three four five\n" * 60)
    real, go_on, events = loop.save_checkpoint, threading.Event(), []

    def held_up(folder: Path, taken: Any, group: Any) -> Path:
        assert taken.state.step != 2 or go_on.wait(60)
        return real(folder, taken, group)

    def on_event(event: object) -> None:
        events.append(event)
        if isinstance(event, Stepped) and event.step == 3:
            go_on.set()

    monkeypatch.setattr(loop, "save_checkpoint", held_up)
    settings = {**SETTINGS, "train.keep_last": 9, "train.schedule": "constant", "train.warmup": 0}
    ch.train(tmp_path / "a.txt", out=tmp_path / "long", settings=settings, on_event=on_event)
    order = [(type(one).__name__, one.step) for one in events if isinstance(one, Saved | Stepped)]
    assert order.index(("Stepped", 3)) < order.index(("Saved", 2)) < order.index(("Saved", 4))
    ch.train(tmp_path / "a.txt", out=tmp_path / "short", settings={**settings, "train.steps": 2})
    short, long = (ch.load(tmp_path / name / "checkpoints" / "step-2").model for name in ("short", "long"))
    assert all(a.equal(b) for a, b in zip(short.parameters(), long.parameters()))


def test_a_checkpoint_that_cannot_be_written_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("one two three four five\n" * 60)
    real = loop.save_checkpoint

    def full(folder: Path, taken: Any, group: Any) -> Path:
        if taken.state.step == 4:
            raise CheckpointError("no space left")
        return real(folder, taken, group)

    monkeypatch.setattr(loop, "save_checkpoint", full)
    with pytest.raises(CheckpointError, match="no space left"):
        ch.train(tmp_path / "a.txt", out=tmp_path / "run", settings=SETTINGS)
    found = newest(tmp_path / "run")
    assert found is not None and found.name == "step-2"
