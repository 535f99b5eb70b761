"""The command that draws an attribution graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clearhead.app.report import table
from clearhead.app.views import ModelArgument, Prompt, Repeated, View, drawing
from clearhead.errors import refuse

if TYPE_CHECKING:
    from rich.table import Table

    from clearhead.inside.graph import Graph

LISTED = 20  # edges of the table


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
    groups = {name: nodes.split(",") for name, nodes in (group.split("=", 1) for group in merge)}
    m = model()
    from clearhead.inside.graph import graph as run

    found = run(
        m, text, token, position, target, against, pair,
        features=features, neurons=neurons, scores=scores, nodes=nodes, verify=verify,
    ).merged(groups)  # fmt: skip
    return View(found, [_table(found), *_lines(found)], drawing("graph:draw_graph", found))


def _table(found: Graph) -> Table:
    """Show the most influential edges."""
    labels = {node.id: node.label for node in found.nodes}
    rows = [
        (edge.source, labels[edge.source], edge.target, labels[edge.target], edge.kind, f"{edge.value:+.4f}",
         f"{edge.influence:.3f}")
        for edge in found.edges[:LISTED]
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
