"""Which parts lead to an answer: circuits of edges between parts, one path, and attribution graphs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from clearhead.app.commands.common import check_output
from clearhead.app.report import table
from clearhead.app.views import ModelArgument, OnProgress, Prompt, Repeated, View, drawing
from clearhead.errors import refuse

if TYPE_CHECKING:
    from rich.table import Table

    from clearhead.inside.circuit import Circuit, PathPatch
    from clearhead.inside.graph import Graph

EDGES = 20  # edges of the table


def graph(
    model: ModelArgument,
    text: Prompt,
    *,
    token: str | None = None,
    against: str | None = None,
    position: int = -1,
    target: str | None = None,
    pair: str | None = None,
    features: Repeated = (),
    neurons: bool = False,
    scores: bool = False,
    nodes: int = 40,
    merge: Repeated = (),
    verify: bool = False,
) -> View:
    """Show which parts led to a token, by way of which others: an attribution graph.

    Args:
        text (TEXT): the text; for a model of images, an image file
        token: whose logit (· is a space); default: what the model says
        against: subtract this token's logit, not the mean of all; "runner-up": the best other one
        position: which token's answer; -1 is the last
        features (FOLDER): a sparse dictionary of a feed-forward, whose features become nodes; may be given
            several times
        neurons: take feed-forwards without a dictionary apart into their neurons
        scores: also show what made heads look where they look (edges "key" and "query")
        nodes: keep at most so many nodes
        merge (NAME=NODE,NODE): show several nodes as one; may be given several times
        verify: test every node and edge by an intervention

    For example:
      clearhead graph my-model/ "The capital of France is" --plot graph.svg
      clearhead graph my-model/ "one two one" --scores --verify
      clearhead graph my-model/ "The cat sat" --merge "name=0.1@1,0.2@1" --json
    """
    refuse(any("=" not in group for group in merge), "--merge takes a name and its nodes: NAME=3.2@5,4.0@5")
    named = [group.split("=", 1) for group in merge]
    groups = {name: nodes.split(",") for name, nodes in named}
    refuse(len(groups) < len(named), "--merge names one group twice: give all its nodes at once")
    m = model()
    from clearhead.inside.graph import graph as run

    found = run(
        m, text, token, position, target, against, pair,
        features=features, neurons=neurons, scores=scores, nodes=nodes, verify=verify,
    ).merged(groups)  # fmt: skip
    return View(found, [_table(found), *_lines(found)], drawing("circuits:draw_graph", found))


def _table(found: Graph) -> Table:
    """Show the most influential edges."""
    labels = {node.id: node.label for node in found.nodes}
    rows = [
        (edge.source, labels[edge.source], edge.target, labels[edge.target], edge.kind, f"{edge.value:+.4f}",
         f"{edge.influence:.3f}")
        for edge in found.edges[:EDGES]
    ]  # fmt: skip
    headings = ("from", "token", "to", "token", "kind", ">adds", ">influence")
    return table(f"{found.logit_name}: {found.logit:.4f}", headings, rows)


def _lines(found: Graph) -> list[str]:
    """Say how much is shown, and what was tested."""
    p, logit = found.probability, found.nodes[-1]
    lines = [
        f"{len(found.nodes)} nodes carry {found.kept_nodes:.0%} of the influence, {len(found.edges)} edges "
        f"{found.kept_edges:.0%} of that among them",
        f"the logit: {logit.value - logit.others - logit.bias:+.4f} from edges shown, {logit.others:+.4f} "
        f"from others, {logit.bias:+.4f} from biases" + ("" if p is None else f"; probability {p:.4f}"),
    ]
    if found.difference is not None:
        lines.append(f"tested by interventions: off by {found.difference:.1e} of the largest edge")
    return lines


LISTED = 20  # edges in the table
COLUMNS = ("clean", "corrupt", "answer", "wrong", "target")


def circuit(
    model: ModelArgument,
    clean: str | None = None,
    corrupt: str | None = None,
    *,
    answer: str | None = None,
    wrong: str | None = None,
    prompts: Path | None = None,
    method: Literal["eap-ig", "eap", "atp", "exact", "acdc"] | None = None,
    metric: Literal["logit", "probability", "kl"] = "logit",
    ablation: Literal["resample", "mean", "zero"] | None = None,
    edges: int | None = None,
    faithful: float | None = None,
    threshold: float | None = None,
    steps: int | None = None,
    path: str | None = None,
    save: Path | None = None,
    position: int = -1,
    target: str | None = None,
    seed: int | None = None,
    on_progress: OnProgress = lambda stage, done, total: None,
) -> View:
    """Find the circuit behind an answer: score the edges between parts, keep the fewest, test them.

    An edge goes from a part (an embedding, a head such as 0.1, feedforward:0) to what a later part reads
    (the queries, keys or values of a head, 1.0.q; a feed-forward; logits). Cut, it carries what it carries in
    the corrupt run. Faithfulness is how much of the answer the circuit's edges carry alone, completeness how
    much is lost without just these, versus random sets of as many edges.

    Args:
        clean (CLEAN): a prompt
        corrupt (CORRUPT): a prompt of the same length that differs in a detail, and is answered otherwise
        answer: what the clean run should say (· is a space); default: what it says
        wrong: what the corrupt run says; default: that, or the runner-up
        prompts (FILE): more pairs: TSV or CSV with columns clean, corrupt and perhaps answer, wrong, target;
            or JSON lines with these fields
        method: how edges are scored: eap-ig and eap (attribution), atp (AtP*), exact (each edge is cut), acdc
            (pruned one by one); default: eap-ig
        metric: logit of the answer less the wrong one; probability of the answer; kl from the model's own
        ablation: what a cut edge carries: the corrupt run's (default), the mean over all prompts, or zero
        edges: how many to keep; default: the fewest, of some numbers, that are faithful
        faithful: the faithfulness to reach; default: 0.9
        threshold: acdc: what an edge must be worth; default: a hundredth of what all carry together
        steps: eap-ig: points between the corrupt and the clean input; default: 5
        path (PATH): patch one path alone, such as "0.1 -> 1.0.k -> logits"
        save (FILE): write the circuit as JSON; ch.Circuit.load(FILE).apply(m) is a model of its edges alone
        position: where the answer is read; -1 is the last token
        seed: of the random sets of edges that the circuit is compared with; default: 0

    For example:
      clearhead circuit my-model/ "Ann met Tom. Ann" "Ann met Tom. Tom"
      clearhead circuit m/ --prompts pairs.tsv --method acdc --save circuit.json
      clearhead circuit m/ "Ann left" "Tom left" --path "0.1 -> 1.0.k -> logits"
    """
    refuse(
        path is not None and (clean is None or prompts is not None), "--path takes CLEAN and CORRUPT alone"
    )
    refuse(
        path is not None and save is not None, "--path finds no circuit to --save: leave one of the two out"
    )
    options: dict[str, Any] = dict(
        method=method,
        ablation=ablation,
        edges=edges,
        faithful=faithful,
        threshold=threshold,
        steps=steps,
        seed=seed,
    )
    search = {name: value for name, value in options.items() if value is not None}
    refuse(
        path is not None and bool(search),
        f"--path patches one path, and searches no edges: leave --{next(iter(search), '')} out",
    )
    check_output(save)
    pairs = [] if prompts is None else list(_read_pairs(prompts))
    refuse(
        clean is not None and corrupt is None, "give CORRUPT as well: the prompt that is answered otherwise"
    )
    refuse(clean is None and not pairs, "no prompts: give CLEAN and CORRUPT, or --prompts FILE")
    m = model()
    from clearhead.inside.circuit import circuit as run
    from clearhead.inside.circuit import path_patch

    if path is not None:
        assert clean is not None and corrupt is not None
        patched = path_patch(
            m, clean, corrupt, path, answer, wrong, metric=metric, position=position, target=target
        )
        return View(patched, _path_lines(patched))
    found = run(
        m, clean, corrupt, answer, wrong, prompts=pairs, metric=metric, position=position, target=target,
        on_progress=on_progress, **search,
    )  # fmt: skip
    notes = []
    if save is not None:
        found.save(save)
        notes = [f"saved {save}"]
    return View(found, _circuit_tables(found), drawing("circuits:draw_circuit", found), notes)


def _read_pairs(path: Path) -> Iterator[tuple[str | None, ...]]:
    """Yield the pairs of a file."""
    from clearhead.learn.data.formats import format_of
    from clearhead.learn.data.tables import read_json, read_table

    refuse(not path.is_file(), f"there is no file {path}")
    kind = "csv" if path.suffix == ".csv" else format_of(path)
    for record in read_json(path) if kind == "jsonl" else read_table(path, str(kind), header=True):
        values = record.cells
        missing = [name for name in COLUMNS[:2] if not values.get(name)]
        refuse(
            bool(missing),
            f"{record.place} has no {' and no '.join(missing)}: name the columns {', '.join(COLUMNS)}",
        )
        yield tuple(values.get(name) or None for name in COLUMNS)


def _path_lines(patched: PathPatch) -> Iterator[str]:
    yield f"{patched.path}: {patched.share:+.1%} of the way from the clean run to the corrupt one"
    yield (
        f"logit of {patched.answer} less that of {patched.wrong}, or the metric asked for: clean "
        f"{patched.clean:+.4f}, with the path patched {patched.patched:+.4f}, corrupt {patched.corrupt:+.4f}"
    )


def _circuit_tables(found: Circuit) -> Iterator[Any]:
    """Show the strongest edges, and how much of the answer edges carry."""
    pair, more = found.prompts[0], len(found.prompts) - 1
    said = "all answers" if pair.answer is None else f'"{pair.answer}"'
    said += "" if pair.wrong is None else f', not "{pair.wrong}"'
    said += f", and {more} more pairs" if more else ""
    shown = found.edges[:LISTED]
    title = f"{len(found.edges):,} of {found.n_edges:,} edges, by {found.method}: {said}"
    yield table(
        title,
        ("from", "to", f">{found.metric} lost without it"),
        [(edge.writer, edge.reader, f"{edge.score:+.4f}") for edge in shown],
    )
    if len(found.edges) > len(shown):
        yield f"and {len(found.edges) - len(shown):,} weaker ones: --json and --save have all"
    rows = [
        tuple(f"{value:,}" if isinstance(value, int) else f"{value:.3f}" for value in vars(point).values())
        for point in found.curve
        if point.edges
    ]
    headings = (">edges", ">faithfulness", ">completeness", ">random edges' faithfulness")
    yield table("what edges carry: 0 as with none, 1 as the model", headings, rows)
    yield f"metric: {found.full:+.4f} with all edges, {found.empty:+.4f} with none ({found.ablation})"
    if found.metric != "kl" and found.full <= found.empty:
        yield "the answer is no likelier with all edges: choose prompts that the model answers differently"
