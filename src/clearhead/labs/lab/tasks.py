"""Experiments on tasks: the three families, pooling, distillation, tokenizers."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.core.config import ModelConfig
from clearhead.core.transformer import Transformer
from clearhead.hub.tokens import TokenKind, TokensPlan
from clearhead.hub.tokens.training import GENERATOR, train_tokenizer
from clearhead.inside.inputs import device_of
from clearhead.labs.lab.experiment import Claim, Conditions, Experiment, Numbers, Picture
from clearhead.labs.lab.learning import (
    USUAL,
    Text,
    Training,
    logits_of,
    loss_curve,
    moved,
    prose,
    small_model,
    text,
    train,
    train_on_text,
)
from clearhead.learn.data.corpora import CORPORA

N_SYMBOLS, BEGIN, LENGTH = 8, 8, 8
FAMILIES_PLAN = Training(steps=300, batch=64, length=LENGTH)
WANTED: dict[str, Callable[[Tensor], Tensor]] = {
    "majority": lambda rows: (2 * (rows[:, :-1] % 2).sum(1, keepdim=True) > LENGTH).long(),  # one label
    "reverse": lambda rows: rows[:, :-1].flip(1),  # a text for a text
    # What comes next: one of the last two symbols, four times, as a symbol that no model sees decides.
    "continue": lambda rows: rows[:, -3:-1].gather(1, rows[:, -1:] % 2).expand(-1, 4),
}


def model_of(family: str) -> Transformer:
    """Return a model of a family, of about one size."""
    layers = {"n_layers": 1, "n_encoder_layers": 1} if family == "encoder-decoder" else {"n_layers": 2}
    size = {"vocab_size": N_SYMBOLS + 1, "max_positions": 2 * LENGTH + 2, "d_ff": 128, **layers}
    head = "lm" if family != "encoder" else "mlm"
    return Transformer(small_model(**size, family=family, head=head, positions="learned"))


def answers(model: Transformer, rows: Tensor, wanted: Tensor) -> Tensor:
    """Return the logits of each symbol of the answer: [B, N, V].

    The last symbol of a row is hidden. Decoders are given what stands before each symbol of the answer. An
    encoder sees blanks where the answer goes, and fills in all of them at once.
    """
    rows, count = rows[:, :-1], wanted.shape[1]
    begin = torch.full_like(wanted[:, :1], BEGIN)
    written = torch.cat([begin, wanted[:, :-1]], dim=1)
    if model.config.family == "encoder-decoder":
        return logits_of(model, written, source=rows)
    if model.config.family == "encoder":
        written = begin.expand(-1, count)
    return logits_of(model, torch.cat([rows, written], dim=1))[:, -count:]


def run_families(family: str, setting: Conditions) -> Numbers:
    """Train a family on each task from scratch; measure whole answers that are right, or the loss."""
    numbers: Numbers = {}
    for name, target in WANTED.items():
        torch.manual_seed(setting.seed)
        model = model_of(family)

        def loss_of(model: nn.Module, rows: Tensor, target: Callable[[Tensor], Tensor] = target) -> Tensor:
            wanted = target(rows)
            logits = answers(model, rows, wanted)  # type: ignore[arg-type]
            return nnf.cross_entropy(logits.flatten(0, 1), wanted.flatten())

        numbers[f"curve of {name}"] = loss_curve(model, draw_rows, loss_of, FAMILIES_PLAN, setting)
        rows = draw_rows(torch.Generator().manual_seed(1), 256).to(setting.device)
        wanted = target(rows)
        with torch.no_grad():
            logits = answers(model.eval(), rows, wanted)
        right = (logits.argmax(-1) == wanted).all(1).float().mean()
        surprise = nnf.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        numbers[name] = float(surprise if name == "continue" else right)
    return numbers


def draw_rows(generator: torch.Generator, batch: int = FAMILIES_PLAN.batch) -> Tensor:
    """Draw rows of symbols, and one that is hidden: [B, T + 1]."""
    return torch.randint(N_SYMBOLS, (batch, LENGTH + 1), generator=generator)


FAMILIES = Experiment(
    title="Three families on three tasks",
    question="How does each family do on the task that it is made for, and on those of the others?",
    arms={name: name for name in ("encoder", "decoder", "encoder-decoder")},
    run=run_families,
    claims={
        "A decoder can label a text too.": Claim("majority", "encoder", "decoder", -0.1),
        "An encoder-decoder reverses no worse than a decoder.": Claim(
            "reverse", "decoder", "encoder-decoder", -0.1
        ),
        "Where a text can go on in two ways, symbols that are filled in all at once do not agree.": Claim(
            "continue", "decoder", "encoder", 0.2
        ),
    },
    figures={
        "majority": "share of rows whose majority, odd or even, is named",
        "reverse": "share of rows that are reversed without a fault",
        "continue": "nats a symbol of an answer with two ways on; 0.17 at best, 0.69 without agreement",
    },
    pictures=tuple(
        Picture(name, f"Loss: {name}", "step", "nats a symbol", curve=f"curve of {name}") for name in WANTED
    ),
    seconds=45,
    setup=vars(FAMILIES_PLAN),
)

# Pooling --------------------------------------------------------------------------------------------------

NAMES = 40  # letters of a name that are read
POOLED = Training(steps=300, batch=32, length=NAMES)


def labelled() -> tuple[Tensor, Tensor, int]:
    """Return names [N, T], padded with 0 and begun with 1, their classes [N], and how many there are."""
    named: Any = CORPORA["unicode-names"].load()
    pairs: list[tuple[str, str]] = [(row.text, row.label) for row in named]
    letters = {
        letter: 2 + number for number, letter in enumerate(sorted({x for name, _ in pairs for x in name}))
    }
    labels = {label: number for number, label in enumerate(sorted({label for _, label in pairs}))}
    rows = torch.zeros(len(pairs), NAMES + 1, dtype=torch.long)
    for number, (name, _) in enumerate(pairs):
        ids = [1, *(letters[letter] for letter in name[:NAMES])]
        rows[number, : len(ids)] = torch.tensor(ids)
    return rows, torch.tensor([labels[label] for _, label in pairs]), len(labels)


def run_pooling(pooling: str, setting: Conditions) -> Numbers:
    """Train a classifier of names of characters that reads off the first token, or off the mean."""
    rows, classes, count = labelled()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    held_out, kept = order[:1000], order[1000:]
    size = {"vocab_size": int(rows.max()) + 1, "max_positions": NAMES + 1, "n_classes": count}
    model = Transformer(small_model(**size, family="encoder", pooling=pooling, positions="learned"))

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = kept[torch.randint(len(kept), (POOLED.batch,), generator=generator)]
        return rows[chosen], classes[chosen]

    def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nnf.cross_entropy(logits_of(model, batch[0], mask=batch[0] > 0), batch[1])

    curve = loss_curve(model, draw, loss_of, POOLED, setting)
    ids, wanted = moved((rows[held_out], classes[held_out]), setting.device)
    with torch.no_grad():
        right = logits_of(model.eval(), ids, mask=ids > 0).argmax(-1) == wanted
    return {"accuracy": float(right.float().mean()), "curve": curve}


POOLING = Experiment(
    title="A class token and the mean",
    question="Should a classifier read the first token, or the mean of all?",
    arms={"class token": "cls", "mean": "mean"},
    run=run_pooling,
    claims={"The mean is learned sooner than a class token.": Claim("accuracy", "class token", "mean", 0.0)},
    figures={"accuracy": "share of unseen names of characters whose general category is found"},
    pictures=(Picture("loss", "Loss while training", "step", "nats", curve="curve"),),
    seconds=30,
    setup={"data": "unicode-names", **vars(POOLED)},
)


# Distillation by DistilBERT's recipe (Sanh et al., 2019) --------------------------------------------------


TEACHER = Training(steps=600, batch=16, length=64)
MASKED = 0.15  # share of the characters
WARMTH = 2.0  # temperature of the teacher's probabilities
SOFT, HARD, COSINE = 5.0, 2.0, 1.0  # weights of the three parts


def masked_model(n_layers: int) -> ModelConfig:
    """Return the config of an encoder of characters, with one id more for what is masked."""
    return small_model(family="encoder", head="mlm", n_layers=n_layers, vocab_size=text().vocab_size + 1)


def draw_masked(generator: torch.Generator, held_out: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Draw ids with some masked [B, T], the true characters [B, T], and which are masked [B, T]."""
    rows = text().windows(generator, USUAL.batch, USUAL.length, held_out)[:, :-1]
    masked = torch.rand(rows.shape, generator=generator) < MASKED
    return rows.masked_fill(masked, text().vocab_size), rows, masked


