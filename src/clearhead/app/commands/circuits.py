"""Which parts lead to an answer: circuits of edges, one path, attribution graphs; and sparse features."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from clearhead.app.commands.common import check_output, check_picture
from clearhead.app.report import Column, listing, table
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

    traced = run(
        m, text, token, position, target, against, pair,
        features=features, neurons=neurons, scores=scores, nodes=nodes, verify=verify,
    ).merged(groups)  # fmt: skip
    return View(traced, [_table(traced), *_lines(traced)], drawing("prompts:draw_graph", traced))


def _table(traced: Graph) -> Table:
    """Show the most influential edges."""
    labels = {node.id: node.label for node in traced.nodes}
    rows = [
        (edge.source, labels[edge.source], edge.target, labels[edge.target], edge.kind, f"{edge.value:+.4f}",
         f"{edge.influence:.3f}")
        for edge in traced.edges[:EDGES]
    ]  # fmt: skip
    headings = ("from", "token", "to", "token", "kind", ">adds", ">influence")
    return table(f"{traced.logit_name}: {traced.logit:.4f}", headings, rows)


def _lines(tree: Graph) -> list[str]:
    """Say how much is shown, and what was tested."""
    p, logit = tree.probability, tree.nodes[-1]
    lines = [
        f"{len(tree.nodes)} nodes carry {tree.kept_nodes:.0%} of the influence, {len(tree.edges)} edges "
        f"{tree.kept_edges:.0%} of that among them",
        f"the logit: {logit.value - logit.others - logit.bias:+.4f} from edges shown, {logit.others:+.4f} "
        f"from others, {logit.bias:+.4f} from biases" + ("" if p is None else f"; probability {p:.4f}"),
    ]
    if tree.difference is not None:
        lines.append(f"tested by interventions: off by {tree.difference:.1e} of the largest edge")
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
    kept = run(
        m, clean, corrupt, answer, wrong, prompts=pairs, metric=metric, position=position, target=target,
        on_progress=on_progress, **search,
    )  # fmt: skip
    notes = []
    if save is not None:
        kept.save(save)
        notes = [f"saved {save}"]
    return View(kept, _circuit_tables(kept), drawing("prompts:draw_circuit", kept), notes)


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


def _circuit_tables(kept: Circuit) -> Iterator[Any]:
    """Show the strongest edges, and how much of the answer edges carry."""
    pair, more = kept.prompts[0], len(kept.prompts) - 1
    answers = "all answers" if pair.answer is None else f'"{pair.answer}"'
    answers += "" if pair.wrong is None else f', not "{pair.wrong}"'
    answers += f", and {more} more pairs" if more else ""
    shown = kept.edges[:LISTED]
    title = f"{len(kept.edges):,} of {kept.n_edges:,} edges, by {kept.method}: {answers}"
    yield table(
        title,
        ("from", "to", f">{kept.metric} lost without it"),
        [(edge.writer, edge.reader, f"{edge.score:+.4f}") for edge in shown],
    )
    if len(kept.edges) > len(shown):
        yield f"and {len(kept.edges) - len(shown):,} weaker ones: --json and --save have all"
    rows = [
        tuple(f"{value:,}" if isinstance(value, int) else f"{value:.3f}" for value in vars(point).values())
        for point in kept.curve
        if point.edges
    ]
    headings = (">edges", ">faithfulness", ">completeness", ">random edges' faithfulness")
    yield table("what edges carry: 0 as with none, 1 as the model", headings, rows)
    yield f"metric: {kept.full:+.4f} with all edges, {kept.empty:+.4f} with none ({kept.ablation})"
    if kept.metric != "kl" and kept.full <= kept.empty:
        yield "the answer is no likelier with all edges: choose prompts that the model answers differently"


FEATURES = Path("features")


def train(
    model: ModelArgument,
    data: tuple[str, ...],
    *,
    at: str,
    kind: Literal["autoencoder", "transcoder", "skip-transcoder", "crosscoder"] = "autoencoder",
    activation: Literal["topk", "batchtopk", "jumprelu"] = "batchtopk",
    to: str | None = None,
    features: int = 0,
    k: int = 32,
    tokens: int = 1_000_000,
    length: int | None = None,
    batch: int = 2048,
    lr: float = 1e-3,
    precision: Literal["float32", "bfloat16"] = "float32",
    validation: str | None = None,
    seed: int = 0,
    output: Path = FEATURES,
    overwrite: bool = False,
    plot: Path | None = None,
    on_progress: OnProgress = lambda stage, done, total: None,
) -> View:
    """Train a sparse dictionary on a model's activations, and measure it on held-out text.

    A run that was stopped goes on when it is repeated. The dictionary is saved in SAELens's layout.

    Args:
        data (DATA): files or folders of text; of pairs for an encoder-decoder
        at (TAP): an activation or a part: blocks.3.feedforward; of a crosscoder, a pattern:
            "blocks.*.resid_post"
        kind: an autoencoder writes what it reads, a transcoder the output of the part whose input it reads
        activation: how features become sparse; batchtopk is saved as JumpReLU
        to (TAP): what a transcoder writes; default: the output of the part
        features: how many; 0: eight for each dimension that is read
        k: features active per token, on average
        tokens: to learn from; the text is repeated where it has fewer
        length: tokens of a row; default: 128, or as many as the model reads
        batch: tokens of a step
        lr: learning rate, of Adam
        precision: of the matmuls of training; weights are float32
        validation (FILE): text to measure on; default: a twentieth of the data is held out
        seed: random seed of the rows, their order and the weights
        output (FOLDER): where the dictionary is saved

    For example:
      clearhead features train my-model/ book.txt --at blocks.3.feedforward
      clearhead features train my-model/ books/ --at blocks.3.feedforward --k 64
      clearhead features train m/ a.txt --kind crosscoder --at "blocks.*.resid_post"
    """
    check_picture(plot)
    refuse(not data, "no data was given: name a file or a folder of text")
    m = model()
    from clearhead.inside.features.training import train_features

    trained = train_features(
        m, data, at, to=to, folder=output, overwrite=overwrite, validation=validation, length=length,
        on_progress=on_progress, kind=kind, activation=activation, n_features=features, k=k, tokens=tokens,
        batch=batch, lr=lr, precision=precision, seed=seed,
    )  # fmt: skip
    report = trained.report
    rows = [
        ("variance explained", f"{report.variance_explained:.4f}"),
        ("L0: features active per token", f"{report.l0:.1f}"),
        ("dead: never active on held-out text", f"{report.dead:.1%}"),
    ]
    if report.loss_recovered is not None:
        losses = {
            "": report.loss,
            ", features in place": report.loss_replaced,
            ", zeros": report.loss_ablated,
        }
        rows = [(f"loss{name}", f"{loss:.4f}") for name, loss in losses.items()] + rows
        rows.insert(0, ("loss recovered", f"{report.loss_recovered:.4f}"))
    title = f"{trained.kind} of {', '.join(dict.fromkeys((*trained.reads, *trained.writes)))}"
    speed = f"{trained.tokens:,} tokens, {trained.tokens_per_second:,.0f} a second; saved in {output}"
    parts = [
        table(f"{title}, {trained.n_features:,} features, on {report.tokens:,} held-out tokens",
              ("measure", ">value"), rows),
        speed,
    ]  # fmt: skip
    return View(trained, parts, drawing("prompts:draw_training", trained), trained.notes)


def show(
    model: ModelArgument,
    features: Path,
    corpus: str | None = None,
    *,
    feature: Repeated = (),
    text: Repeated = (),
    top: int = 5,
    limit: int = 30_000,
) -> View:
    """Show features: their strongest examples in a text, what they promote, how often they are active.

    Args:
        features (FEATURES): a folder that features train or SAELens wrote
        corpus (CORPUS): a file, a folder or an embedded corpus; default: stdlib-docs; for an encoder-decoder,
            dates
        feature (NUMBER): a feature, shown in full; may be repeated; default: those with the highest
            activations
        text: a text in place of a corpus; source, tab, target for an encoder-decoder
        top: examples, tokens and neighbours of each
        limit: most tokens of the corpus to read; 0: all

    For example:
      clearhead features show my-model/ features/
      clearhead features show my-model/ features/ book.txt --feature 17 --plot f.png
    """
    refuse(bool(text) and corpus is not None, "a corpus and --text were both given: choose one")
    refuse(top < 1 or limit < 0, "--top must be 1 or more, and --limit a number of tokens, 0 for all")
    wrong = next((number for number in feature if not number.isdecimal()), None)
    refuse(wrong is not None, f'--feature "{wrong}" is no number of a feature')
    from clearhead.app.commands.learned import corpus_inputs, neuron_list, neuron_tables
    from clearhead.inside.features.dictionary import load
    from clearhead.inside.features.report import show_features

    dictionary = load(features)
    m = model()
    dictionary.to(next(m.model.parameters()).device)
    numbers = [int(number) for number in dict.fromkeys(feature)]
    shown = show_features(m, dictionary, corpus_inputs(m, corpus, text), numbers, top, limit=limit or None)
    columns: dict[str, Column] = {
        "feature": "{.name}",
        ">highest": "{.activation:.2f}",
        ">active": "{.density:.3%}",
        "nearest, cosine": lambda one: ", ".join(f"{near} {cosine:.2f}" for near, cosine in one.nearest[:3]),
    }
    title = f"{features}: {dictionary.kind} of {dictionary.at}, {dictionary.n_features:,} features"
    tables = [part for feature in shown.features for part in neuron_tables(feature)]
    parts = [
        listing(title, columns, shown.features),
        *(tables if feature else [neuron_list(list(shown.features))]),
        f"{shown.tokens:,} tokens read. Promoted tokens: {shown.note}.",
    ]
    return View(shown, parts, drawing("models:draw_neuron", shown.features[0]))
