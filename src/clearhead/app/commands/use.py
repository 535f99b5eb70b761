"""Commands that use a model: generate, translate, score, classify, predict, tag, fill, embed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from tyro.conf import arg

from clearhead.app.commands.common import Folder, TokenIds, is_own, option, warnings_as_notes
from clearhead.app.commands.requests import GroupedRequest
from clearhead.app.commands.retrieve import Passages, Retrieve, cite, reader
from clearhead.app.commands.texts import USUAL, Options, Text, together
from clearhead.app.report import class_table, fill_table, score_table, tag_table
from clearhead.errors import refuse
from clearhead.labs.retrieval.passages import before_prompt
from clearhead.learn.tasks.results import Candidate, Generation
from clearhead.run.generate.request import make_request

if TYPE_CHECKING:
    from clearhead.run.api import Model

PairText = Annotated[str | None, option("the second text, for a model of pairs; in JSON lines: pair")]


def generate(
    folder: Folder,
    prompt: str | None = None,
    *,
    asking: Annotated[GroupedRequest, arg(name="")] = GroupedRequest(),  # noqa: B008
    draft: Path | None = None,
    best: Annotated[
        int | None,
        option("report log-probabilities, and so many of the best tokens at each step", name="logprobs"),
    ] = None,
    stream: bool = False,
    ids: TokenIds = False,
    retrieve: Retrieve = None,
    passages: Passages = 3,
    options: Options = USUAL,
) -> None:
    """Continue a text.

    Args:
        prompt (TEXT): the text to continue (with an encoder: to answer); - or nothing: stdin, one prompt per
            line
        draft (DIR|mtp): a smaller model that proposes draft tokens, or the model's own MTP layers
        stream: print the text as it grows

    For example:
      clearhead generate my-model/ "Once upon a time"
      clearhead generate my-model/ "Once upon" --temperature 0.8 --seed 1 --stream
      clearhead generate my-model/ "Once upon" --beams 4 --num-return 2 --json
      clearhead generate my-model/ --file prompts.txt --output texts.txt
      echo "Once upon" | clearhead generate my-model/ -
      clearhead generate my-model/ "We met in" --retrieve notes.index
      torchrun --nproc-per-node 2 -m clearhead generate my-model/ "Once upon"
    """
    given = asking.given() | ({} if best is None else {"logprobs": True, "alternatives": best})
    request = make_request(given)  # a mistake is reported before the model is loaded
    refuse(ids and retrieve is not None, "--retrieve looks for text, and --ids gives none: leave one out")
    find = reader(retrieve, passages)
    live = stream and not options.json and prompt not in (None, "-")
    with together(options, prompt) as (options, parallel):
        model = options.load(folder, parallel)
        from clearhead.learn.tasks import generation

        own = draft is not None and is_own(draft)
        hooks = generation.Hooks(
            (lambda number, new: print(new, end="", flush=True)) if live else None,
            draft="mtp" if own else None if draft is None else options.load(draft),
        )

        def written(prompt: str | list[int]) -> str:
            if isinstance(prompt, str):
                return prompt
            if model.tokenizer is None:
                return "".join(f"{token} " for token in prompt)
            return str(model.decode(prompt))

        goes_on = model.config.family != "encoder-decoder"  # the new text goes on from the prompt

        def compute(batch: list[dict[str, Any]]) -> list[list[Generation]]:
            for fields in batch if live and goes_on else ():
                print(written(fields["prompt"]), end="", flush=True)
            prompts = [fields["prompt"] for fields in batch]
            for number, fields in enumerate(batch if retrieve is not None else ()):
                hits = find(prompts[number])
                room = model.max_length - request.max_new_tokens
                prompts[number], hits = before_prompt(
                    prompts[number], hits, lambda text: len(model.prompt_ids(text)), room
                )
                cite(fields, hits, options.json)
            return generation.generate(model, prompts, given, hooks)

        def body(fields: dict[str, Any], generations: list[Generation]) -> dict[str, Any]:
            bodies = [_as_json(generation) for generation in generations]
            return {**fields, **({"results": bodies} if request.num_return > 1 else bodies[0])}

        def line(fields: dict[str, Any], generations: list[Generation]) -> str:
            lead = written(fields["prompt"]) if goes_on else ""
            return "" if live else "\n".join(f"{lead}{_text(generation)}" for generation in generations)

        with warnings_as_notes():
            options.run({"prompt": prompt}, compute, body, line, ids=ids)


def _text(generation: Generation) -> str:
    """Return the text that was written; without a tokenizer, its token ids."""
    return " ".join(map(str, generation.ids)) if generation.text is None else generation.text


def _as_json(generation: Generation) -> dict[str, Any]:
    shown = {"text": generation.text, "ids": generation.ids, "stop_reason": generation.stop_reason}
    extra = {
        **{"logprobs": generation.logprobs, "alternatives": generation.alternatives},
        **{"score": generation.score, "layers": generation.layers},
    }
    return shown | {key: value for key, value in extra.items() if value is not None}


def translate(
    folder: Folder,
    text: Text = None,
    *,
    max_new_tokens: int | None = None,
    beams: int | None = None,
    length_penalty: float | None = None,
    ids: TokenIds = False,
    options: Options = USUAL,
) -> None:
    """Translate, or whatever else an encoder-decoder was trained to make of a text.

    For example:
      clearhead translate my-model/ "Ein Hund läuft."
      clearhead translate my-model/ --file german.txt --output english.txt
      cat german.txt | clearhead translate my-model/ --beams 1
    """
    model = options.load(folder)
    options.run(
        {"text": text},
        compute=lambda batch: model.translate(_texts(batch), max_new_tokens, beams, length_penalty),
        body=lambda fields, result: {"source": fields["text"], **_as_json(result)},
        line=lambda fields, result: _text(result),
        ids=ids,
    )


def score(
    folder: Folder,
    text: Text = None,
    *,
    source: str | None = None,
    ids: TokenIds = False,
    options: Options = USUAL,
) -> None:
    """How probable a model finds a text: log-probability of each token, total, perplexity.

    Args:
        source: what the encoder reads, for an encoder-decoder

    For example:
      clearhead score my-model/ "The cat sat on the mat"
      clearhead score my-model/ --json < texts.txt
    """
    model = options.load(folder)
    from clearhead.hub.tokens.text import labels
    from clearhead.learn.tasks.generation import check_scores

    check_scores(model)
    options.run(
        {"text": text},
        compute=lambda batch: [model.score(fields["text"], fields.get("source", source)) for fields in batch],
        body=lambda fields, result: {
            **{"text": fields["text"], "ids": result.ids, "logprobs": result.logprobs},
            **{"total": result.total, "perplexity": result.perplexity},
        },
        line=lambda fields, result: f"{result.total:.4f}\t{result.perplexity:.4f}",
        show=lambda result: score_table(result, labels(model.tokenizer, result.ids)),
        optional={"source": source},
        ids=ids,
    )


def classify(
    folder: Folder,
    text: str | None = None,
    *,
    pair: PairText = None,
    labels: tuple[str, ...] = (),
    options: Options = USUAL,
) -> None:
    """Find the class of a text, a pair of texts or an image, with its probability.

    Args:
        text (TEXT): a text, or an image file; - or nothing: stdin, one per line
        labels: the classes, in words, for an image and a model of two towers (CLIP, SigLIP)

    For example:
      clearhead classify my-model/ "A film to see twice."
      clearhead classify my-model/ --file reviews.txt --json
      clearhead classify my-vit/ photo.png
      clearhead classify my-clip/ photo.png --labels "a cat" "a dog"
    """
    model = options.load(folder)
    if labels or model.towers is not None:
        from clearhead.learn.tasks.towers import check_labels, towers_of

        towers_of(model, "classify --labels")
        refuse(not labels, 'this model finds one of the classes it is given: add --labels "a cat" "a dog"')
        refuse(pair is not None, "--pair is a text, and a model of two towers finds the class of an image")
        check_labels(labels)
    options.run(
        {"text": text},
        compute=lambda batch: model.classify(_pairs(batch), options.rows, labels or None),
        body=_joined,
        line=lambda fields, result: f"{result.label}\t{result.probability:.4f}",
        show=class_table,
        optional={"pair": pair},
    )


def predict(folder: Folder, text: Text = None, pair: PairText = None, options: Options = USUAL) -> None:
    """Predict a number for a text or a pair of texts, with a model of task regress.

    For example:
      clearhead predict my-model/ "A film to see twice."
      clearhead predict my-model/ --file reviews.txt --json
    """
    model = options.load(folder)
    from clearhead.learn.tasks.entries.classify import predict

    options.run(
        {"text": text},
        compute=lambda batch: cast(list[float], predict(model, _pairs(batch), options.rows)),
        body=lambda fields, result: {**fields, "number": result},
        line=lambda fields, result: f"{result:.6g}",
        optional={"pair": pair},
    )


def tag(folder: Folder, text: Text = None, options: Options = USUAL) -> None:
    """Tag each word of a text, and find the spans that the tags make.

    For example:
      clearhead tag my-model/ "Anna lives in Berlin."
      clearhead tag my-model/ --file sentences.txt --json
    """
    model = options.load(folder)
    from clearhead.learn.tasks.reading import tag

    options.run(
        {"text": text},
        compute=lambda batch: tag(model, _texts(batch), options.rows),
        body=_joined,
        line=lambda fields, result: " ".join(f"{word.text}/{word.label}" for word in result.words),
        show=tag_table,
    )


def fill(folder: Folder, text: Text = None, *, k: int = 5, options: Options = USUAL) -> None:
    """Fill in the masked words of a text, with the likeliest candidates of a masked model.

    Args:
        k: how many candidates for each mask

    For example:
      clearhead fill my-model/ "The [MASK] sat on the mat."
      clearhead fill my-model/ --file texts.txt --k 1
    """
    model = options.load(folder)
    from clearhead.learn.tasks.reading import fill

    def line(fields: dict[str, Any], masks: list[list[Candidate]]) -> str:
        return "\t".join(
            " ".join(f"{candidate.token}:{candidate.probability:.4f}" for candidate in mask) for mask in masks
        )

    options.run(
        {"text": text},
        compute=lambda batch: fill(model, _texts(batch), k, options.rows),
        body=lambda fields, masks: {
            **fields,
            "masks": [[asdict(candidate) for candidate in mask] for mask in masks],
        },
        line=line,
        show=fill_table,
    )


def embed(
    folder: Folder,
    text: Text = None,
    *,
    prompt: str | None = None,
    images: bool = False,
    options: Options = USUAL,
) -> None:
    """Turn a text, or an image, into a vector; of SPLADE a sparse one, of ColBERT one for each token.

    Args:
        prompt: the name of the model's prompt to put before each text; of ColBERT: query or document
        images: the texts are image files, for a model of two towers

    For example:
      clearhead embed my-model/ "A quiet town by the river."
      clearhead embed my-clip/ photo.png --images
      clearhead embed my-splade/ "A quiet town by the river." --prompt query
      clearhead embed my-model/ --file sentences.txt --output vectors.npy
      clearhead embed my-model/ --file sentences.txt --json --output vectors.jsonl
    """
    model = options.load(folder)
    if images:
        from clearhead.learn.tasks.towers import towers_of

        towers_of(model, "embed --images")
    read, dense = Path if images else str, model.sentences is None or model.sentences.kind == "dense"
    output, apart = options.output, "\n" if text in (None, "-") else ""
    refuse(
        not dense and output is not None and output.suffix == ".npy",
        f"--output {output}: a .npy file holds one vector for each text, and this model makes "
        "others: use --json",
    )

    def compute(batch: list[dict[str, Any]]) -> list[Any]:
        found = model.embed([read(name) for name in _texts(batch)], options.batch_size, prompt)
        return list(found.tolist() if dense else (_spelled_out(model, vector) for vector in found))

    options.run(
        {"text": text},
        compute,
        body=lambda fields, result: {**fields, "embedding": result},
        line=lambda fields, result: _row(result) if dense else _rows(result) + apart,
        array=dense,
        of_file=options.batch_size or 1024,
    )


def _spelled_out(model: Model, vector: Any) -> dict[str, Any] | list[list[float]]:
    """Return a sparse vector, or the vectors of tokens, as JSON has them."""
    from clearhead.hub.retrievers import SparseVector

    if not isinstance(vector, SparseVector):
        return cast(list[list[float]], vector.tolist())
    ids = vector.ids.tolist()
    tokens = [str(model.text_tokenizer.id_to_token(token)) for token in ids]
    return {"indices": ids, "values": vector.weights.tolist(), "tokens": tokens}


def _row(numbers: list[float]) -> str:
    return " ".join(f"{value:.6g}" for value in numbers)


def _rows(vector: dict[str, Any] | list[list[float]]) -> str:
    """Return the weights of a sparse vector, the largest first, or a line for the vector of each token."""
    if isinstance(vector, list):
        return "\n".join(map(_row, vector))
    pairs = sorted(zip(vector["values"], vector["tokens"]), key=lambda pair: -pair[0])
    return "\n".join(f"{weight:.4f}\t{token}" for weight, token in pairs)


def _texts(batch: list[dict[str, Any]], name: str = "text") -> list[str]:
    return [fields[name] for fields in batch]


def _pairs(batch: list[dict[str, Any]]) -> list[Any]:
    """Return the text of each input, or its pair of texts."""
    return [(fields["text"], fields["pair"]) if "pair" in fields else fields["text"] for fields in batch]


def _joined(fields: dict[str, Any], result: Any) -> dict[str, Any]:
    """Return an input and its result in one JSON object."""
    return {**fields, **asdict(result)}
