"""Sparse features: planted ones are found, edits equal the formulas, SAELens reads and writes the same.

pip install --no-deps --target build/saelens -r requirements-features.txt
PYTHONPATH=build/saelens:src python -m pytest tests/inside/test_features.py
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional as nnf

import clearhead as ch
from clearhead.errors import InputError
from clearhead.inside.features import Dictionary, find_taps, load
from clearhead.inside.features.report import measure, show_features
from clearhead.inside.features.streams import Stream, read_rows
from clearhead.inside.features.training import STATE, FeaturePlan, Trainer, fit
from tests.harness import build, some_ids, word_tokenizer, worst

pytestmark = pytest.mark.ledger("T2")
WORDS = ["<s>", "</s>", "sun", "moon", "rises", "sets", "and", "then", "late", "early"]
D, N = 16, 24


def drawn(
    kind: str = "autoencoder", seed: int = 0, reads=("blocks.1.feedforward.out",), **more
) -> Dictionary:
    """A dictionary of random weights of a model with two blocks of 16 dimensions."""
    writes = reads
    if kind.endswith("transcoder"):
        reads, writes = ("blocks.1.feedforward.in",), ("blocks.1.feedforward.out",)
    d = Dictionary(kind, reads, writes, D * len(reads), D * len(writes), N, **more)
    generator = torch.Generator().manual_seed(seed)
    for weight in d.parameters():
        weight.data = 0.3 * torch.randn(weight.shape, generator=generator)
    return d.requires_grad_(False)


def plain_encode(d: Dictionary, x: torch.Tensor) -> torch.Tensor:
    """Features in float64, one token and one feature at a time."""
    rows = []
    for token in x.double():
        pre = [float(token @ d.W_enc[:, n].double()) + float(d.b_enc[n]) for n in range(d.n_features)]
        best = sorted(range(len(pre)), key=lambda n: -pre[n])[: d.k]
        low = [0.0] * len(pre) if d.threshold is None else d.threshold.tolist()
        rows.append([
            max(value, 0.0) if (n in best if d.k else value > low[n]) else 0.0 for n, value in enumerate(pre)
        ])  # fmt: skip
    return torch.tensor(rows, dtype=torch.double)


def plain_forward(d: Dictionary, x: torch.Tensor) -> torch.Tensor:
    y = plain_encode(d, x) @ d.W_dec.double() + d.b_dec.double()
    return y if d.W_skip is None else y + x.double() @ d.W_skip.double().T


@pytest.fixture
def model() -> ch.Transformer:
    return build(d_model=D, n_heads=2, n_layers=2, vocab_size=10, max_positions=32)


@pytest.mark.parametrize("sparse", [{"k": 4}, {"jump": True}, {}], ids=["topk", "jumprelu", "relu"])
@pytest.mark.parametrize("kind", ["autoencoder", "transcoder", "skip-transcoder"])
def test_it_computes_the_formula_and_is_saved_whole(kind, sparse, tmp_path):
    d, x = drawn(kind, **sparse), torch.randn(5, D)
    assert worst(d.encode(x).double(), plain_encode(d, x)) < 1e-6
    assert worst(d(x).double(), plain_forward(d, x)) < 1e-6
    y = torch.randn(5, D)
    assert torch.equal((d(x).double() + d.error(x, y)).float(), y)
    d.save(tmp_path)
    again = load(tmp_path)
    assert (again.kind, again.at, again.out, again.k) == (d.kind, d.at, d.out, d.k)
    assert torch.equal(again(x), d(x))


@pytest.mark.parametrize("kind", ["autoencoder", "transcoder", "skip-transcoder"])
def test_edits_change_the_features_that_are_named_and_nothing_else(kind, model):
    d, ids = drawn(kind, jump=True), some_ids(2, 6, vocab=10)
    with torch.no_grad(), ch.record(model, d.at, d.out) as seen:
        clean = model(ids).logits
    a = d.encode(seen[d.at])
    one, two = (a > 0).sum((0, 1)).topk(2).indices.tolist()
    assert (a[..., [one, two]] > 0).any(0).all()

    def edited(changes):
        with torch.no_grad(), ch.edit(model, changes), ch.record(model, d.out) as changed:
            logits = model(ids).logits
        return logits, changed[d.out]

    unchanged, _ = edited(d.clamp({}))
    assert torch.equal(unchanged, clean)
    _, out = edited(d.steer(one, 2.0))
    assert worst(out, seen[d.out] + 2 * d.W_dec[one]) < 1e-6
    _, out = edited(d.ablate(one, two))
    assert worst(out, seen[d.out] - a[..., [one]] * d.W_dec[one] - a[..., [two]] * d.W_dec[two]) < 1e-6
    logits, out = edited(d.clamp({one: 1.5}))
    assert worst(out, seen[d.out] + (1.5 - a[..., [one]]) * d.W_dec[one]) < 1e-6
    assert worst(logits, clean) > 1e-3
    for name in (str(one), f"1.{one}", f"feature 1.{one}@5"):
        assert torch.equal(edited(d.clamp({name: 1.5}))[0], logits)
    wrongs = (
        lambda: d.steer(N, 1.0),
        lambda: d.ablate(-1),
        lambda: d.clamp({N: 0.0}),
        lambda: d.ablate("0.1"),
    )
    for wrong in wrongs:
        with pytest.raises(InputError, match=f"0 to {N - 1}"):
            wrong()
    cross = drawn("crosscoder", reads=("blocks.0.resid_post", "blocks.1.resid_post"))
    assert list(cross.steer(0, 1.0)) == ["blocks.0.resid_post", "blocks.1.resid_post"]
    with pytest.raises(InputError, match="crosscoder"):
        cross.ablate(0)


def planted(n: int = 32, d: int = 24) -> tuple[torch.Tensor, object]:
    """Directions, and blocks of activations with 2 of them each, far from zero."""
    directions = nnf.normalize(torch.randn(n, d, generator=torch.Generator().manual_seed(1)), dim=1)

    def block(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        on = torch.rand(4096, n, generator=generator) < 2 / n
        x = 5 + (on * (1 + 0.2 * torch.randn(4096, n, generator=generator))) @ directions
        return x, x

    return directions, block


@pytest.mark.parametrize("activation", ["topk", "batchtopk", "jumprelu"])
def test_planted_features_are_found(activation):
    directions, block = planted()
    plan = FeaturePlan(activation=activation, n_features=48, k=2, tokens=150_000, batch=256, lr=1e-2)
    d, _ = fit(block, plan)
    best = (nnf.normalize(d.W_dec, dim=1) @ directions.T).max(0).values
    chance = (nnf.normalize(torch.randn(48, 24), dim=1) @ directions.T).max(0).values
    assert float((best > 0.9).float().mean()) >= 0.9 and float((chance > 0.9).float().mean()) < 0.1
    x, _ = block(99)
    assert 1.5 < float((d.encode(x) > 0).sum(1).float().mean()) < 3
    left = (d(x) - x).square().sum() / (x - x.mean(0)).square().sum()
    assert float(left) < 0.25
    assert torch.allclose(d.W_dec.norm(dim=1), torch.ones(48), atol=1e-5)


def worded() -> ch.Model:
    model = build(d_model=D, n_heads=2, n_layers=2, vocab_size=10, max_positions=32)
    tokenizer = word_tokenizer(WORDS, "</s>")
    return ch.Model(model, tokenizer, special={"bos": 0, "eos": 1})


def texts(count: int = 60) -> list[str]:
    ids = torch.randint(2, 10, (count, 24), generator=torch.Generator().manual_seed(0))
    return [" ".join(WORDS[token] for token in row) for row in ids.tolist()]


@pytest.mark.parametrize("kind", ["autoencoder", "skip-transcoder", "crosscoder"])
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(kind, tmp_path, monkeypatch):
    m, options = worded(), {"kind": kind, "n_features": N, "k": 3, "tokens": 3000, "batch": 128, "length": 8}
    at = "blocks.*.resid_post" if kind == "crosscoder" else "blocks.1.feedforward"
    monkeypatch.setattr("clearhead.inside.features.streams.BLOCK", 512)
    monkeypatch.setattr("clearhead.inside.features.training.SAVE_EVERY", 0.0)
    monkeypatch.setattr(Stream.__init__, "__defaults__", (0, 512))
    whole = ch.train_features(m, texts(), at, folder=tmp_path / "whole", **options)

    save, saved = Trainer.save, []

    def stop(self, path):
        save(self, path)
        saved.append(path)
        if len(saved) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "save", stop)
    with pytest.raises(KeyboardInterrupt):
        ch.train_features(m, texts(), at, folder=tmp_path / "stopped", **options)
    monkeypatch.setattr(Trainer, "save", save)
    assert (tmp_path / "stopped" / STATE).is_file()
    with pytest.raises(InputError, match=r"lr 0\.001, not 0\.01"):
        ch.train_features(m, texts(), at, folder=tmp_path / "stopped", **options, lr=0.01)
    resumed = ch.train_features(m, texts(), at, folder=tmp_path / "stopped", **options)
    assert len(whole.losses) > 3 and resumed.losses == whole.losses
    for name, weight in whole.dictionary.state_dict().items():
        assert torch.equal(weight, resumed.dictionary.state_dict()[name]), name
    assert not (tmp_path / "stopped" / STATE).exists()
    with pytest.raises(InputError, match="overwrite"):
        ch.train_features(m, texts(), at, folder=tmp_path / "whole", **options)
    assert whole.losses[-1] < whole.losses[0]
    assert torch.equal(load(tmp_path / "whole").W_dec, whole.dictionary.W_dec)


def test_the_report_is_what_plain_passes_give():
    m = worded()
    rows, d = read_rows(m, texts(6), 8), drawn(jump=True)
    report = measure(m, d, rows)
    sums, active, left, seen_y, tokens = [0.0, 0.0, 0.0], 0, 0.0, [], 0
    for ids, _ in rows:
        row = torch.tensor([ids])
        with torch.no_grad(), ch.record(m.model, d.at) as seen:
            clean = m.model(row).logits
        y = seen[d.at].clone()
        replaced, zeros = y.clone(), y.clone()
        replaced[:, 1:], zeros[:, 1:] = plain_forward(d, y[0, 1:]).float(), 0
        passes = [clean]
        for value in (replaced, zeros):
            with torch.no_grad(), ch.edit(m.model, {d.at: lambda x, value=value: value}):
                passes.append(m.model(row).logits)
        for place, logits in enumerate(passes):
            p = logits[0, :-1].double().log_softmax(-1)
            sums[place] -= float(p[range(len(ids) - 1), row[0, 1:]].sum())
        active += int((plain_encode(d, y[0, 1:]) > 0).sum())
        left += float((replaced - y).double().square().sum())
        seen_y.append(y[0, 1:].double())
        tokens += len(ids) - 1
    every = torch.cat(seen_y)
    assert report.tokens == tokens
    for got, wanted in zip((report.loss, report.loss_replaced, report.loss_ablated), sums):
        assert got == pytest.approx(wanted / tokens, rel=1e-5)
    assert report.loss_recovered == pytest.approx((sums[2] - sums[1]) / (sums[2] - sums[0]), rel=1e-3)
    assert report.l0 == pytest.approx(active / tokens, rel=1e-5)
    variance = float((every - every.mean(0)).square().sum())
    assert report.variance_explained == pytest.approx(1 - left / variance, rel=1e-4)


def test_a_feature_is_shown_where_it_is_strongest(model):
    m, d = worded(), drawn(jump=True)
    some = texts(5)
    shown = show_features(m, d, some, features=[3, 7], top=4)
    strongest = []
    for text in some:
        ids = m.prompt_ids(text)
        with torch.no_grad(), ch.record(m.model, d.at) as seen:
            m.model(torch.tensor([ids]))
        a = d.encode(seen[d.at][0])[1:, 3]
        strongest += list(zip(a.tolist(), [WORDS[token] for token in ids[1:]]))
    strongest.sort(key=lambda pair: -pair[0])
    feature = shown.features[0]
    assert [context.token for context in feature.contexts] == [word for _, word in strongest[:4]]
    assert feature.activation == pytest.approx(strongest[0][0], rel=1e-5)
    assert feature.density == pytest.approx(sum(a > 0 for a, _ in strongest) / len(strongest), rel=1e-5)
    cosines = nnf.cosine_similarity(d.W_dec, d.W_dec[3:4])
    cosines[3] = -2
    assert feature.nearest[0][0] == int(cosines.argmax())
    # What is promoted: the norm before the head without its size, the unembedding, centred.
    norm = m.model.main.norm
    written = d.W_dec[3] - d.W_dec[3].mean() if type(norm).__name__ == "LayerNorm" else d.W_dec[3]
    scores = m.model.head.out.weight @ (written * norm.weight)
    scores = scores - scores.mean()
    assert feature.promoted[0] == (WORDS[int(scores.argmax())], pytest.approx(float(scores.max()), rel=1e-4))


@pytest.mark.parametrize("family", ["encoder", "encoder-decoder"])
def test_every_family_has_features(family):
    layers = {"n_encoder_layers": 2} if family == "encoder-decoder" else {}
    model = build(family=family, d_model=D, n_heads=2, n_layers=2, vocab_size=10, max_positions=32, **layers)
    special = {"bos": 0, "eos": 1, "decoder_start": 0}
    m = ch.Model(model, word_tokenizer(WORDS, "</s>"), special=special)
    data = texts(30) if family == "encoder" else list(zip(texts(30), reversed(texts(30))))
    places = (
        ["blocks.1.feedforward"]
        if family == "encoder"
        else ["encoder.blocks.1.resid_post", "blocks.0.cross.out"]
    )
    for at in places:
        trained = ch.train_features(m, data, at, n_features=N, k=3, tokens=600, batch=64, length=12)
        report = trained.report
        assert math.isfinite(report.loss_replaced) and report.loss_ablated != report.loss
        assert report.tokens > 10


@pytest.mark.parametrize(
    ("at", "kind", "says"),
    [
        ("blocks.1.feedfrward", "autoencoder", "did you mean"),
        ("blocks.1.attention.z", "autoencoder", "one vector for every token"),
        ("blocks.*.resid_post", "autoencoder", "crosscoder"),
        ("blocks.1.resid_post", "crosscoder", "one activation"),
        ("blocks.1.resid_mid", "transcoder", "another"),
        ("blocks.1.resid_mid", "sae", "kind"),
    ],
)
def test_what_cannot_be_is_refused(at, kind, says, model):
    with pytest.raises(InputError, match=says):
        find_taps(model.config, at, kind)


def test_the_commands(clearhead, tmp_path):
    worded().save(tmp_path / "m")
    (tmp_path / "text.txt").write_text("\n".join(texts(40)) + "\n")
    asked = f"--at blocks.1.feedforward --features {N} --k 3 --tokens 400 --batch 64 --length 8".split()
    paths = [str(tmp_path / "m"), str(tmp_path / "text.txt")]
    out = ["--output", str(tmp_path / "f"), "--plot", str(tmp_path / "f.png")]
    body = json.loads(clearhead("features", "train", *paths, *asked, *out, "--json").out)
    assert body["n_features"] == N and 0 <= body["report"]["dead"] <= 1 and (tmp_path / "f.png").exists()
    told = clearhead("features", "show", paths[0], str(tmp_path / "f"), paths[1], "--feature", "3").out
    assert "nearest" in told and "read" in told


# SAELens ----------------------------------------------------------------------------------------------------


@pytest.fixture
def sae_lens():
    return pytest.importorskip("sae_lens", reason="SAELens is not installed: see requirements-features.txt")


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("autoencoder", {"k": 4}), ("autoencoder", {"jump": True}), ("autoencoder", {}),
        ("crosscoder", {"k": 4}),
        ("transcoder", {}), ("transcoder", {"jump": True}), ("skip-transcoder", {}),
        ("skip-transcoder", {"jump": True}),
    ],
)  # fmt: skip
def test_saelens_opens_ours_and_we_open_its_own(sae_lens, kind, more, tmp_path):
    reads = (
        ("blocks.0.resid_post", "blocks.1.resid_post") if kind == "crosscoder" else ("blocks.1.resid_post",)
    )
    d = drawn(kind, reads=reads, **more)
    x = torch.randn(7, d.d_in)
    d.save(tmp_path / "ours")
    theirs = sae_lens.SAE.load_from_disk(tmp_path / "ours")
    assert torch.equal(theirs.encode(x), d.encode(x))
    assert worst(theirs(x), d(x)) < 1e-6
    theirs.save_model(tmp_path / "theirs")
    again = load(tmp_path / "theirs")
    assert (again.kind, again.at, again.out) == (d.kind, d.at, d.out)
    assert torch.equal(again(x), d(x))


@pytest.mark.parametrize("architecture", ["standard", "topk", "jumprelu"])
def test_a_dictionary_of_saelens_with_its_own_options_is_opened(sae_lens, architecture, tmp_path):
    options = {"k": 4, "rescale_acts_by_decoder_norm": True} if architecture == "topk" else {}
    sae = sae_lens.SAE.from_dict({
        "architecture": architecture, "d_in": D, "d_sae": N, "apply_b_dec_to_input": True, **options,
        "metadata": {"hook_name": "blocks.1.hook_mlp_out"},
    })  # fmt: skip
    for weight in sae.parameters():
        weight.data = 0.3 * torch.randn(weight.shape)
    sae.save_model(tmp_path)
    ours, x = load(tmp_path), torch.randn(9, D)
    assert ours.at == "blocks.1.feedforward.out"
    assert worst(ours(x), sae(x)) < 1e-5


def test_saelens_options_that_are_not_linear_are_refused(tmp_path: Path):
    d = drawn()
    d.save(tmp_path)
    config = json.loads((tmp_path / "cfg.json").read_text()) | {"normalize_activations": "layer_norm"}
    (tmp_path / "cfg.json").write_text(json.dumps(config))
    with pytest.raises(ch.CheckpointError, match="layer_norm"):
        load(tmp_path)
    with pytest.raises(InputError, match="no dictionary"):
        load(tmp_path / "nothing")
