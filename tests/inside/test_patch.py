"""Activation patching: batches equal single runs, whole layers the clean run; a planted circuit is found."""

from __future__ import annotations

import json

import pytest
import torch

import clearhead as ch
from clearhead.app.plot.prompts import draw_patching
from clearhead.inside import interventions
from clearhead.inside.inputs import InputTokens, prepare
from clearhead.inside.interventions import Site, patched_scores
from clearhead.inside.patch import PARTS, aligned, patch
from tests.harness import PATCHES, build, some_ids, word_tokenizer

pytestmark = pytest.mark.ledger("K8")
CLEAN, CORRUPT = (some_ids(1, 6, seed=seed)[0].tolist() for seed in (1, 2))
TARGET = some_ids(1, 4, seed=3)[0].tolist()
IMAGE = {**PATCHES, "n_channels": 1}
MODELS = {
    "pre": {"n_kv_heads": 2},
    "post": {"norm_position": "post"},
    "parallel": {"parallel": True, "positions": "rope", "pruned_heads": {"blocks.0.attention": (1, 2)}},
    "masked": {"family": "encoder", "n_types": 2},
    "classifier": {"family": "encoder", "head": "classifier", "n_classes": 3, "pooling": "mean"},
    "span": {"family": "encoder", "head": "span"},
    "experts": {"n_experts": 3},
    "image": {"family": "encoder", "head": "classifier", "n_classes": 3, **IMAGE},
    "both": {"family": "encoder-decoder", "norm_position": "sandwich", "n_encoder_layers": 1},
}


def prompts(config: ch.ModelConfig):
    """A clean and a corrupt input, and the target for a model of two stacks."""
    if config.input == "patches":
        generator = torch.Generator().manual_seed(0)
        return torch.randn(1, 1, 8, 8, generator=generator), torch.randn(1, 1, 8, 8, generator=generator), {}
    return CLEAN, CORRUPT, {"target": TARGET} if config.family == "encoder-decoder" else {}


def one_at_a_time(model, clean, corrupt, more, part: str, stack: str, layer: int, column: int, read):
    """One patch, by a run of its own and an edit written out."""
    prefix = "encoder." if stack == "encoder" else ""
    end = {"residual": "resid_pre", "heads": "attention.z", "cross heads": "cross.z"}.get(part, f"{part}.out")
    decodes = stack != "encoder" and model.config.decoder is not None
    plan = model.config.decoder if decodes else model.config.encoder
    past = layer == plan.n_layers
    name = f"{prefix}blocks.{layer - past}.{'resid_post' if past else end}"

    def run(given):
        ids = given if isinstance(given, torch.Tensor) else torch.tensor([given])
        return model(torch.tensor([more["target"]]), source=ids).logits if more else model(ids).logits

    def put(x):
        x = x.clone()
        if end.endswith(".z"):
            x[0, column, :] = seen[name][0, column, :]
        else:
            x[0, column] = seen[name][0, column]
        return x

    with torch.no_grad():
        with ch.record(model, name) as seen:
            run(clean)
        with ch.edit(model, {name: put}):
            return read(run(corrupt))


@pytest.mark.parametrize("kind", MODELS)
def test_patches_in_a_batch_equal_one_run_each(kind, differences, monkeypatch):
    monkeypatch.setattr(interventions, "TOKENS_AT_ONCE", 24)  # several batches, the last one smaller
    model = build(**MODELS[kind])
    clean, corrupt, more = prompts(model.config)
    found = patch(model, clean, corrupt, answer=0, wrong=1, parts=PARTS, **more)

    def read(logits):
        scores = logits if logits.ndim == 2 else logits[:, :, 1] if kind == "span" else logits[:, -1]
        return float(scores[0, 0] - scores[0, 1])

    stacks = [""] if kind != "both" else ["encoder", "decoder"]
    wanted = {(part, stack) for part in PARTS for stack in stacks}
    wanted |= {("cross", "decoder"), ("cross heads", "decoder")} if kind == "both" else set()
    assert {(table.part, table.stack) for table in found.maps} == wanted
    for table in found.maps:
        scale = found.clean_difference - found.corrupt_difference
        for row in range(len(table.rows)):
            for column in range(0, len(table.columns), 2):
                value = table.values[row, column] * scale + found.corrupt_difference
                if kind == "parallel" and table.part == "heads" and row == 0 and column >= 2:
                    assert value.isnan()  # a pruned head
                    continue
                slow = one_at_a_time(model, clean, corrupt, more, table.part, table.stack, row, column, read)
                gap = differences.see("batch=alone", value, torch.tensor(slow))
                assert gap <= 1e-5, (table.title, row, column)


