"""Models that the tests of serving share."""

from __future__ import annotations

import pytest

import clearhead as ch
from clearhead.hub.tokens.chat import KNOWN
from clearhead.run.serve.speculation import RowPrice
from tests.serve import mixes


@pytest.fixture(scope="module")
def writer(byte_tokenizer) -> ch.Model:
    """A decoder with a chat template."""
    m = mixes.model("rope-gqa", byte_tokenizer)
    m.settings["chat_template"] = mixes.TEMPLATE
    return m


@pytest.fixture(scope="module")
def talker(byte_tokenizer) -> ch.Model:
    """A decoder that reads long conversations, with tools."""
    m = mixes.model("rope-gqa", byte_tokenizer, max_positions=2048)
    m.settings["chat_template"] = KNOWN["chatml"]
    return m


@pytest.fixture(scope="module")
def reader(byte_tokenizer) -> ch.Model:
    """An encoder of texts."""
    return mixes.model("learned", byte_tokenizer, family="encoder", head="none")


@pytest.fixture(scope="module")
def judge(byte_tokenizer) -> ch.Model:
    """A model of pairs."""
    return mixes.model("learned", byte_tokenizer, family="encoder", head="classifier", n_classes=1)


@pytest.fixture
def every_guess_pays(monkeypatch):
    """Draft tokens are verified, whatever steps have cost."""
    monkeypatch.setattr(RowPrice, "of_one_more", lambda *given: -1.0)