def run_distillation(arm: str, setting: Conditions) -> Numbers:
    """Train a teacher of four layers, then a student of two, alone or with its help."""
    teacher = Transformer(masked_model(4))
    loss_curve(teacher, draw_masked, masked_loss, TEACHER, setting)
    torch.manual_seed(setting.seed + 1)
    student = Transformer(masked_model(2))
    if arm == "taught, begun from the teacher":
        copy_layers(student, teacher)

    def taught_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        ids, wanted, masked = batch
        output = model(ids)
        with torch.no_grad():
            guide = teacher(ids)
        soft = nnf.kl_div(
            (output.required_logits[masked] / WARMTH).log_softmax(-1),
            (guide.required_logits[masked] / WARMTH).softmax(-1),
            reduction="batchmean",
        )
        hard = nnf.cross_entropy(output.required_logits[masked], wanted[masked])
        apart = 1 - nnf.cosine_similarity(output.hidden, guide.hidden, dim=-1).mean()
        return SOFT * WARMTH**2 * soft + HARD * hard + COSINE * apart

    loss_of = masked_loss if arm == "alone" else taught_loss
    steps = train(student, draw_masked, loss_of, USUAL, setting, every=30)
    curve = [[step, unseen_masked_loss(student)] for step, _, _ in steps]
    return {"loss": unseen_masked_loss(student), "teacher": unseen_masked_loss(teacher), "curve": curve}


