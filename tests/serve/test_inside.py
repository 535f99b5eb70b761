"""A request sees inside its own text, in company."""

from __future__ import annotations

import base64

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.errors import InputError
from clearhead.inside.lens import lens
from clearhead.run.serve import pooling
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.limits import Limits
from clearhead.run.serve.sequence import ServeOptions
from tests import harness
from tests.serve import mixes
from tests.serve.served import serving
from tests.serve.test_http import call

PROMPT = list(range(20, 60))


def unpacked(value: dict) -> torch.Tensor:
    raw = np.frombuffer(base64.b64decode(value["base64"]), value["dtype"])
    return torch.from_numpy(raw.reshape(value["shape"]).copy())


def finished(engine: ServeEngine, *seqs):
    while engine.busy:
        engine.step()
    return [seq.wait(0) for seq in seqs]


@pytest.mark.parametrize("shape", ["rope-gqa", "windows", "states", "experts", "translator"])
def test_what_is_seen_equals_record_and_lens_and_leaves_others_their_bits(shape, byte_tokenizer):
    m = mixes.model(shape, byte_tokenizer)
    m.special.clear()
    engine = ServeEngine(m, Limits(block=8, exact=True))
    others = [list(range(60 + n, 60 + 9 * n + 3)) for n in range(3)]
    reported = {"max_new_tokens": 6, "alternatives": mixes.V}
    names = ("blocks.1.attention.*", "blocks.0.resid_post", "lens", "logits")

    def mix(serving: ServeOptions):
        seqs = [engine.submit(PROMPT, {"max_new_tokens": 5}, serving)]
        seqs += [engine.submit(other, reported) for other in others]
        return seqs[0], finished(engine, *seqs)

    mix(ServeOptions())  # so that the next two find the same in the pool
    _, before = mix(ServeOptions())
    seq, after = mix(ServeOptions(inside=names))
    assert [one.alternatives for one in after[1:]] == [one.alternatives for one in before[1:]]
    assert after[0].ids == before[0].ids == m.generate(PROMPT, 5, num_beams=1).ids
    source = None if seq.prompts.source is None else seq.prompts.source
    patterns = [name for name in names if name != "lens"]
    with torch.no_grad(), ch.record(m.model, *patterns) as seen:
        more = {} if source is None else {"source": source}
        m.model(torch.tensor([seq.prompt + after[0].ids]), **more)
    assert set(seq.inside) == {*seen, "lens"}
    for name, value in seen.items():
        assert harness.worst(unpacked(seq.inside[name]), value[0]) < 1e-5
    given = [seq.tokens] if source is None else [source[0].tolist(), seq.tokens]
    wanted, found = lens(m, *given), seq.inside["lens"]
    assert torch.equal(unpacked(found["top"]), wanted.top)
    assert [tuple(map(tuple, layer)) for layer in found["top_names"]] == list(wanted.top_names)
    assert harness.worst(unpacked(found["top_probabilities"]), wanted.top_probabilities) < 1e-5


def test_what_cannot_be_seen_is_refused_by_name(byte_tokenizer, monkeypatch):
    engine = ServeEngine(mixes.model("rope-gqa", byte_tokenizer))

    def ask(*names: str):
        return engine.submit(PROMPT, {"max_new_tokens": 4}, ServeOptions(inside=names))

    with pytest.raises(InputError, match=r'"blocks.1.atention.q" \(did you mean "blocks.1.attention.q"'):
        ask("lens", "blocks.1.atention.q")
    with pytest.raises(InputError, match="inside has 33 names"):
        ask(*["lens"] * 33)
    pattern = unpacked(
        finished_inside(engine, ask("blocks.0.attention.pattern"))["blocks.0.attention.pattern"]
    )
    monkeypatch.setattr(pooling, "MOST_VALUES", pattern.numel())
    ask("blocks.0.attention.pattern")
    with pytest.raises(InputError, match=f"inside would give {2 * pattern.numel():,} numbers of 44 tokens"):
        ask("blocks.*.attention.pattern")


def finished_inside(engine: ServeEngine, seq):
    finished(engine, seq)
    return seq.inside


def test_over_http_whole_and_streamed(byte_tokenizer):
    m = mixes.model("learned", byte_tokenizer)
    body = {"prompt": "Hello", "max_tokens": 3, "temperature": 0, "inside": ["blocks.0.attention.pattern"]}
    with serving({"m": ServeEngine(m)}) as at:
        whole = call(at, "/v1/completions", body)[2]["choices"][0]
        streamed = call(at, "/v1/completions", {**body, "stream": True})[2]
        wrong = call(at, "/v1/completions", {**body, "inside": ["lens", "nothing"]})
        several = call(at, "/v1/completions", {**body, "n": 2})
    pattern = unpacked(whole["inside"]["blocks.0.attention.pattern"])
    assert pattern.shape == (m.config.n_heads, 8, 8)
    assert (pattern.sum(-1) - 1).abs().max() < 1e-5
    assert whole["inside"]["blocks.0.attention.pattern"]["base64"] in streamed
    assert (wrong[0], several[0]) == (400, 400)
    assert '"nothing"' in wrong[2]["error"]["message"]
    assert "one text" in several[2]["error"]["message"]
