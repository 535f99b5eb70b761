"""Commands for models that read: classify, tag, fill, answer, embed."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from tyro.conf import Positional, arg

from clearhead.commands.common import Folder
from clearhead.commands.inputs import Item, Reading, Text

Options = Annotated[Reading, arg(name="")]


def classify(
    folder: Folder,
    text: Annotated[
        Positional[str | None],
        arg(metavar="TEXT", help="a text, or an image file; - or nothing: stdin, one per line"),
    ] = None,
    pair: Annotated[
        str | None, arg(help="the second text, for a model of pairs; in JSON lines: pair")
    ] = None,
    options: Options = Reading(),  # noqa: B008
) -> None:
    """The class of a text, a pair of texts or an image, with its probability.

    For example:
      clearhead classify my-model/ "A film to see twice."
      clearhead classify my-model/ --file reviews.txt --json
      clearhead classify my-vit/ photo.png
    """
    from clearhead.report import class_table

    loaded = options.load(folder)

    def work(batch: list[Item]) -> list[Any]:
        texts = [item.fields["text"] for item in batch]
        pairs = [
            (text, item.fields["pair"]) if "pair" in item.fields else text for text, item in zip(texts, batch)
        ]
        return loaded.classify(pairs, batch_size=options.batch_size)

    options.run(
        {"text": text},
        work,
        _body,
        lambda item, made: f"{made.label}\t{made.probability:.4f}",
        class_table,
        {"pair": pair},
    )


def tag(folder: Folder, text: Text = None, options: Options = Reading()) -> None:  # noqa: B008
    """A tag for each word of a text, and the spans they make.

    For example:
      clearhead tag my-model/ "Anna lives in Berlin."
      clearhead tag my-model/ --file sentences.txt --json
    """
    from clearhead.report import tag_table
    from clearhead.tasks.words import tag as tag_words

    loaded = options.load(folder)

    def work(batch: list[Item]) -> list[Any]:
        return tag_words(loaded, [item.fields["text"] for item in batch], options.batch_size)

    def line(item: Item, made: Any) -> str:
        return " ".join(f"{word.text}/{word.label}" for word in made.words)

    options.run({"text": text}, work, _body, line, tag_table)


def fill(
    folder: Folder,
    text: Text = None,
    k: Annotated[int, arg(help="how many candidates for each mask")] = 5,
    options: Options = Reading(),  # noqa: B008
) -> None:
    """The likeliest words in place of a masked model's mask.

    For example:
      clearhead fill my-model/ "The [MASK] sat on the mat."
      clearhead fill my-model/ --file texts.txt --k 1
    """
    from clearhead.report import fill_table
    from clearhead.tasks.blanks import fill as fill_masks

    loaded = options.load(folder)

    def work(batch: list[Item]) -> list[Any]:
        return fill_masks(loaded, [item.fields["text"] for item in batch], k, options.batch_size)

    def body(item: Item, made: Any) -> dict[str, Any]:
        return {"text": item.fields["text"], "masks": [[asdict(one) for one in mask] for mask in made]}

    def line(item: Item, made: Any) -> str:
        return "\t".join(" ".join(f"{one.token}:{one.probability:.4f}" for one in mask) for mask in made)

    options.run({"text": text}, work, body, line, fill_table)


def answer(
    folder: Folder,
    question: Annotated[
        Positional[str | None],
        arg(metavar="QUESTION", help="- or nothing: stdin, question, tab, context on a line"),
    ] = None,
    context: Annotated[Positional[str | None], arg(metavar="CONTEXT", help="the text to look in")] = None,
    none: Annotated[bool, arg(help="allow that the context has no answer")] = False,
    max_tokens: Annotated[int, arg(help="the longest answer")] = 30,
    stride: Annotated[int, arg(help="tokens that two windows over a long context share")] = 128,
    options: Options = Reading(),  # noqa: B008
) -> None:
    """The part of a text that answers a question.

    For example:
      clearhead answer my-model/ "Who lives in Berlin?" "Anna lives in Berlin."
      clearhead answer my-model/ --file questions.jsonl --json
    """
    loaded = options.load(folder)

    def work(batch: list[Item]) -> list[Any]:
        asked, given = ([item.fields[name] for item in batch] for name in ("question", "context"))
        return loaded.answer(
            asked, given, none=none, max_tokens=max_tokens, stride=stride, batch_size=options.batch_size
        )

    def body(item: Item, made: Any) -> dict[str, Any]:
        return {"question": item.fields["question"], **asdict(made)}

    options.run({"question": question, "context": context}, work, body, lambda item, made: str(made.text))


def embed(folder: Folder, text: Text = None, options: Options = Reading()) -> None:  # noqa: B008
    """One vector for a text.

    For example:
      clearhead embed my-model/ "A quiet town by the river."
      clearhead embed my-model/ --file sentences.txt --json --output vectors.jsonl
    """
    loaded = options.load(folder)

    def work(batch: list[Item]) -> list[Any]:
        vectors: list[Any] = loaded.embed(
            [item.fields["text"] for item in batch], options.batch_size
        ).tolist()
        return vectors

    def body(item: Item, made: Any) -> dict[str, Any]:
        return {"text": item.fields["text"], "embedding": made}

    options.run({"text": text}, work, body, lambda item, made: " ".join(f"{value:.6g}" for value in made))


def _body(item: Item, made: Any) -> dict[str, Any]:
    """An item's fields and its result, in one object."""
    return {**item.fields, **asdict(made)}
