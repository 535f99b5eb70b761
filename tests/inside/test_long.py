"""`clearhead long`: losses equal plain loops; needles are found by a model made for it alone."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.core.config import RopeScaling
from clearhead.errors import InputError
from clearhead.inside import long as retrieval
from clearhead.inside import long_text as positions
from clearhead.inside.long_text import LongText, _Living, read_text, slope
from tests.harness import V, build
from tests.test_use_commands import run
from tests.tokens.toys import LINES, trained

pytestmark = pytest.mark.ledger("I4", "J2", "J3")

SILENT = lambda stage, done, total: None  # noqa: E731


def random_text(count: int = 400, vocab: int = V, prefix: tuple[int, ...] = ()) -> LongText:
    """Ids drawn evenly."""
    return LongText("the text", np.random.default_rng(0).integers(vocab, size=count), prefix)


def plain_losses(model: ch.Transformer, row: list[int], whole: bool = False) -> list[float]:
    """-log p of each token but the first: by one call for each of them, or by one for all."""
    with torch.no_grad():
        at_once = model(torch.tensor([row[:-1]])).logits[0]
        logits = [at_once[at] if whole else model(torch.tensor([row[: at + 1]])).logits[0, -1]
                  for at in range(len(row) - 1)]  # fmt: skip
    return [-float(scores.log_softmax(-1)[token]) for scores, token in zip(logits, row[1:])]


# Loss by position -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"positions": "rope"},
        {"positions": "rope", "rope_scaling": RopeScaling(kind="yarn", factor=4.0)},
        {"positions": "alibi", "window": 6},
        {"positions": "learned", "max_positions": 64},
        {"positions": "rope", "attention": ("window(5, sinks=2)", "gated-delta")},
        {"positions": "none", "attention": "linear"},
        {"positions": "rope", "rope_scaling": RopeScaling(kind="dynamic", factor=2.0)},
    ],
    ids=["rope", "yarn", "window", "learned", "delta", "linear", "dynamic"],
)
def test_loss_by_position_equals_a_plain_loop(changes, monkeypatch):
    """Through caches and in pieces, past the trained length."""
    monkeypatch.setattr(positions, "PREFILL_CHUNK", 7)
    model, text = build(**changes).double(), random_text(prefix=(3, 4))
    found = positions.loss_by_position(model, text, 45, 3, 4, SILENT)
    rows = list(text.rows(45, 3))
    by_length = changes.get("rope_scaling") is not None and changes["rope_scaling"].kind == "dynamic"
    wanted = np.mean([plain_losses(model, row, whole=by_length) for row in rows], axis=0)
    assert np.isnan(found.losses[:2]).all()  # what the tokenizer puts there is no target
    assert np.abs(found.losses[2:] - wanted[1:]).max() < 1e-6
    assert found.rows == 3 and [row[:2] for row in rows] == [[3, 4]] * 3
    assert [(one.start, one.stop) for one in found.bins] == [(0, 11), (11, 22), (22, 34), (34, 45)]
    for one in found.bins:
        share = wanted[max(one.start - 1, 1) : one.stop - 1]
        assert one.targets == 3 * len(share) and one.loss == pytest.approx(share.mean(), abs=1e-6)
        assert one.perplexity == pytest.approx(np.exp(share.mean()), rel=1e-6)
    assert found.whole.targets == found.within.targets + (found.beyond.targets if found.beyond else 0)
    assert found.within.stop == min(model.config.max_positions, 45)


def test_rows_do_not_overlap_and_span_the_text():
    text = LongText("the text", np.arange(100))
    starts = text.starts(30, 8)
    assert starts == [0, 35, 70]
    assert text.starts(100, 8) == [0]
    with pytest.raises(InputError, match="has 100 tokens and rows need 101"):
        text.starts(101, 1)


# Scalings ---------------------------------------------------------------------------------------------------


def test_scalings_equal_models_that_are_loaded_with_them(tmp_path):
    """The same tokens, each context in one call of a model whose config.json states the scaling."""
    model = build(positions="rope", max_positions=16, d_model=32, norm="rmsnorm", bias=False, gated=True)
    text = random_text()
    names = ["none", "linear", "ntk", "dynamic:2", "yarn", "yarn:8", "llama3:2"]
    kinds = [None, ("linear", 4.0), ("dynamic", 1.0), ("dynamic", 2.0), ("yarn", 4.0), ("yarn", 8.0)]
    kinds.append(("llama3", 2.0))
    found = positions.try_scalings(model, text, names, 2, 4, SILENT)
    named = ["none", "linear:4", "ntk:1", "dynamic:2", "yarn:4", "yarn:8", "llama3:2"]
    assert [one.name for one in found] == named
    rows = list(text.rows(64, 2))
    for one, kind in zip(found, kinds, strict=True):
        scaling = kind and RopeScaling(kind=kind[0], factor=kind[1], original_positions=16)
        other = ch.Transformer(model.config.replace(rope_scaling=scaling))
        other.load_state_dict(model.state_dict())
        ch.Model(other).save(tmp_path / one.name)
        loaded = ch.load(tmp_path / one.name).model.eval()
        assert loaded.config.rope_scaling == scaling == one.scaling
        assert one.lengths == (16, 32, 64) and one.targets == 16
        for length, loss in zip(one.lengths, one.losses):
            wanted = [plain_losses(loaded, row[-length:], whole=True)[-8:] for row in rows]
            assert loss == pytest.approx(np.mean(wanted), abs=1e-5)
        last = [plain_losses(loaded, row, whole=True) for row in rows]
        assert one.bins[-1].loss == pytest.approx(np.mean(last, axis=0)[-16:].mean(), abs=1e-5)
    assert len({round(one.losses[-1], 6) for one in found}) == len(found)


def test_a_scaled_model_shares_the_weights():
    model = build(positions="rope", n_layers=4, layer_groups=2)
    other = positions.scaled(model, RopeScaling(kind="linear", factor=2.0))
    mine, theirs = (dict(one.named_parameters(remove_duplicate=False)) for one in (model, other))
    assert mine.keys() == theirs.keys()
    assert all(mine[name].data_ptr() == theirs[name].data_ptr() for name in mine)
    assert other.main.spec.rope_scaling.factor == 2 and model.main.spec.rope_scaling is None
    assert other.head.out.weight is other.main.embedding.front.tokens.weight


# Needles ----------------------------------------------------------------------------------------------------


def finder(vocab: int, length: int) -> ch.Transformer:
    """A model made by hand: it goes on as the text did after the last two tokens stood together before.

    The stream holds one-hot vectors: token, token before, the one before that, answer, position. Two heads of
    the first layer look one and two tokens back; a head of the second finds keys before which both stood.
    """
    width = max(length, 2 * vocab)
    token, before, second, answer, place = (slice(at, at + vocab) for at in range(0, 5 * vocab, vocab))
    place = slice(4 * vocab, 4 * vocab + length)
    model = ch.Transformer(
        ch.ModelConfig(
            vocab_size=vocab, d_model=place.stop, n_layers=2, n_heads=2, d_head=width, d_ff=4, bias=False,
            positions="learned", max_positions=length, norm="rmsnorm", tie_embeddings=False,
            attention_scale=1.0,
        )
    )  # fmt: skip
    one_hot, stack = torch.eye(vocab), model.main
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name or ".before" in name else 0.0)
        stack.embedding.front.tokens.weight[:, token] = one_hot
        stack.positions.table.weight[:, place] = torch.eye(length)
        first, last = (block.attention for block in stack.blocks)
        for head, (back, written) in enumerate(((1, before), (2, second))):
            rows, values = (slice(head * width, head * width + size) for size in (length, vocab))
            first.q.weight[rows, place] = 9 * torch.eye(length).roll(-back, 0)
            first.k.weight[rows, place] = torch.eye(length)
            first.v.weight[values, token] = one_hot
            first.out.weight[written, values] = one_hot
        pairs = (slice(0, vocab), token, before), (slice(vocab, 2 * vocab), before, second)
        for rows, asked, stood in pairs:
            last.q.weight[rows, asked], last.k.weight[rows, stood] = 9 * one_hot, one_hot
        last.v.weight[:vocab, token] = one_hot
        last.out.weight[answer, :vocab] = one_hot
        model.head.out.weight[:, answer] = one_hot
    return model.eval()


def retrieved(model: ch.Transformer, lengths: list[int], trials: int) -> tuple[retrieval.RetrievalGrid, ...]:
    """The grids of a model of ids."""
    m, text = ch.Model(model), random_text(600, model.config.vocab_size)
    return retrieval.retrieve(m, text, retrieval.words_of(m, text), lengths, trials, 0, SILENT)


def test_a_model_made_to_find_needles_finds_them_at_every_depth():
    model = finder(40, 128)
    row = [1, 2, 3, 4, 5, 6, 2, 3]
    assert model(torch.tensor([row])).logits[0, -1].argmax() == 4
    grids = retrieved(model, [40, 128], 6)
    found = {grid.probe: grid for grid in grids}
    assert list(found) == ["passkey", "needle", "needles", "tracking"]
    for name in ("passkey", "needle", "needles"):
        assert found[name].right.shape == (2, 5) and found[name].right.min() >= 0.75
        assert found[name].right.mean() > 0.97 and found[name].exact.mean() > 0.9
    # One step of looking back ends at a key of the chain, not at the value at its beginning.
    assert found["tracking"].right.mean() < 0.5 and found["tracking"].exact.mean() < 0.1
    assert all(grid.chance == 1 / 8 for grid in grids)


def test_a_random_model_is_at_chance():
    model = build(positions="rope", vocab_size=60)
    grids = retrieved(model, [32, 64], 25)
    shares = np.stack([grid.right for grid in grids])
    spread = (0.125 * 0.875 / (25 * shares.size)) ** 0.5
    assert abs(shares.mean() - 0.125) < 4 * spread
    again = retrieved(model, [32, 64], 25)
    assert all(np.array_equal(one.right, other.right) for one, other in zip(grids, again))


@pytest.mark.parametrize("name", retrieval.PROBES)
def test_contexts_hold_what_they_should(name):
    """Length, depth, one right answer among different ones, and each key before its value."""
    probe, text = retrieval.PROBES[name], random_text(600, 60, prefix=(1,))
    vocabulary = retrieval.Vocabulary([(number, 100 + number) for number in range(60)], (99,))
    for depth in retrieval.DEPTHS:
        context, choices = retrieval.make_trial(text, vocabulary, probe, 160, depth, (0, 1))
        assert len(context) == 160 and context[0] == 1
        assert len({*choices}) == retrieval.CHOICES
        asked, value = context[-7:], [choices[0], 100 + choices[0], 99]
        places = [at for at in range(160) if context[at : at + 7] == asked]
        assert len(places) == 2 and places[1] == 153
        # Follow the chain from the question to the value.
        key = asked
        for _ in range(probe.links - 1):
            at = next(at for at in range(160) if context[at : at + 7] == key)
            key = [99, *context[at + 7 : at + 13]]
        at = next(at for at in range(160) if context[at : at + 7] == key)
        assert context[at + 7 : at + 10] == value
        if probe.chains * probe.links == 1:
            assert at == 1 + round(depth * (160 - 1 - 7 - 10))
        others = sum(context[at] == 99 for at in range(160))
        assert others == 3 + 4 * probe.chains + (probe.links - 1) * probe.chains * 5
    assert retrieval.make_trial(text, vocabulary, probe, 12, 0.5, (0, 1)) is None


@pytest.mark.parametrize("kind", ["char", "byte", "word", "bpe"])
def test_words_are_those_of_the_text(kind):
    """Whatever the tokens are, a word with what stands between two words reads as in the text."""
    lines = [line for line in LINES if line.isascii()]
    tokenizer = trained(kind)
    ids = tokenizer.encode("".join(lines), add_special_tokens=False).ids
    m = ch.Model(ch.Transformer(ch.preset("micro-decoder")), tokenizer)
    words, space = retrieval._words(m, LongText("the text", np.array(ids)))
    read = {tokenizer.decode(list(word)).strip() for word in words}
    plain = {word.strip(".,;?()[]:'#") for line in lines for word in line.split()}
    assert {"men", "shall", "speak", "England"} <= read
    assert all(word.isalpha() for word in read) and len(read - plain) <= 2
    assert len(space) == (kind in ("char", "byte"))
    joined = [*words[0], *space, *words[1]]
    assert tokenizer.decode(joined).split() == [tokenizer.decode(list(word)).strip() for word in words[:2]]


# Cost -------------------------------------------------------------------------------------------------------


def test_cost_is_measured_beside_what_is_computed():
    model = build(positions="rope")
    found = ch.long(model, parts=["cost"], length=64)
    assert found.perplexity is None and found.retrieval == () and found.text is None
    assert [point.length for point in found.cost.points] == [16, 32, 64]
    for point in found.cost.points:
        figures = ch.cost(model.config, length=point.length)
        head = figures.flops.forward.head
        assert point.flops == figures.flops.forward.total - head and point.seconds > 0
        assert point.activations == figures.memory.activations.total - figures.memory.activations.head
        # One layer's tensors live at once: between one state and all that training keeps.
        assert 4 * 16 * point.length < point.peak < point.activations
    assert slope([1, 2, 4, 8], [3, 12, 48, 192]) == pytest.approx(2)
    models = [build(positions="rope", attention=kind) for kind in ("linear", "full")]
    grown = [ch.long(model, parts=["cost"], length=2048).cost.slopes for model in models]
    assert grown[0]["flops"] == pytest.approx(1, abs=0.05) and grown[1]["flops"] > 1.5
    assert {*found.cost.slopes} == {"seconds", "peak", "flops", "activations"}


def test_peak_memory_counts_what_lives_at_once():
    weight = torch.zeros(1000)
    with _Living([weight]) as living:
        one = weight.view(10, 100).add(1)  # 4,000 bytes; views are none
        two = one + 1
        one = None
        three = two.t() + 1
        del two, three
        torch.zeros(100)
    assert (living.most, living.now) == (8000, 0)


# The command ------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """A char model that was never trained, and a text."""
    (tmp_path / "text.txt").write_text("".join(LINES), encoding="utf-8")
    tokenizer = trained("char")
    size = tokenizer.get_vocab_size()
    model = build(positions="rope", vocab_size=size, max_positions=48)
    ch.Model(model, tokenizer).save(tmp_path / "rope")
    learned = build(positions="learned", vocab_size=size, max_positions=48)
    ch.Model(learned, tokenizer).save(tmp_path / "learned")
    ch.Model(build(family="encoder", vocab_size=size), tokenizer).save(tmp_path / "encoder")
    return tmp_path


@pytest.mark.slow
def test_the_command_prints_tables_a_picture_and_json(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    arguments = ("long", folder / "rope", "--text", folder / "text.txt", "--rows", 2, "--trials", 2)
    arguments += ("--scalings", "none", "yarn", "--length", 320)
    code, out, err = run(*arguments, "--plot", folder / "long.png", capsys=capsys)
    assert code == 0 and (folder / "long.png").stat().st_size > 10_000 and "saved" in err
    assert max(map(len, out.splitlines())) <= 80
    for words in ("chance 0.125", "trained length", "yarn:4", "192 (4 x)", "slope", "tracking", "do not fit"):
        assert words in out
    code, out, _ = run(*arguments, "--json", capsys=capsys)
    body = json.loads(out)
    m = ch.load(folder / "rope")
    made = ch.long(m, str(folder / "text.txt"), rows=2, trials=2, scalings=["none", "yarn"], length=320)
    same = made.to_dict()
    assert code == 0 and body.keys() == same.keys()
    assert {**body, "cost": None} == {**same, "cost": None}
    assert body["perplexity"]["bins"][0]["loss"] == pytest.approx(made.perplexity.bins[0].loss)


def test_lengths_by_default(folder):
    text, parts = folder / "text.txt", ["perplexity"]
    rope, learned = (ch.load(folder / name) for name in ("rope", "learned"))
    assert ch.long(rope, text, parts=parts).length == 96
    assert ch.long(learned, text, parts=parts).length == 48
    (folder / "short.txt").write_text("The king's men shall speak of England.")
    found = ch.long(rope, folder / "short.txt", parts=parts)
    assert found.length == 38 and "rows of 38 tokens, not 96: the text has no more" in found.notes


def test_without_a_text_what_the_run_held_out_is_read(tmp_path, capsys):
    words = "the king and his men speak of England and of the war they shall not win this year\n" * 60
    (tmp_path / "text.txt").write_text(words)
    settings = {"model.d_model": 16, "model.n_layers": 1, "model.n_heads": 2, "train.steps": 2}
    settings |= {"model.positions": "rope", "model.max_positions": 32, "tokens.kind": "char"}
    done = ch.train(tmp_path / "text.txt", out=tmp_path / "run", settings=settings)
    code, out, err = run("long", done.folder, "--parts", "perplexity", "--json", capsys=capsys)
    assert code == 0 and "what the run held out of" in err
    assert json.loads(out)["text"] == "the text that the run held out"
    held = read_text(ch.load(done.folder), ())
    assert 0.05 * len(words) < len(held.ids) < 0.2 * len(words)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("rope", (), "no text is named"),
        ("rope", ("--text", "missing.txt"), "missing.txt"),
        ("rope", ("--text", "text.txt", "--length", "50000"), "tokens and rows need 50,000"),
        ("rope", ("--text", "text.txt", "--length", "1"), "length 1 leaves nothing to predict"),
        ("rope", ("--text", "text.txt", "--scalings", "yarm"), '"yarm" (did you mean "yarn"'),
        ("rope", ("--text", "text.txt", "--scalings", "yarn:x"), 'scaling "yarn:x" has no factor above 0'),
        ("rope", ("--text", "text.txt", "--scalings", "yarn:-2"), 'scaling "yarn:-2" has no factor above 0'),
        ("rope", ("--text", "text.txt", "--rows", "0"), "rows 0 must be 1 or more"),
        ("rope", ("--text", "text.txt", "--bins", "0"), "bins 0 must be 1 or more"),
        ("rope", ("--text", "text.txt", "--trials", "0"), "trials 0 must be 1 or more"),
        ("rope", ("--text", "text.txt", "--plot", "long.gif"), "long.gif cannot be written"),
        ("rope", ("--text", "tiny.txt", "--length", "20"), "different words"),
        ("learned", ("--text", "text.txt", "--length", "49"), "beyond the 48 learned positions"),
        ("learned", ("--text", "text.txt", "--scalings", "yarn"), "this model has positions learned"),
        ("encoder", ("--text", "text.txt"), "a model of family encoder with head mlm"),
        ("nowhere", ("--text", "text.txt"), "nowhere is not a directory"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(name, options, words, folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "tiny.txt").write_text("The king's men shall speak of England.")
    code, out, err = run("long", folder / name, *options, capsys=capsys)
    assert code == 2 and out == "" and words in err.splitlines()[-1]


def test_mistakes_in_python_are_named(folder):
    m = ch.load(folder / "rope")
    with pytest.raises(InputError, match='part "cots" is not known'):
        ch.long(m, folder / "text.txt", parts=["cots"])
    with pytest.raises(InputError, match="nothing is to be done"):
        ch.long(m, folder / "text.txt", parts=[])
    with pytest.raises(InputError, match="ids contain 99999"):
        ch.long(m, [1, 2, 99999])
