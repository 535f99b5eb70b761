"""The commands `index`, `search` and `answer`, and passages of an index for other commands."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional

from clearhead.app.commands.common import (
    Device,
    Folder,
    Json,
    load_model,
    option,
    print_notes,
    progress,
    show_result,
    warnings_as_notes,
)
from clearhead.app.commands.texts import Options, TextOptions, texts_of
from clearhead.app.report import table
from clearhead.errors import refuse
from clearhead.labs.retrieval.passages import cited
from clearhead.learn.tasks.results import Answer

Retrieve = Annotated[Path | None, option("put the nearest passages of this index before the text")]
Passages = Annotated[int, option("of --retrieve: how many passages")]
Ways = Literal["both", "meaning", "words"]
IndexFolder = Annotated[Positional[Path], option("an index, made by clearhead index", metavar="INDEX")]
Stale = Annotated[bool, option("search even where files have changed since they were indexed")]
Embedder = Annotated[Path | None, option("the embedder; default: that of the index", metavar="DIR")]


def index(
    files: Annotated[
        Positional[tuple[Path, ...]],
        option("files and folders of text or .jsonl, .gz as well; none: those of the index", metavar="FILE"),
    ] = (),
    out: Annotated[Path, option("the folder of the index", metavar="INDEX")] = Path("index"),
    model: Embedder = None,
    words: Annotated[
        int | None,
        option(
            "words of a passage of plain text, at most; default: as before, or 150 and what --model reads"
        ),
    ] = None,
    skip_unreadable: Annotated[bool, option("leave out files that cannot be read, and name them")] = False,
    nearest: Annotated[
        Literal["exact", "hnsw"] | None,
        option("compare every vector, or those that a graph proposes; default: as before, or exact"),
    ] = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Index the passages of files, to search them by meaning and by words.

    Given again, the command embeds only what has changed. It may be stopped at any moment.

    For example:
      clearhead index notes/ --model my-encoder/ --out notes.index
      clearhead index --out notes.index
      clearhead index papers.jsonl.gz --model my-encoder/ --device cuda
    """
    _check_device(model, device)
    embedder = None if model is None else load_model(model, device=device)
    from clearhead.labs.retrieval.index import build_index

    with warnings_as_notes(), progress() as show:
        made = build_index(out, embedder, files, words, skip_unreadable, nearest, show)
    sources = made.manifest["sources"]
    body = {"index": str(out), "files": len(sources), "passages": len(made), "model": made.manifest["model"]}
    show_result(body, json, [f"{out}: {len(made):,} passages of {len(sources):,} files"])


def search(
    folder: IndexFolder,
    query: Annotated[
        Positional[str | None],
        option("what to look for; - or nothing: stdin, one query per line", metavar="QUERY"),
    ] = None,
    k: Annotated[int, option("how many passages")] = 5,
    by: Annotated[Ways, option("compare meaning (vectors), words (BM25), or both ranks")] = "both",
    exact: Annotated[bool, option("compare every vector, even where the index has a graph (hnsw)")] = False,
    model: Embedder = None,
    stale: Stale = False,
    full: Annotated[bool, option("print whole passages, not the first two lines of each")] = False,
    options: Options = TextOptions(),  # noqa: B008
) -> None:
    """Find the passages nearest to a query.

    For example:
      clearhead search notes.index "where did we meet?"
      clearhead search notes.index "error 1402" --by words --k 3 --full
      clearhead search notes.index --file queries.txt --json --output found.jsonl
    """
    _check_device(model, options.device)
    from clearhead.labs.retrieval.index import Index

    found = Index(folder, None if model is None else options.load(model), stale, exact)

    def line(fields: dict[str, Any], hits: list[Any]) -> str:
        return "\n".join(f"{hit.score:.4f}\t{hit.passage.place}\t{hit.passage.text}" for hit in hits)

    def show(hits: list[Any]) -> str:
        return "\n".join(_shown(number, hit, full) for number, hit in enumerate(hits, start=1))

    options.run(
        {"query": query},
        compute=lambda batch: found.search_all([fields["query"] for fields in batch], k, by) if batch else [],
        body=lambda fields, hits: {**fields, "passages": [cited(hit) for hit in hits]},
        line=line,
        show=show,
    )


