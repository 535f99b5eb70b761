"""Tuned and Jacobian lenses: never worse than the logit lens, derivatives as autograd says; the command."""

from __future__ import annotations

import json

import pytest
import torch

import clearhead as ch
from clearhead.app.cli import main
from clearhead.inside.ablation import Examples
from clearhead.inside.lens import lens
from clearhead.inside.translators import Translators, fit_jacobian, fit_tuned
from clearhead.learn.batches.batch import Batch
from tests.harness import build, byte_tokenizer, some_ids

pytestmark = pytest.mark.ledger("T6")
ROWS = [row.tolist() for row in some_ids(40, 12, seed=5)]


def test_a_tuned_lens_is_never_worse_and_ends_in_the_model():
    m = ch.Model(build(n_layers=3))
    tuned = fit_tuned(m, ROWS, texts=True, steps=60, lr=3e-2)
    assert all(after <= before for after, before in zip(tuned.divergence, tuned.plain))
    assert tuned.divergence[0] < 0.8 * tuned.plain[0]
    plain, read = lens(m, ROWS[0]), lens(m, ROWS[0], translators=tuned)
    assert torch.equal(plain.top_probabilities[-1], read.top_probabilities[-1])  # the last layer, bit for bit
    assert not torch.equal(plain.top_probabilities[0], read.top_probabilities[0])


def test_without_steps_every_lens_is_the_logit_lens():
    m = ch.Model(build())
    tuned = fit_tuned(m, ROWS, texts=True, steps=0)
    assert tuned.divergence == tuned.plain
    plain, read = (lens(m, ROWS[0], translators=some) for some in (None, tuned))
    assert (plain.top_probabilities - read.top_probabilities).abs().max() < 1e-6


def test_a_layer_that_a_map_would_harm_keeps_the_logit_lens():
    """After a block that adds nothing the logit lens is exact: no map is better."""
    model = build()
    block = model.decoder.blocks[1]
    for layer in (block.attention.out, block.feedforward.down):
        layer.weight.data.zero_(), layer.bias.data.zero_()
    tuned = fit_tuned(model, ROWS, texts=True, steps=20, lr=3e-2)
    assert tuned.divergence[1] == tuned.plain[1] < 1e-6 < tuned.divergence[0] < tuned.plain[0]
    assert torch.equal(tuned.matrix[1], torch.eye(16)) and not tuned.bias[1].any()
    assert not torch.equal(tuned.matrix[0], torch.eye(16))


@pytest.mark.parametrize("changes", [{}, {"norm_position": "post"}, {"family": "encoder", "head": "mlm"}])
def test_a_jacobian_is_the_mean_derivative_of_the_last_state(changes):
    """The sum over this and later tokens, the mean over tokens and texts, by autograd's own Jacobian."""
    model = build(**changes).double()
    m = ch.Model(model)
    batches = [torch.tensor(row) for row in ROWS[:8]]
    if changes.get("head") == "mlm":
        data = Examples("mlm", tuple(Batch(ids[None], ids[None]) for ids in batches))
        found = fit_jacobian(m, data, most=6)
        read = batches[:6]
    else:
        found = fit_jacobian(m, [row.tolist() for row in batches], texts=True, most=100)
        read = [ids[:-1] for ids in sorted(batches, key=len)[:4]]  # the second batch of four is held out

    last = f"blocks.{model.main.spec.n_layers - 1}.resid_post"
    wanted = torch.zeros(2, 16, 16, dtype=torch.float64)
    for ids in read:
        for layer, tap in enumerate(("embedding", "blocks.0.resid_post")):
            with torch.no_grad(), ch.record(model, tap) as seen:
                model(ids[None])

            def run(state, tap=tap, ids=ids):
                with ch.edit(model, {tap: lambda x: state}), ch.record(model, last, detach=False) as ends:
                    model(ids[None])
                return ends[last]

            whole = torch.autograd.functional.jacobian(run, seen[tap])[0, :, :, 0]  # T' D T D
            wanted[layer] += whole.sum(0).mean(1) / len(read)
    assert (found.matrix - wanted).abs().max() < 1e-5


def test_files_and_refusals(tmp_path):
    m = ch.Model(build())
    found = fit_jacobian(m, ROWS[:12], texts=True, most=2)
    found.save(tmp_path / "lens.safetensors")
    loaded = Translators.load(tmp_path / "lens.safetensors")
    assert torch.equal(loaded.matrix, found.matrix) and loaded.divergence == found.divergence
    with pytest.raises(ch.InputError, match="fit one for this model"):
        lens(build(n_layers=3), ROWS[0], translators=loaded)
    (tmp_path / "no.safetensors").write_bytes(b"no")
    with pytest.raises(ch.InputError, match="is no lens"):
        Translators.load(tmp_path / "no.safetensors")
    with pytest.raises(ch.InputError, match='head "classifier"'):
        fit_tuned(build(family="encoder", head="classifier", n_classes=3), ROWS, texts=True)


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    tokenizer = byte_tokenizer()
    ch.Model(build(vocab_size=tokenizer.get_vocab_size()), tokenizer).save(tmp_path / "m")
    (tmp_path / "text.txt").write_text("a cat sat on a mat. the dog saw it and ran. " * 20)
    args = ["lens", str(tmp_path / "m"), "a cat"]
    file = str(tmp_path / "tuned.safetensors")
    main([*args, "--tuned", str(tmp_path / "text.txt"), "--save", file, "--json"])
    body = json.loads(capsys.readouterr().out)
    assert body["lens"] == "tuned" and len(body["lens_bits"]) == 2
    main([*args, "--through", file])
    assert "tuned lens" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*args, "--save", file])
    assert "add --tuned or --jacobian" in capsys.readouterr().err
