"""Commands that use a model: generate, translate, transcribe, score, classify, predict, tag, fill, embed."""

from __future__ import annotations

import json as jsonlib
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from tyro.conf import arg

from clearhead.app.commands.common import (
    Folder,
    TokenIds,
    check_apart,
    is_own,
    load_model,
    option,
    print_notes,
    warnings_as_notes,
    writing,
)
from clearhead.app.commands.requests import GroupedRequest
from clearhead.app.commands.retrieve import Passages, Retrieve, cite, reader
from clearhead.app.commands.texts import USUAL, Input, Options, Text, results, together
from clearhead.app.report import class_table, fill_table, score_table, tag_table
from clearhead.errors import ClearheadError, InputError, refuse
from clearhead.labs.retrieval.passages import before_prompt
from clearhead.learn.tasks.results import (
    TRANSCRIPT_SUFFIXES,
    Candidate,
    Generation,
    segments_as,
    transcript_lines,
    transcript_values,
)
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
        from clearhead.learn.tasks.vectors import check_labels, towers_of

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
        from clearhead.learn.tasks.vectors import towers_of

        towers_of(model, "embed --images")
    read, dense = Path if images else str, model.sentences is None or model.sentences.kind == "dense"
    output, apart = options.output, "\n" if text in (None, "-") else ""
    refuse(
        not dense and output is not None and output.suffix == ".npy",
        f"--output {output}: a .npy file holds one vector for each text, and this model makes "
        "others: use --json",
    )

    def compute(batch: list[dict[str, Any]]) -> list[Any]:
        vectors = model.embed([read(name) for name in _texts(batch)], options.batch_size, prompt)
        return list(vectors.tolist() if dense else (_spelled_out(model, vector) for vector in vectors))

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


def transcribe(
    folder: Folder,
    files: tuple[Path, ...],
    *,
    language: str | None = None,
    task: Literal["transcribe", "translate"] = "transcribe",
    timestamps: bool = False,
    words: bool = False,
    prompt: str | None = None,
    format: Literal["txt", "srt", "vtt", "json"] | None = None,
    max_new_tokens: int | None = None,
    temperature: tuple[float, ...] = (0.0,),
    compression_ratio_threshold: float | None = None,
    logprob_threshold: float | None = None,
    no_speech_threshold: float | None = None,
    seed: int = 0,
    output: Path | None = None,
    json: bool = False,
    batch_size: int = 8,
    tokenizer: Path | None = None,
    device: str = "auto",
    dtype: str | None = None,
) -> None:
    """Write down what is said in sound files; long ones are read by windows.

    Args:
        files (FILE): sound: WAV, FLAC, OGG, MP3
        language: what is spoken, such as de or german; default: what the model hears
        task: write down what is said, or its English translation
        timestamps: segments, each with the time when it begins and ends
        words: words, each with the time when it begins and ends; in --json next to the segments
        prompt: text before the transcript: names, spelling and style that the model takes up
        format: segments as OpenAI's program writes them: lines or subtitles; json: --json with times
        max_new_tokens: tokens of a window at most; default: what the model has room for
        temperature (T): how freely tokens are drawn, 0: the best each time; several are tried in order
        compression_ratio_threshold: with several T, one that repeats itself more is read again (default:
            1.35)
        logprob_threshold: a window whose tokens are less probable is read again, too (default: -1)
        no_speech_threshold: such an improbable window is skipped where silence is likelier (default: 0.6)
        seed: for tokens that are drawn
        output: write there, whole or not at all; of several files in txt, srt or vtt: a directory
        json: a JSON object for each file, on one line
        batch_size: windows of 30 seconds at a time

    For example:
      clearhead transcribe whisper/ talk.wav
      clearhead transcribe whisper/ talk.flac --timestamps
      clearhead transcribe whisper/ talk.flac --words
      clearhead transcribe whisper/ talk.wav --format srt --output talk.srt
      clearhead transcribe whisper/ rede.wav --language german --task translate
      clearhead transcribe whisper/ talk.wav --temperature 0 0.2 0.4 0.6 0.8 1
      clearhead transcribe whisper/ clips/*.wav --json --output clips.jsonl
    """
    refuse(not files, "no sound was given: name one file or several after the directory")
    refuse(max_new_tokens is not None and max_new_tokens < 1, f"max-new-tokens {max_new_tokens} is below 1")
    refuse(json and format is not None, f"--json and --format {format} were both given: leave one out")
    single, whole = len(files) == 1, format if format in TRANSCRIPT_SUFFIXES else None
    refuse(words and whole, f"--words and --format {format} were both given: words go with json, or alone")
    refuse(single and not files[0].is_file(), f"{files[0]} is no file: give a sound file")
    check_apart(output, files)
    targets = {} if whole is None else _targets(files, whole, output)
    model = load_model(folder, tokenizer, device, dtype)
    options: dict[str, Any] = {
        **{"language": language, "task": task, "timestamps": timestamps or format is not None},
        **{"words": words, "prompt": prompt},
        **{"max_new_tokens": max_new_tokens, "batch_size": batch_size},
        **{"temperature": temperature, "seed": seed},
        "compression_ratio_threshold": compression_ratio_threshold,
        "logprob_threshold": logprob_threshold,
        "no_speech_threshold": no_speech_threshold,
    }
    model.transcribe([], **options)  # a mistake in the options is reported once, before any sound is read
    if targets and not single:
        try:
            next(iter(targets.values())).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--output {output} cannot be made: {error.strerror}") from None
    failed = 0
    with writing(None if targets else output) as write:
        inputs = (Input({"file": str(file)}) for file in files)
        for item, transcript in results(
            inputs,
            lambda batch: model.transcribe([fields["file"] for fields in batch], **options),
            batch_size,
        ):
            name = item.fields["file"]
            if isinstance(transcript, ClearheadError):
                if single:
                    raise transcript
                failed += 1
                # Never where transcripts go; a JSON line is a record.
                print_notes([f"clearhead: {transcript}"])
                if json or format == "json":
                    write(jsonlib.dumps({"file": name, "error": str(transcript)}))
            elif json or format == "json":
                values = {"file": name, **transcript_values(transcript, words)}
                write(jsonlib.dumps(values, ensure_ascii=False))
            elif whole is not None:
                with writing(targets.get(Path(name))) as write_whole:
                    if text := segments_as(transcript.segments, whole):
                        write_whole(text)
            else:
                shown = (
                    f"{'' if single else f'{name}: '}{line}"
                    for line in transcript_lines(transcript, timestamps, words)
                )
                for line in shown:
                    write(line)
    if failed:
        print_notes([f"clearhead: {failed} of {len(files)} files failed"])
        sys.exit(1)


def _targets(files: Sequence[Path], format: str, output: Path | None) -> dict[Path, Path]:
    """Return the file that each transcript goes to; none for one sound and stdout."""
    if len(files) == 1:
        return {} if output is None else {files[0]: output}
    refuse(
        output is None or (output.exists() and not output.is_dir()),
        f"--format {format} makes one file of each sound, and {len(files)} were given: name a directory for "
        "them with --output",
    )
    assert output is not None
    targets = {file: output / f"{file.stem}.{format}" for file in files}
    twice = [path for path, count in Counter(targets.values()).items() if count > 1]
    shared = ", ".join(map(str, twice))
    refuse(twice, f"several sounds would be written to {shared}: transcribe those by themselves")
    for target in targets.values():
        check_apart(target, files)
    return targets