@pytest.mark.parametrize("kind", MODELS)
def test_everything_patched_at_the_bottom_is_the_clean_run_exactly(kind):
    model = build(**MODELS[kind])
    clean, corrupt, more = prompts(model.config)
    first, second = prepare(model, clean, **more), prepare(model, corrupt, **more)
    taps = ["encoder.blocks.0.resid_pre"] * (kind == "both") + ["blocks.0.resid_pre"]
    _, seen = first.record(*taps)
    patched = patched_scores(second, seen, [[Site(tap) for tap in taps]])
    assert torch.equal(patched, patched_scores(first, {}, [()]))
    assert not torch.equal(patched, patched_scores(second, {}, [()]))


@pytest.mark.parametrize("kind", ["pre", "post", "parallel", "both"])
def test_the_end_of_the_last_token_is_the_whole_answer(kind):
    model = build(**MODELS[kind]).double()
    clean, corrupt, more = prompts(model.config)
    found = patch(model, clean, corrupt, parts=("residual",), **more)
    values = found.maps[-1].values
    # Scores are kept in float32, and the two runs differ by little.
    assert float(values[-1, -1]) == pytest.approx(1, abs=1e-4)
    assert values[-1, :-1].abs().max() < 1e-4
    position = patch(model, clean, corrupt, parts=("residual",), position=1, **more).maps[-1].values
    assert float(position[-1, 1]) == pytest.approx(1, abs=1e-4) and position[-1, 2:].abs().max() < 1e-4


WORDS = ["the", "cat", "dog", "says", "meow", "woof"]


def planted() -> ch.Model:
    """Make head 0.0 look at all words alike and turn "cat" to "meow", "dog" to "woof"; all else is idle."""
    sizes = {"vocab_size": 6, "d_model": 8, "n_layers": 2, "n_heads": 2, "bias": False}
    config = ch.ModelConfig(**sizes, positions="none", norm="rmsnorm", tie_embeddings=False)
    model = ch.Transformer(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1 if "norm" in name or name.endswith(("before.weight", "after.weight")) else 0)
        model.decoder.embedding.front.tokens.weight[:, :6] = torch.eye(6)
        attention = model.decoder.blocks[0].attention
        for slot, (word, sound) in enumerate((("cat", "meow"), ("dog", "woof"))):
            attention.v.weight[slot, WORDS.index(word)] = 1
            attention.out.weight[WORDS.index(sound), slot] = 1
            model.head.out.weight[WORDS.index(sound), WORDS.index(sound)] = 5
    return ch.Model(model, word_tokenizer(WORDS, "the"))


def test_a_planted_circuit_is_found():
    found = patch(planted(), "the cat says", "the dog says", parts=PARTS)
    assert (found.answer, found.wrong, found.note, found.position) == ("meow", "woof", "", "says")
    assert found.clean_difference == pytest.approx(-found.corrupt_difference) and found.clean_difference > 1
    maps = {table.part: table.values for table in found.maps}
    assert found.maps[0].columns == ("the", "cat/dog", "says")
    # The animal carries the answer into block 0, and the last word out of it.
    for name, wanted in {
        "residual": [[0, 1, 0], [0, 0, 1], [0, 0, 1]],
        "attention": [[0, 0, 1], [0, 0, 0]],
        "feedforward": [[0, 0, 0], [0, 0, 0]],
        "heads": [[1, 0], [0, 0]],
    }.items():
        torch.testing.assert_close(maps[name], torch.tensor(wanted).float(), atol=1e-6, rtol=0)


def test_answers_are_chosen_and_said():
    m = planted()
    same = patch(m, "the cat says", "cat cat says", parts=("heads",))
    assert same.answer == "meow" and same.wrong != "meow" and "runner-up" in same.note
    named = patch(m, "the cat says", "the dog says", "woof", "meow", parts=("heads",))
    assert named.clean_difference < 0 and float(named.maps[0].values[0, 0]) == pytest.approx(1)
    body = json.loads(json.dumps(named.to_dict(), allow_nan=False))
    assert body["maps"][0]["part"] == "heads" and body["clean"] == ["the", "cat", "says"]
    for (clean, corrupt, *more), words in (
        (("the cat says", "the dog"), r"3 and 2 tokens, and differ from token 1 on \(cat says / dog\)"),
        (("the cat says", "the cat says"), "nothing to bring back"),
        (("the cat says", "the dog says", "meow", "meow"), "both the answer and the wrong one"),
        (("the cat says", "the dog says", "moo moo"), "is 2 tokens"),
    ):
        with pytest.raises(ch.InputError, match=words):
            patch(m, clean, corrupt, *more)
    with pytest.raises(ch.InputError, match=r'part "head" is not known \(did you mean "heads"'):
        patch(m, "the cat says", "the dog says", parts=("head",))


