"""The commands `index`, `search` and `answer`, and passages of an index for other commands."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from clearhead.app.commands.common import Folder, load_model, option, print_notes, warnings_as_notes
from clearhead.app.commands.texts import USUAL, Options, texts_of
from clearhead.app.report import Column, listing
from clearhead.app.views import ModelArgument, OnProgress, View
from clearhead.errors import refuse
from clearhead.labs.retrieval.passages import cited
from clearhead.learn.tasks.results import Answer

Retrieve = Annotated[Path | None, option("put the nearest passages of this index before the text")]
Passages = Annotated[int, option("of --retrieve: how many passages")]
Ways = Literal["both", "meaning", "words"]
Embedder = Annotated[Path | None, option("the embedder; default: that of the index", metavar="DIR")]


def index(
    files: tuple[Path, ...] = (),
    *,
    out: Path = Path("index"),
    model: Embedder = None,
    words: int | None = None,
    skip_unreadable: bool = False,
    nearest: Literal["exact", "hnsw"] | None = None,
    device: str = "auto",
    on_progress: OnProgress = lambda stage, done, total: None,
) -> View:
    """Index the passages of files, to search them by meaning and by words.

    The embedder makes one vector of a passage, a sparse one (SPLADE), or one for each token (ColBERT). Given
    again, the command embeds only what has changed. It may be stopped at any moment.

    Args:
        files (FILE): files and folders of text or .jsonl, .gz as well; none: those of the index
        out (INDEX): the folder of the index
        words: words of a passage of plain text, at most; default: as before, or 150 and what --model reads
        skip_unreadable: leave out files that cannot be read, and name them
        nearest: compare every vector, or those that a graph proposes; default: as before, or exact

    For example:
      clearhead index notes/ --model my-encoder/ --out notes.index
      clearhead index --out notes.index
      clearhead index papers.jsonl.gz --model my-encoder/ --device cuda
    """
    _check_device(model, device)
    embedder = None if model is None else load_model(model, device=device)
    from clearhead.labs.retrieval.index import build_index

    with warnings_as_notes():
        built = build_index(out, embedder, files, words, skip_unreadable, nearest, on_progress)
    sources = built.manifest["sources"]
    body = {
        "index": str(out),
        "files": len(sources),
        "passages": len(built),
        "vectors": built.kind,
        "model": built.manifest["model"],
    }
    return View(body, [f"{out}: {len(built):,} passages of {len(sources):,} files"])


def search(
    folder: Path,
    query: str | None = None,
    *,
    k: int = 5,
    by: Ways = "both",
    exact: bool = False,
    model: Embedder = None,
    stale: bool = False,
    full: bool = False,
    options: Options = USUAL,
) -> None:
    """Find the passages nearest to a query.

    Args:
        folder (INDEX): an index, made by clearhead index
        query (QUERY): what to look for; - or nothing: stdin, one query per line
        k: how many passages
        by: compare meaning (vectors), words (BM25), or both ranks
        exact: compare every vector, even where the index has a graph (hnsw)
        stale: search even where files have changed since they were indexed
        full: print whole passages, not the first two lines of each

    For example:
      clearhead search notes.index "where did we meet?"
      clearhead search notes.index "error 1402" --by words --k 3 --full
      clearhead search notes.index --file queries.txt --json --output found.jsonl
    """
    _check_device(model, options.device)
    from clearhead.labs.retrieval.index import Index

    index = Index(folder, None if model is None else options.load(model), stale, exact)

    def line(fields: dict[str, Any], hits: list[Any]) -> str:
        return "\n".join(f"{hit.score:.4f}\t{hit.passage.place}\t{hit.passage.text}" for hit in hits)

    def show(hits: list[Any]) -> str:
        """Show the score and the place of each passage, and below it two lines of its text, or all."""
        two = textwrap.TextWrapper(
            shutil.get_terminal_size().columns, "   ", "   ", max_lines=2, placeholder=" ..."
        )
        return "\n".join(
            f"{number}. {hit.score:.4f}  {hit.passage.place}\n"
            + (textwrap.indent(hit.text, "   ") if full else two.fill(" ".join(hit.text.split())))
            for number, hit in enumerate(hits, start=1)
        )

    options.run(
        {"query": query},
        compute=lambda batch: index.search_all([fields["query"] for fields in batch], k, by) if batch else [],
        body=lambda fields, hits: {**fields, "passages": [cited(hit) for hit in hits]},
        line=line,
        show=show,
    )


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
    question: str | None = None,
    context: str | None = None,
    *,
    none: bool = False,
    max_tokens: int = 30,
    stride: int = 128,
    retrieve: Path | None = None,
    passages: Passages = 3,
    options: Options = USUAL,
) -> None:
    """Find the part of a text that answers a question.

    Args:
        question (QUESTION): - or nothing: stdin, question, tab, context on a line
        context (CONTEXT): the text to look in
        none: allow that the context has no answer
        max_tokens: the longest answer
        stride: tokens that two windows over a long context share
        retrieve: look in the nearest passages of this index, in place of a context

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
            questions, contexts = ([fields[name] for fields in batch] for name in ("question", "context"))
            return model.answer(questions, contexts, none=none, **limits)
        return list(map(from_passages, batch))

    def from_passages(fields: dict[str, Any]) -> Answer:
        """Read each passage by itself; cite the one with the likeliest answer first."""
        hits = find(fields["question"])
        answers = model.answer(
            [fields["question"]] * len(hits), [hit.passage.text for hit in hits], none=none, **limits
        )
        order = sorted(range(len(hits)), key=lambda n: (not answers[n].text, -answers[n].score))
        cite(fields, [hits[n] for n in order], options.json)
        return answers[order[0]]

    options.run(
        {"question": question} | ({"context": context} if retrieve is None else {}),
        compute,
        body=lambda fields, result: {
            **{name: value for name, value in fields.items() if name != "context"},
            **asdict(result),
        },
        line=lambda fields, result: result.text,
    )


def rerank(
    model: ModelArgument,
    query: str,
    texts: tuple[str, ...] = (),
    *,
    file: Path | None = None,
    top: int | None = None,
    batch_size: int = 32,
) -> View:
    """Put the texts first that answer a query best, by a cross-encoder or by vectors of any kind.

    Args:
        query (QUERY): what the texts are to answer
        texts (TEXT): the texts; none: those of --file
        file (--data): read one text per line; - : stdin
        top: show so many
        batch_size: texts at a time

    For example:
      clearhead rerank my-reranker/ "Where is Anna?" "Anna is here." "It rains."
      clearhead rerank my-reranker/ "Where is Anna?" --file notes.txt --top 3
    """
    refuse(bool(texts) == (file is not None), "give the texts to rank, or one --file of them, one on a line")
    refuse(batch_size < 1, f"batch-size {batch_size} must be 1 or more")
    candidates = list(texts) if file is None else texts_of(file)
    ranked = model().rerank(query, candidates, top, batch_size)
    columns: dict[str, Column] = {"score": "{.score:.4f}", "number": lambda hit: str(hit.index + 1)}
    shown = listing(query, columns | {"text": "{.text}"}, ranked)
    return View({"results": [asdict(hit) for hit in ranked]}, [shown])
