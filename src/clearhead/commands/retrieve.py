"""The commands `index` and `search`, and passages of an index for other commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional

import clearhead as ch
from clearhead.commands.common import (
    Device,
    Json,
    load_model,
    option,
    print_notes,
    progress,
    show_result,
    warnings_as_notes,
)
from clearhead.commands.texts import Options, TextOptions
from clearhead.errors import refuse
from clearhead.report import table

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
        int | None, option("words of a passage of plain text, at most; default: as before, or 150")
    ] = None,
    skip_unreadable: Annotated[bool, option("leave out files that cannot be read")] = False,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Index the passages of files, to search them by meaning and by words.

    Given again, the command embeds only what has changed. It may be stopped at any moment.

    For example:
      clearhead index notes/ --model my-encoder/ --out notes.index
      clearhead index --out notes.index
      clearhead index abstracts.jsonl.gz --model my-encoder/ --out abstracts.index --device cuda
    """
    embedder = None if model is None else load_model(model, device=device)
    from clearhead.retrieval.index import build_index

    with warnings_as_notes(), progress() as show:
        made = build_index(out, embedder, files, words, skip_unreadable, show)
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
    model: Embedder = None,
    stale: Stale = False,
    options: Options = TextOptions(),  # noqa: B008
) -> None:
    """Find the passages nearest to a query.

    For example:
      clearhead search notes.index "where did we meet?"
      clearhead search notes.index "error 1402" --by words --k 3
      clearhead search notes.index --file queries.txt --json --output found.jsonl
    """
    from clearhead.retrieval.index import Index

    found = Index(folder, None if model is None else options.load(model), stale)

    def line(fields: dict[str, Any], hits: list[Any]) -> str:
        return "\n".join(f"{hit.score:.4f}\t{hit.passage.place}\t{hit.passage.text}" for hit in hits)

    def show(hits: list[Any]) -> Any:
        rows = [[f"{hit.score:.4f}", hit.passage.place, hit.passage.text] for hit in hits]
        return table("", (">score", "place", "passage"), rows)

    options.run(
        {"query": query},
        compute=lambda batch: found.search_all([fields["query"] for fields in batch], k, by) if batch else [],
        body=lambda fields, hits: {**fields, "passages": [cited(hit) for hit in hits]},
        line=line,
        show=show,
    )


def cited(hit: Any) -> dict[str, Any]:
    """Return a passage that was found as JSON has it."""
    return {"score": hit.score, **vars(hit.passage)}


def reader(folder: Path | None, passages: int) -> Callable[[str], list[Any]]:
    """Return a function from a text to its nearest passages; of no index, to none."""
    if folder is None:
        return lambda text: []
    refuse(passages < 1, f"--passages {passages} must be 1 or more")
    from clearhead.retrieval.index import Index

    opened = Index(folder)
    return lambda text: opened.search(text, passages)


def before_prompt(model: ch.Model, prompt: str, hits: list[Any], new_tokens: int) -> tuple[str, list[Any]]:
    """Return a prompt after as many numbered passages as there is room for, the nearest last, and these."""
    for count in range(len(hits), 0, -1):
        shown = [f"[{number}] {hit.passage.text}\n\n" for number, hit in enumerate(hits[:count], start=1)]
        whole = "".join([*reversed(shown), prompt])
        if len(model.prompt_ids(whole)) + new_tokens <= model.max_length:
            return whole, hits[:count]
    refuse(
        hits,
        f"no passage fits before the prompt: the model takes {model.max_length} tokens, "
        f"{new_tokens} of them new: shorten the prompt or --max-new-tokens, or index with fewer --words",
    )
    return prompt, []


def print_cited(hits: list[Any]) -> None:
    """Print where passages stand, to stderr."""
    print_notes(f"[{number}] {hit.passage.place}" for number, hit in enumerate(hits, start=1))