def test_two_decoders_are_read_where_they_part():
    for seed in range(20):  # some model writes different answers, after a common beginning or none
        model = build(seed=seed, family="encoder-decoder")
        m = ch.Model(model, special={"decoder_start": 0})
        ours, theirs = (m.generate(prompt, 31).ids for prompt in (CLEAN, CORRUPT))
        alike = next((place for place, (one, other) in enumerate(zip(ours, theirs)) if one != other), None)
        if alike is not None:
            break
    found = patch(m, CLEAN, CORRUPT, parts=("heads",))
    assert (found.answer, found.wrong) == (str(ours[alike]), str(theirs[alike]))
    assert len(patch(m, CLEAN, CORRUPT, parts=("attention",)).maps[1].columns) == alike + 1


def test_the_command_and_its_picture(shared, clearhead, tmp_path):
    folder = shared / "weights" / "stories260K"
    asked = ["patch", folder / "hf", "Lily saw a cat. Lily", "Lily saw a cat. Tim"]
    asked += ["--tokenizer", folder / "tok512.bin"]
    body = clearhead(*asked, f"--part residual heads --plot {tmp_path}/patch.svg --json").json
    assert [table["part"] for table in body["maps"]] == ["residual", "heads"]
    assert body["maps"][0]["values"][0][-1] == pytest.approx(1, abs=1e-3)
    assert body["maps"][0]["columns"][-1] == "·Lily/·Tim"
    figure = draw_patching(patch(planted(), "the cat says", "the dog says", parts=PARTS))
    assert "share of the answer brought back" in "".join(axes.get_ylabel() for axes in figure.axes)
    assert "logit of ·was less that of ·saw" in clearhead(*asked, "--answer", " was", "--wrong", " saw").out
    clearhead.refuses("tokens", *asked[:3], "Tim and Lily", *asked[4:])


# Prompts of unequal length ----------------------------------------------------------------------------------


def tokens_of(text: str, *words: str) -> InputTokens:
    """Return a text cut into tokens that may begin with a space, as byte-level tokenizers do."""
    spans, end = [], 0
    for word in words:
        spans.append((end, end + len(word)))
        end += len(word)
    assert "".join(words) == text
    return InputTokens(words, tuple(range(len(words))), tuple(spans), text, (False,) * len(words))


PARIS = tokens_of("the town Paris is in", "the", " town", " Par", "is", " is", " in")
YORK = tokens_of("the town New York is in", "the", " town", " New", " York", " is", " in")
VADUZ = tokens_of(
    "the small town Va duz City lies in", "the", " small", " town", " Va", " duz", " City", " lies", " in"
)


def test_words_that_both_have_belong_together_and_gaps_are_aligned_from_their_ends():
    assert aligned(PARIS, YORK, "words") == ((0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 5))
    assert aligned(PARIS, VADUZ, "words") == ((0, 0), (1, 2), (2, 4), (3, 5), (4, 6), (5, 7))
    assert aligned(VADUZ, PARIS, "words") == ((0, 0), (2, 1), (4, 2), (5, 3), (6, 4), (7, 5))
    ids = [InputTokens(labels, tuple(map(int, labels))) for labels in (("5", "1", "2"), ("5", "9", "1", "2"))]
    assert aligned(*ids, "words") == ((0, 0), (1, 2), (2, 3))  # without a text, a token is a word


def test_a_subject_is_found_in_each_prompt_and_aligned_from_its_end():
    long = tokens_of("the town San Marino is in", "the", " town", " San", " Mar", "ino", " is", " in")
    assert aligned(PARIS, long, subject=("Paris", "San Marino")) == (
        (0, 0), (1, 1), (2, 3), (3, 4), (4, 5), (5, 6),
    )  # fmt: skip
    assert aligned(long, PARIS, subject=("San Marino", "Paris")) == (
        (0, 0), (1, 1), (3, 2), (4, 3), (5, 4), (6, 5),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({}, "6 and 8 tokens, and differ from token 1 on .* by words \\(align\\), or name what differs"),
        ({"align": "letters"}, 'align "letters" is not known'),
        ({"align": "words", "subject": ("a", "b")}, "both align"),
        ({"align": [(0, 8)]}, "corrupt \\(0 to 7\\)"),
        ({"align": [(0, 0), (1, 0)]}, "token 0 of the corrupt prompt twice"),
        ({"align": []}, "no pairs"),
        ({"subject": ("Rome", "Va")}, 'the subject "Rome" is not in'),
        ({"subject": ("Paris", "Va duz City")}, "2 and 3 tokens stand before the subject"),
    ],
)
def test_prompts_that_cannot_be_aligned_are_refused(how, words):
    with pytest.raises(ch.InputError, match=words):
        aligned(PARIS, VADUZ, **how)


