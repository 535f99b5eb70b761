"""Commands for models that read: classify, predict, tag, fill, answer, embed."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from tyro.conf import Positional

from clearhead.commands.common import Folder, option
from clearhead.commands.texts import Input, Options, Text, TextOptions
from clearhead.report import class_table, fill_table, tag_table


def classify(
    folder: Folder,
    text: Annotated[
        Positional[str | None],
        option("a text, or an image file; - or nothing: stdin, one per line", metavar="TEXT"),
    ] = None,
    pair: Annotated[str | None, option("the second text, for a model of pairs; in JSON lines: pair")] = None,
    options: Options = TextOptions(),  # noqa: B008
) -> None:
    """Find the class of a text, a pair of texts or an image, with its probability.

    For example:
      clearhead classify my-model/ "A film to see twice."
      clearhead classify my-model/ --file reviews.txt --json
      clearhead classify my-vit/ photo.png
    """
    model = options.load(folder)

    def work(batch: list[Input]) -> list[Any]:
        pairs = [item.fields.get("pair") for item in batch]
        texts = [(text, pair) if pair is not None else text for text, pair in zip(_texts(batch), pairs)]
        made: Any = model.classify(texts, batch_size=options.batch_size)
        return list(made)

    def line(item: Input, made: Any) -> str:
        return f"{made.label}\t{made.probability:.4f}"

    options.run({"text": text}, work, _body, line, class_table, {"pair": pair})


def predict(
    folder: Folder,
    text: Text = None,
    pair: Annotated[str | None, option("the second text, for a model of pairs; in JSON lines: pair")] = None,
    options: Options = TextOptions(),  # noqa: B008
) -> None:
    """Predict a number for a text or a pair of texts, with a model of task regress.

    For example:
      clearhead predict my-model/ "A film to see twice."
      clearhead predict my-model/ --file reviews.txt --json
    """
    model = options.load(folder)

    def work(batch: list[Input]) -> list[Any]:
        from clearhead.tasks.entries.regression import predict

        pairs = [item.fields.get("pair") for item in batch]
        texts = [(text, pair) if pair is not None else text for text, pair in zip(_texts(batch), pairs)]
        made: Any = predict(model, texts, options.batch_size)
        return list(made)

    def body(item: Input, made: Any) -> dict[str, Any]:
        return {**item.fields, "number": made}

    options.run({"text": text}, work, body, lambda item, made: f"{made:.6g}", more={"pair": pair})


def tag(folder: Folder, text: Text = None, options: Options = TextOptions()) -> None:  # noqa: B008
    """Tag each word of a text, and find the spans that the tags make.

    For example:
      clearhead tag my-model/ "Anna lives in Berlin."
      clearhead tag my-model/ --file sentences.txt --json
    """
    model = options.load(folder)

    def work(batch: list[Input]) -> list[Any]:
        from clearhead.tasks.reading import tag

        return tag(model, _texts(batch), options.batch_size)

    def line(item: Input, made: Any) -> str:
        return " ".join(f"{word.text}/{word.label}" for word in made.words)

    options.run({"text": text}, work, _body, line, tag_table)


def fill(
    folder: Folder,
    text: Text = None,
    k: Annotated[int, option("how many candidates for each mask")] = 5,
    options: Options = TextOptions(),  # noqa: B008
) -> None:
    """Fill in the masked words of a text, with the likeliest candidates of a masked model.

    For example:
      clearhead fill my-model/ "The [MASK] sat on the mat."
      clearhead fill my-model/ --file texts.txt --k 1
    """
    model = options.load(folder)

    def work(batch: list[Input]) -> list[Any]:
        made = model.fill(_texts(batch), k, options.batch_size)
        return [found if isinstance(found[0], list) else [found] for found in made]

    def body(item: Input, made: Any) -> dict[str, Any]:
        return {"text": item.fields["text"], "masks": [[asdict(one) for one in mask] for mask in made]}

    def line(item: Input, made: Any) -> str:
        return "\t".join(" ".join(f"{one.token}:{one.probability:.4f}" for one in mask) for mask in made)

    options.run({"text": text}, work, body, line, fill_table)


def answer(
    folder: Folder,
    question: Annotated[
        Positional[str | None],
        option("- or nothing: stdin, question, tab, context on a line", metavar="QUESTION"),
    ] = None,
    context: Annotated[Positional[str | None], option("the text to look in", metavar="CONTEXT")] = None,
    none: Annotated[bool, option("allow that the context has no answer")] = False,
    max_tokens: Annotated[int, option("the longest answer")] = 30,
    stride: Annotated[int, option("tokens that two windows over a long context share")] = 128,
    options: Options = TextOptions(),  # noqa: B008
) -> None:
    """Find the part of a text that answers a question.

    For example:
      clearhead answer my-model/ "Who lives in Berlin?" "Anna lives in Berlin."
      clearhead answer my-model/ --file questions.jsonl --json
    """
    model = options.load(folder)

    def work(batch: list[Input]) -> list[Any]:
        questions, contexts = _texts(batch, "question"), _texts(batch, "context")
        limits = {"max_tokens": max_tokens, "stride": stride, "batch_size": options.batch_size}
        made: Any = model.answer(questions, contexts, none=none, **limits)
        return list(made)

    def body(item: Input, made: Any) -> dict[str, Any]:
        return {"question": item.fields["question"], **asdict(made)}

    options.run({"question": question, "context": context}, work, body, lambda item, made: str(made.text))


def embed(folder: Folder, text: Text = None, options: Options = TextOptions()) -> None:  # noqa: B008
    """Turn a text into one vector.

    For example:
      clearhead embed my-model/ "A quiet town by the river."
      clearhead embed my-model/ --file sentences.txt --json --output vectors.jsonl
    """
    model = options.load(folder)

    def work(batch: list[Input]) -> list[Any]:
        return list(model.embed(_texts(batch), options.batch_size).tolist())

    def body(item: Input, made: Any) -> dict[str, Any]:
        return {"text": item.fields["text"], "embedding": made}

    options.run({"text": text}, work, body, lambda item, made: " ".join(f"{value:.6g}" for value in made))


def _texts(batch: list[Input], field: str = "text") -> list[str]:
    return [item.fields[field] for item in batch]


def _body(item: Input, made: Any) -> dict[str, Any]:
    """Return an input's fields and its result in one JSON object."""
    return {**item.fields, **asdict(made)}