def masked_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Return the mean cross-entropy of the masked characters."""
    ids, wanted, masked = batch
    return nnf.cross_entropy(model(ids).required_logits[masked], wanted[masked])


@torch.no_grad()
def unseen_masked_loss(model: nn.Module) -> float:
    """Return the loss of masked characters of text that was not trained on, in nats."""
    generator, training = torch.Generator().manual_seed(1), model.training
    model.eval()
    batches = [moved(draw_masked(generator, held_out=True), device_of(model)) for _ in range(8)]
    losses = [float(masked_loss(model, batch)) for batch in batches]
    model.train(training)
    return sum(losses) / len(losses)


def copy_layers(student: Transformer, teacher: Transformer) -> None:
    """Give the student the teacher's tables, and every second of its layers."""
    weights = teacher.state_dict()
    kept = {name: value for name, value in weights.items() if ".blocks." not in name}
    for number in range(len(student.main.blocks)):
        old, new = f".blocks.{2 * number}.", f".blocks.{number}."
        kept |= {name.replace(old, new): value for name, value in weights.items() if old in name}
    student.load_state_dict(kept)


DISTILLATION = Experiment(
    title="Distillation, by DistilBERT's recipe",
    question="Does a small encoder learn more from a larger one than from the text alone?",
    arms={name: name for name in ("alone", "taught", "taught, begun from the teacher")},
    run=run_distillation,
    claims={
        "A teacher's probabilities help.": Claim("loss", "taught", "alone", 0.0),
        "Half of the teacher's layers are a good start.": Claim(
            "loss", "taught, begun from the teacher", "taught", 0.0
        ),
    },
    figures={"loss": "nats a masked character of unseen text", "teacher": "the same of the teacher"},
    pictures=(
        Picture("loss", "Loss of the student on unseen text", "step", "nats a character", curve="curve"),
        Picture("final", "Loss of the student", "", "nats a character", figure="loss"),
    ),
    seconds=90,
    setup={
        "teacher": lambda setting: f"4 layers, {setting.steps(TEACHER.steps)} steps",
        "student": "2 layers",
        "masked": MASKED,
        "temperature": WARMTH,
        "weights": f"soft {SOFT:g}, hard {HARD:g}, cosine {COSINE:g}",
        **vars(USUAL),
    },
)


# Tokenizers on one text, compared by bits a byte, which do not depend on the tokens -----------------------


CHARACTERS = 400_000  # of the text
TOKENIZER_ARMS: dict[str, tuple[TokenKind, int | None]] = {  # all spell any text
    "bytes": ("byte", None),
    "BPE, 512 tokens": ("bpe", 512),
    "BPE, 2,048 tokens": ("bpe", 2048),
    "Unigram, 2,048 tokens": ("unigram", 2048),
}


def run_tokenizers(arm: tuple[TokenKind, int | None], setting: Conditions) -> Numbers:
    """Train a tokenizer on the text before the held-out tenth, and a model on as many tokens as any other."""
    kind, size = arm
    whole = prose(characters=CHARACTERS)
    cut = whole.rindex("\n", 0, CHARACTERS * 9 // 10) + 1
    parts = whole[:cut], whole[cut:]
    tokenizer = train_tokenizer([parts[0]], TokensPlan(kind=kind, vocab_size=size), GENERATOR, len(whole))
    train, held_out = (torch.tensor(tokenizer.encode(part, add_special_tokens=False).ids) for part in parts)
    vocab_size = tokenizer.get_vocab_size()
    model, corpus = Transformer(small_model(vocab_size=vocab_size)), Text(train, held_out, vocab_size)
    numbers = train_on_text(model, USUAL, setting, corpus=corpus)
    size_of = len(parts[1].encode()) / len(held_out)  # bytes of a token
    bits = numbers["loss"] / math.log(2)
    return {
        **numbers,
        "bits a byte": bits / size_of,
        "bits a token": bits,
        "bytes a token": size_of,
        "curve": [[step, loss / math.log(2) / size_of] for step, loss in numbers["curve"]],
    }


TOKENIZERS = Experiment(
    title="Kinds of tokenizer on one text",
    question="Which pieces of text does a model learn from best, at equal steps?",
    arms=TOKENIZER_ARMS,
    run=run_tokenizers,
    claims={
        "Larger pieces need fewer bits for the same text.": Claim(
            "bits a byte", "BPE, 2,048 tokens", "bytes"
        ),
        "The loss of a token says the opposite, which is why tokenizers are not compared by it.": Claim(
            "bits a token", "bytes", "BPE, 2,048 tokens"
        ),
        "Merges cover more text with a token than bytes.": Claim("bytes a token", "bytes", "BPE, 512 tokens"),
    },
    figures={
        "bits a byte": "bits that the model needs for a byte of unseen text",
        "bits a token": "the same for a token",
        "bytes a token": "bytes of the text that a token stands for",
        "parameters": "weights",
    },
    pictures=(
        Picture("bits", "Bits a byte while training", "step", "bits", curve="curve"),
        Picture("final", "Bits a byte of unseen text", "", "bits", figure="bits a byte"),
    ),
    seconds=30,
    setup={"model": "2 layers of width 64, 4 heads", "text": f"{CHARACTERS:,} characters", **vars(USUAL)},
)