def _shown(number: int, hit: Any, full: bool) -> str:
    """Return a passage for people: its score and place, and below the first two lines of its text, or all."""
    width, indent = shutil.get_terminal_size().columns, "   "
    if full:
        text = textwrap.indent(hit.text, indent)
    else:
        words = " ".join(hit.text.split())
        text = textwrap.fill(
            words, width, initial_indent=indent, subsequent_indent=indent, max_lines=2, placeholder=" ..."
        )
    return f"{number}. {hit.score:.4f}  {hit.passage.place}\n{text}"


def _check_device(model: Path | None, device: str) -> None:
    """Refuse a device without the embedder that is to be on it: the index's own is loaded on the CPU."""
    refuse(
        model is None and device not in ("auto", "cpu"),
        f"--device {device} is for the embedder: name it too, by --model DIR",
    )


def reader(folder: Path | None, passages: int) -> Callable[[str], list[Any]]:
    """Return a function from a text to its nearest passages; of no index, to none."""
    if folder is None:
        return lambda text: []
    refuse(passages < 1, f"--passages {passages} must be 1 or more")
    from clearhead.labs.retrieval.index import Index

    opened = Index(folder)
    return lambda text: opened.search(text, passages)


def cite(fields: dict[str, Any], hits: list[Any], json: bool) -> None:
    """Add passages to an input's fields, and print where they stand to stderr where JSON does not say it."""
    fields["passages"] = list(map(cited, hits))
    if not json:
        print_notes(f"[{number}] {hit.passage.place}" for number, hit in enumerate(hits, start=1))


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
    retrieve: Annotated[
        Path | None, option("look in the nearest passages of this index, in place of a context")
    ] = None,
    passages: Passages = 3,
    options: Options = TextOptions(),  # noqa: B008
) -> None:
    """Find the part of a text that answers a question.

    For example:
      clearhead answer my-model/ "Who lives in Berlin?" "Anna lives in Berlin."
      clearhead answer my-model/ --file questions.jsonl --json
      clearhead answer my-model/ "Who lives in Berlin?" --retrieve notes.index
    """
    refuse(retrieve is not None and context is not None, "--retrieve finds the context: leave CONTEXT out")
    find = reader(retrieve, passages)
    model = options.load(folder)
    limits = {"max_tokens": max_tokens, "stride": stride, "batch_size": options.rows}

    def compute(batch: list[dict[str, Any]]) -> list[Answer]:
        if retrieve is None or not batch:
            asked, given = ([fields[name] for fields in batch] for name in ("question", "context"))
            return model.answer(asked, given, none=none, **limits)
        return list(map(from_passages, batch))

    def from_passages(fields: dict[str, Any]) -> Answer:
        """Read each passage by itself; cite the one with the likeliest answer first."""
        hits = find(fields["question"])
        found = model.answer(
            [fields["question"]] * len(hits), [hit.passage.text for hit in hits], none=none, **limits
        )
        order = sorted(range(len(hits)), key=lambda n: (not found[n].text, -found[n].score))
        cite(fields, [hits[n] for n in order], options.json)
        return found[order[0]]

    options.run(
        {"question": question} | ({"context": context} if retrieve is None else {}),
        compute,
        body=lambda fields, made: {
            **{name: value for name, value in fields.items() if name != "context"},
            **asdict(made),
        },
        line=lambda fields, made: made.text,
    )


def rerank(
    folder: Folder,
    query: Annotated[Positional[str], option("what the texts are to answer", metavar="QUERY")],
    texts: Annotated[
        Positional[tuple[str, ...]], option("the texts; none: those of --file", metavar="TEXT")
    ] = (),
    file: Annotated[Path | None, option("read one text per line; - : stdin", aliases=("--data",))] = None,
    top: Annotated[int | None, option("show so many")] = None,
    batch_size: Annotated[int, option("texts at a time")] = 32,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Put the texts first that answer a query best, by a cross-encoder or by vectors.

    For example:
      clearhead rerank my-reranker/ "Where is Anna?" "Anna is here." "It rains."
      clearhead rerank my-reranker/ "Where is Anna?" --file notes.txt --top 3
    """
    refuse(bool(texts) == (file is not None), "give the texts to rank, or one --file of them, one on a line")
    refuse(batch_size < 1, f"batch-size {batch_size} must be 1 or more")
    given = list(texts) if file is None else texts_of(file)
    found = load_model(folder, device=device).rerank(query, given, top, batch_size)
    rows = [[f"{one.score:.4f}", str(one.index + 1), one.text] for one in found]
    shown = table(query, ["score", "number", "text"], rows)
    show_result({"results": [asdict(one) for one in found]}, json, [shown])