@pytest.mark.parametrize("name", ["pre", "parallel", "masked", "classifier", "experts", "both"])
def test_a_patch_of_unequal_prompts_equals_an_edit_written_out(name):
    """Every cell against a run of its own, in which the clean token stands where the pairs say."""
    model = build(**MODELS[name])
    clean, corrupt = CLEAN[:5], CORRUPT
    pairs = [(0, 0), (2, 1), (3, 4), (4, 5)]
    more = {"target": TARGET} if name == "both" else {}
    found = patch(model, clean, corrupt, 1, 2, PARTS, align=pairs, **more)
    assert found.pairs == tuple(pairs)

    def run(ids):
        given = {"source": torch.tensor([ids])} if more else {}
        logits = model(torch.tensor([TARGET if more else ids]), **given).logits[0]
        last = logits if logits.ndim == 1 else logits[-1]
        return float(last[1] - last[2])

    def scaled(tap, into, out_of, head=None):
        def put(x):
            x = x.clone()
            own = 0 if head is None else (0, head)
            for mine, other in zip(into, out_of):
                x[own][mine] = seen[tap][own][other]
            return x

        with torch.no_grad():
            with ch.record(model, tap) as seen:
                top = run(clean)
            bottom = run(corrupt)
            with ch.edit(model, {tap: put}):
                return (run(corrupt) - bottom) / (top - bottom)

    taps = {"residual": "resid_pre", "attention": "attention.out", "cross": "cross.out"}
    taps |= {"feedforward": "feedforward.out", "heads": "attention.z", "cross heads": "cross.z"}
    for table in found.maps:
        prefix = "encoder." if table.stack == "encoder" else ""
        same = [(token, token) for token in range(len(TARGET))]
        own = same if table.stack == "decoder" else pairs
        sources, positions = zip(*own)
        for layer in range(2 if not prefix else 1):
            tap = f"{prefix}blocks.{layer}.{taps[table.part]}"
            for column in range(table.values.shape[1]):
                if torch.isnan(table.values[layer, column]):
                    continue
                cell = slice(column, column + 1)
                by_head = (positions, sources, column)
                wanted = scaled(
                    tap, *(by_head if "heads" in table.part else (positions[cell], sources[cell]))
                )
                assert abs(float(table.values[layer, column]) - wanted) < 1e-4


def test_the_answer_is_read_at_tokens_that_belong_together():
    model, pairs = build(), [(0, 0), (2, 1), (4, 5)]
    found = patch(model, CLEAN[:5], CORRUPT, 1, 2, align=pairs, position=1)
    with torch.no_grad():
        clean, corrupt = (model(torch.tensor([ids])).logits[0] for ids in (CLEAN[:5], CORRUPT))
    assert found.clean_difference == pytest.approx(float(clean[2, 1] - clean[2, 2]), abs=1e-5)
    assert found.corrupt_difference == pytest.approx(float(corrupt[1, 1] - corrupt[1, 2]), abs=1e-5)
    with pytest.raises(ch.InputError, match=r"position 2, .* belongs to no token of the clean prompt"):
        patch(model, CLEAN[:5], CORRUPT, 1, 2, align=pairs, position=2)


def test_the_command_aligns_by_words_and_by_the_subject(tmp_path, clearhead):
    m = planted()
    m.save(tmp_path)
    asked = ["patch", str(tmp_path), "the cat says", "the the dog says", "--part", "residual"]
    ran = clearhead(*asked)
    assert "by words (align)" in ran.err
    for how in (["--align", "words"], ["--subject", "cat", "the dog"]):
        body = clearhead(*asked, *how, "--json").json
        assert body["maps"][0]["columns"] == ["the", "cat/dog", "says"] and body["answer"] == "meow"
        assert body["pairs"] == [[0, 0], [1, 2], [2, 3]]
        assert [round(value) for value in body["maps"][0]["values"][0]] == [0, 1, 0]
