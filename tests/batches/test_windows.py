"""Rows of one length: windows over text, packed documents, hidden tokens and spans, pictures."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.errors import InputError
from clearhead.learn.batches.batch import IGNORE
from clearhead.learn.batches.ragged import pack
from clearhead.learn.batches.windows import corrupt_spans, mask_tokens, noise_sizes
from clearhead.learn.data.examples import Chunk, Corpus
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.losses import batch_loss
from clearhead.learn.tasks.entries.classify import augment, mix
from clearhead.learn.tasks.table import TASKS as SPECS
from tests.batches.toys import (
    batches_of,
    corpus_of,
    encoded_of,
    image_corpus,
    loss_of,
    model_for,
    same,
    special_of,
    text_corpus,
    tokenizer_for,
)

pytestmark = pytest.mark.ledger("H1", "H6")
TASKS = ("lm", "mlm", "denoise", "seq2seq", "classify", "tag", "answer", "image")


@pytest.mark.parametrize("task", TASKS)
def test_a_batch_follows_from_its_number(task, tmp_path):
    changes = {"augment": ("flip", "shift", "erase")} if task == "image" else {}
    batches = batches_of(task, tmp_path, batch_size=8, **changes)
    numbers = (0, 3, batches.per_epoch, 2 * batches.per_epoch + 1)
    first = {number: batches.at(number) for number in numbers}
    fresh = batches_of(task, tmp_path, batch_size=8, **changes)
    for number in reversed(numbers):
        assert same(first[number], batches.at(number))
        assert same(first[number], fresh.at(number))
    other = batches_of(task, tmp_path, batch_size=8, seed=1, **changes)
    assert not all(same(first[number], other.at(number)) for number in numbers)
    assert not same(first[0], first[batches.per_epoch])  # the second epoch has an order of its own


@pytest.mark.parametrize("task", TASKS)
def test_validation_is_the_same_each_time_and_leaves_nothing_out(task, tmp_path):
    batches = batches_of(task, tmp_path, training=False, batch_size=8)
    once, again = list(batches.all()), list(batches.all())
    assert len(once) == batches.per_epoch and all(same(a, b) for a, b in zip(once, again))
    numbers = torch.cat([batch.numbers for batch in once])
    assert len(numbers.unique()) == len(numbers)
    if task == "image":
        assert len(numbers) == len(image_corpus().validation)
    elif task in ("seq2seq", "classify", "tag"):
        assert sorted(numbers.tolist()) == list(range(len(corpus_of(task).validation)))


# The next token ---------------------------------------------------------------------------------------------


def test_validation_asks_for_every_token_but_the_first_once(tmp_path):
    batches = batches_of("lm", tmp_path, training=False, batch_size=3, length=32)
    stream = encoded_of("lm", tmp_path, "validation")["ids"]
    targets = torch.cat([batch.targets.reshape(-1) for batch in batches.all()])
    assert targets[targets != IGNORE].tolist() == stream[1:].tolist()
    assert sum(batch.n_targets for batch in batches.all()) == len(stream) - 1
    inputs = torch.cat([batch.ids.reshape(-1) for batch in batches.all()])
    kept = torch.cat([real(batch.ids, batch.mask).reshape(-1) for batch in batches.all()])
    assert inputs[kept].tolist() == stream[:-1].tolist()
    last = list(batches.all())[-1]
    # The stream does not fill its last row: otherwise this test proves less.
    assert last.mask is not None and not last.mask.all()


def test_a_share_of_the_tokens_read_is_replaced_in_training_and_no_target(tmp_path):
    plain, noisy = (batches_of("lm", tmp_path, batch_size=8, token_dropout=share) for share in (0.0, 0.5))
    pairs = [(plain.at(index), noisy.at(index)) for index in range(20)]
    assert all(torch.equal(a.targets, b.targets) and same(b, noisy.at(n)) for n, (a, b) in enumerate(pairs))
    ids = np.asarray(plain.ids)
    repeated = float(((np.bincount(ids) / len(ids)) ** 2).sum())  # a token that is drawn may be the same
    tokens = sum(a.ids.numel() for a, _ in pairs)
    share = sum(int((a.ids != b.ids).sum()) for a, b in pairs) / tokens
    assert share == pytest.approx(0.5 * (1 - repeated), abs=4 * (0.25 / tokens) ** 0.5)
    judged = [batches_of("lm", tmp_path, training=False, token_dropout=each) for each in (0.0, 0.5)]
    assert same(judged[0].at(0), judged[1].at(0))


@pytest.mark.parametrize("rows", [1, 4, 7])
def test_an_epoch_covers_the_text_with_windows_side_by_side(rows, tmp_path):
    length = 16
    batches = batches_of("lm", tmp_path, batch_size=rows, length=length)
    stream = encoded_of("lm", tmp_path)["ids"].astype(np.int64)
    per_epoch = (len(stream) - 1) // length
    starts, offsets = [], set()
    for index in range(math.ceil(3 * per_epoch / rows)):
        batch = batches.at(index)
        assert len(batch) == rows and batch.mask is None
        for start, ids, targets in zip(batch.numbers.tolist(), batch.ids, batch.targets):
            assert ids.tolist() == stream[start : start + length].tolist()
            assert targets.tolist() == stream[start + 1 : start + length + 1].tolist()
            starts.append(start)
    for epoch in range(3):
        chosen = sorted(starts[epoch * per_epoch : (epoch + 1) * per_epoch])
        assert chosen != starts[epoch * per_epoch : (epoch + 1) * per_epoch]  # shuffled
        asked = np.zeros(len(stream), dtype=int)
        for start in chosen:
            asked[start + 1 : start + length + 1] += 1
        # There is no gap and no overlap up to the last window.
        assert (asked[chosen[0] + 1 : chosen[-1] + 1] == 1).all()
        assert (asked == 0).sum() <= length and (asked > 1).sum() < length
        offsets.add(chosen[0])
    assert len(offsets) > 1


def test_a_text_shorter_than_a_row_is_one_row(tmp_path):
    corpus = Corpus("text", [Chunk("the cat", True)], [Chunk("sat", True)], (), "short", (), 7)
    batches = batches_of("lm", tmp_path, kind="char", corpus=corpus, length=32)
    assert batches.at(0).ids.shape == (1, 6) and same(batches.at(0), batches.at(1))
    assert "7 tokens" in batches.notes[0]
    one = dataclasses.replace(corpus, train=[Chunk("c", True)], fingerprint="one")
    with pytest.raises(InputError, match="1 tokens, too few"):
        batches_of("lm", tmp_path, kind="char", corpus=one)
    nothing = dataclasses.replace(corpus, train=[], fingerprint="nothing")
    for task in ("lm", "mlm", "denoise"):
        with pytest.raises(InputError, match="no examples for training"):
            batches_of(task, tmp_path, corpus=nothing)


def test_batch_tokens_set_the_rows(tmp_path):
    assert batches_of("lm", tmp_path, length=16, batch_tokens=100).at(0).ids.shape == (6, 16)


# Packed documents -------------------------------------------------------------------------------------------


def test_packed_documents_come_out_as_they_would_alone(tmp_path, differences):
    length, special = 48, special_of("lm")
    corpus = text_corpus(30, 1, 25)
    batches = batches_of("lm", tmp_path, corpus=corpus, packing="isolated", length=length, batch_size=4)
    tokenizer = tokenizer_for("lm")
    text, documents = "", []
    for chunk in corpus.train:
        text += chunk.text
        if chunk.ends:
            documents.append(tokenizer.encode(text).ids + [special["eos"]])
            text = ""
    model = model_for("lm", tokenizer.get_vocab_size(), length)
    wanted, whole = [], 0
    for document in documents:
        sequence = [special["bos"], *document]
        pieces = [sequence[at : at + length + 1] for at in range(0, len(document), length)]
        whole += len(pieces) == 1
        wanted += [(tuple(piece[:-1]), tuple(piece[1:])) for piece in pieces]
    # Both kinds are there: those that fit and those that do not.
    assert whole > 10 and len(wanted) > len(documents)
    found = []
    rows = math.ceil(batches.n_rows / 4)
    for index in range(rows):
        batch = batches.at(index)
        with torch.no_grad():
            packed = model(**batch.arguments()).logits
        for row in range(len(batch)):
            if index * 4 + row >= batches.n_rows:
                continue  # of the next epoch
            for document in batch.documents[row].unique():
                slots = (batch.documents[row] == document) & batch.mask[row]
                ids, targets = batch.ids[row][slots], batch.targets[row][slots]
                found.append((tuple(ids.tolist()), tuple(targets.tolist())))
                with torch.no_grad():
                    alone = model(ids[None]).logits[0]
                assert differences.see("packed against alone", packed[row][slots], alone) < 1e-5
    assert sorted(found) == sorted(wanted)
    assert batches.waste < 0.1


def test_packing_puts_everything_somewhere_and_overfills_nothing():
    lengths = np.random.default_rng(0).integers(1, 101, 2000)
    row_of, n_rows = pack(lengths, 100)
    filled = np.bincount(row_of, weights=lengths, minlength=n_rows)
    assert filled.max() <= 100 and filled.min() > 0
    assert n_rows <= math.ceil(lengths.sum() / 100) * 1.02


# Hidden tokens and spans ------------------------------------------------------------------------------------


def test_masking_hits_its_shares(tmp_path):
    special = special_of("mlm")
    batches = batches_of("mlm", tmp_path, batch_size=16, length=64, corpus=text_corpus(200, seed=3))
    encoded = encoded_of("mlm", tmp_path, corpus=text_corpus(200, seed=3))
    chances = chosen = masked = kept = 0
    originals = encoded["ids"].astype(np.int64)
    for index in range(batches.per_epoch):
        batch = batches.at(index)
        for start, ids, targets in zip(batch.numbers.tolist(), batch.ids, batch.targets):
            original = torch.tensor([special["cls"], *originals[start : start + 62], special["sep"]])
            ordinary = ~torch.isin(original, torch.tensor(list(special.values())))
            asked = targets != IGNORE
            assert asked.any() and not (asked & ~ordinary).any()
            assert (targets[asked] == original[asked]).all() and (ids[~asked] == original[~asked]).all()
            replaced = asked & (ids != special["mask"]) & (ids != original)
            assert not torch.isin(ids[replaced], torch.tensor(list(special.values()))).any()
            chances, chosen = chances + int(ordinary.sum()), chosen + int(asked.sum())
            masked += int((ids[asked] == special["mask"]).sum())
            kept += int((ids == original)[asked].sum())

    def within(count: int, of: int, share: float) -> bool:
        return abs(count - of * share) < 4 * math.sqrt(of * share * (1 - share))

    assert chances > 10_000
    assert within(chosen, chances, 0.15)
    assert within(masked, chosen, 0.8)
    vocabulary = encoded.vocab_size - len(set(special.values()))
    # A token drawn at random may be the one that stood there.
    assert within(kept, chosen, 0.1 + 0.1 / vocabulary)


def test_each_row_has_a_target_and_special_tokens_are_never_hidden():
    ids = np.tile(np.arange(5, 15), (2000, 1))
    hideable = np.zeros(ids.shape, dtype=bool)
    hideable[:, 3:5] = True
    hideable[0] = False
    seen, targets = mask_tokens(ids, hideable, 0.01, 4, np.arange(5, 15), np.random.default_rng(0))
    asked = targets != IGNORE
    assert not asked[~hideable].any() and asked[1:].any(1).all() and not asked[0].any()
    assert (seen[~asked] == ids[~asked]).all()


@pytest.mark.parametrize("length", [1, 2, 3, 10, 37, 200])
@pytest.mark.parametrize(("share", "span"), [(0.15, 3.0), (0.5, 1.0), (0.9, 5.0)])
def test_source_and_target_give_the_text_back(length, share, span):
    rows = np.random.default_rng(0).integers(0, 1000, (20, length))
    noise, spans = noise_sizes(length, share, span, 100)
    source, target = corrupt_spans(rows, noise, np.arange(2000, 2000 + spans), np.random.default_rng(1))
    assert source.shape == (20, length - noise + spans) and target.shape == (20, noise + spans)
    for row, left, missing in zip(rows.tolist(), source.tolist(), target.tolist()):
        assert [token for token in left if token >= 2000] == list(range(2000, 2000 + spans))
        assert not any(a >= 2000 and b >= 2000 for a, b in itertools.pairwise(left))  # spans do not touch
        assert joined(left, missing) == row


def joined(source: list[int], target: list[int], first: int = 2000) -> list[int]:
    """The text that a source with sentinels and its target stand for."""
    spans: dict[int, list[int]] = {}
    for token in target:
        if token >= first:
            spans[token] = last = []
        else:
            last.append(token)
    return [token for left in source for token in (spans[left] if left >= first else [left])]


def test_spans_are_spread_evenly():
    hidden = np.zeros(20)
    rows = np.tile(np.arange(20), (4000, 1))
    _, target = corrupt_spans(rows, 6, np.array([100, 101]), np.random.default_rng(0))
    np.add.at(hidden, target[target < 100], 1)
    assert hidden.min() > 0.25 * hidden.max()  # the ends too, though they have neighbours on one side only


@pytest.mark.parametrize("training", [True, False])
def test_denoise_batches(training, tmp_path):
    special, length = special_of("denoise"), 48
    batches = batches_of("denoise", tmp_path, training=training, batch_size=4, length=length)
    stream = encoded_of("denoise", tmp_path, "train" if training else "validation")["ids"].astype(np.int64)
    sentinels = list(encoded_of("denoise", tmp_path).sentinels)
    assert len(sentinels) == 100
    code = {token: 2000 + number for number, token in enumerate(sentinels)}
    text = []
    for index in range(batches.per_epoch):
        batch = batches.at(index)
        assert batch.source.shape[1] <= length and batch.ids.shape[1] <= length
        if training:
            assert batch.source.shape[1] >= length - 2 and batch.mask is None and batch.source_mask is None
        for row, start in enumerate(batch.numbers.tolist()):
            target = batch.targets[row][batch.targets[row] != IGNORE].tolist()
            real = len(target)
            assert target[-1] == special["eos"]
            assert batch.ids[row, :real].tolist() == [special["bos"], *target[:-1]]
            every = torch.ones(batch.source.shape, dtype=torch.bool)
            mask = every[row] if batch.source_mask is None else batch.source_mask[row]
            source = batch.source[row][mask].tolist()
            assert source[-1] == special["eos"]
            back = joined(*([code.get(token, token) for token in side[:-1]] for side in (source, target)))
            assert back == stream[start : start + len(back)].tolist()
            text += back
    if not training:
        assert text == stream.tolist()


# Pictures ---------------------------------------------------------------------------------------------------


def test_pictures_are_normalised_by_the_training_set(tmp_path):
    corpus = image_corpus()
    batches = batches_of("image", tmp_path, batch_size=10)
    batch = batches.at(0)
    assert batch.ids.shape == (10, 3, 8, 8) and batch.ids.dtype == torch.float32
    scaled = corpus.train.pixels.astype(np.float64) / 255
    mean, std = scaled.mean((0, 1, 2)), scaled.std((0, 1, 2))
    wanted = ((scaled - mean) / std)[batch.numbers.numpy()].transpose(0, 3, 1, 2)
    assert np.abs(batch.ids.numpy() - wanted).max() < 1e-5
    assert batch.targets.tolist() == corpus.train.labels[batch.numbers.numpy()].tolist()
    for epoch in range(2):  # each once an epoch
        numbers = torch.cat([batches.at(epoch * 5 + index).numbers for index in range(5)])
        assert sorted(numbers.tolist()) == list(range(50))
    validation = next(batches_of("image", tmp_path, training=False, batch_size=10, augment=("flip",)).all())
    # Validation pictures are neither changed nor shuffled.
    wanted = ((corpus.validation.pixels / 255 - mean) / std).transpose(0, 3, 1, 2)
    assert np.abs(validation.ids.numpy() - wanted).max() < 1e-5


def test_augmentations_move_pixels_and_invent_none():
    pixels = np.arange(1, 1 + 40 * 3 * 16 * 16, dtype=np.float32).reshape(40, 3, 16, 16)
    flipped = augment(pixels, ("flip",), np.random.default_rng(0))
    mirrored = (flipped == pixels[..., ::-1]).all((1, 2, 3))
    assert 5 < mirrored.sum() < 35 and (flipped == pixels)[~mirrored].all()
    shifted = augment(pixels, ("shift",), np.random.default_rng(0))
    seen = set()
    for before, after in zip(pixels, shifted):
        y, x = np.argwhere(after[0] != 0)[0]
        dy, dx = divmod(int(after[0, y, x] - before[0, 0, 0]), 16)
        dy, dx = dy - y, dx - x
        wanted = np.zeros_like(before)
        there = before[:, max(0, dy) : 16 - max(0, -dy), max(0, dx) : 16 - max(0, -dx)]
        wanted[:, max(0, -dy) : 16 - max(0, dy), max(0, -dx) : 16 - max(0, dx)] = there
        assert (after == wanted).all() and abs(dy) <= 2 and abs(dx) <= 2
        seen.add((dy, dx))
    assert len(seen) > 10
    erased = augment(pixels, ("erase",), np.random.default_rng(0))
    hidden = (erased == 0).all(1)
    assert (erased == np.where(hidden[:, None], 0, pixels)).all()
    touched = hidden.any((1, 2))
    assert 5 < touched.sum() < 35
    for blank in hidden[touched]:
        height, width = blank.any(1).sum(), blank.any(0).sum()
        assert blank.sum() == height * width and 3 <= height <= 8 and 3 <= width <= 8


def test_mixed_pictures_have_the_labels_of_what_they_show():
    labels = np.arange(40) % 5
    # Each picture shows its label.
    pixels = np.broadcast_to(labels[:, None, None, None], (40, 3, 16, 16)).astype(np.float32)
    mixed, shares = mix(pixels, labels, np.random.default_rng(0))
    shown = np.stack([(mixed[:, 0] == label).mean((1, 2)) for label in range(5)], axis=1)
    assert np.abs(shares - shown).max() < 1e-6 and np.abs(shares.sum(1) - 1).max() < 1e-6
    assert 5 < (shares.max(1) < 1).sum() < 35


def test_the_loss_of_mixed_pictures_is_that_of_both_labels_by_their_shares(tmp_path):
    batch = batches_of("image", tmp_path, batch_size=10, augment=("flip", "mix")).at(0)
    # More classes than the data has.
    config = ch.preset("micro-vit").replace(image_size=(8, 8), patch_size=4, n_channels=3, n_classes=7)
    model = ch.Transformer(config).eval()
    logits = model(batch.ids).logits
    smooth = torch.full_like(logits, 0.1 / 7)
    smooth[:, : batch.targets.shape[1]] += 0.9 * batch.targets
    wanted = -(smooth * logits.double().log_softmax(-1)).sum()
    loss, count = batch_loss(model, batch, 0.1)
    assert count == 10
    assert abs(float((loss - wanted).detach())) < 1e-4
    assert (batch.targets.max(1).values < 1).any()


# What the model sees ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["lm", "mlm", "denoise", "seq2seq", "classify", "tag", "answer"])
def test_more_padding_changes_no_loss(task, tmp_path, differences):
    batches = batches_of(task, tmp_path, training=False, batch_size=8, length=40)
    model = model_for(task, tokenizer_for(task).get_vocab_size())
    for batch in list(batches.all())[-2:]:
        wider = {"ids": pad(batch.ids, 7), "mask": pad(real(batch.ids, batch.mask), False)}
        if batch.targets.shape == batch.ids.shape:
            wider["targets"] = pad(batch.targets, IGNORE)
        if batch.types is not None:
            wider["types"] = pad(batch.types, 0)
        if batch.source is not None:
            wider |= {
                "source": pad(batch.source, 7),
                "source_mask": pad(real(batch.source, batch.source_mask), False),
            }
        padded = dataclasses.replace(batch, **wider)
        assert padded.n_targets == batch.n_targets and padded.n_tokens == batch.n_tokens
        with torch.no_grad():
            loss, again = loss_of(model, batch), loss_of(model, padded)
        assert torch.isfinite(loss)
        assert differences.see("padded against not", loss / batch.n_targets, again / batch.n_targets) < 1e-6


def pad(tensor: torch.Tensor, value: int | bool) -> torch.Tensor:
    return torch.nn.functional.pad(tensor, (0, 5), value=value)


def real(ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return torch.ones_like(ids, dtype=torch.bool) if mask is None else mask


def test_moving_a_batch_keeps_its_counts(tmp_path):
    batch = batches_of("tag", tmp_path).at(0)
    moved = batch.to("cpu")
    assert same(batch, moved) and (moved.n_targets, moved.n_tokens) == (batch.n_targets, batch.n_tokens)
    meta = batch.to("meta")  # a device that cannot be asked
    assert meta.ids.device.type == "meta" and (meta.n_targets, meta.n_tokens) == (
        batch.n_targets,
        batch.n_tokens,
    )


def test_a_missing_special_token_is_named(tmp_path):
    for task, role in (("mlm", "mask"), ("denoise", "bos"), ("seq2seq", "eos")):
        special = {name: number for name, number in special_of(task).items() if name != role}
        with pytest.raises(InputError, match=f"{task} needs a {role} token"):
            SPECS[task].make_batches(
                encoded_of(task, tmp_path),
                DataPlan(),
                special=special,
                length=32,
                seed=0,
                training=True,
            )
