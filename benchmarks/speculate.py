"""Time speculation on the CPU, greedy, one row: tokens a second with and without guesses, in turn.

Runs of the model per token are counted too. Each setting is what it says. `weights`: real stories260K weights
tell a story and repeat themselves as much as they do. `periodic`: a 124M GPT-2 shape with random weights,
whose text goes in circles: the most that lookup can give. `near`: its first layer alone guesses for it, which
with random weights is nearly always right: the most that such a draft can give. `far`: another random layer
guesses, always wrong: what speculation costs where it fails.

python benchmarks/speculate.py [--weights DIR] [--new 120] [--lookup 8] [--rounds 3] [--threads 1] [--save]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import clearhead as ch
from common import alternate, report, save

WEIGHTS = Path(__file__).resolve().parents[2] / "shared" / "weights" / "stories260K" / "hf"


def compare(
    title: str, m: ch.Model, prompt: list[int], new: int, rounds: int, **guesses: object
) -> dict[str, object]:
    """Plain and speculative decoding of the same tokens."""
    plain, made = m.generate(prompt, new), m.generate(prompt, new, **guesses)
    assert plain.ids == made.ids, "speculation changed the text"
    jobs = {
        "clearhead": lambda: m.generate(prompt, new, **guesses),
        "plain decoding": lambda: m.generate(prompt, new),
    }
    result = report(
        f"{title}: {len(made.ids)} tokens in {made.steps} runs of the model",
        alternate(jobs, rounds),
        len(made.ids),
    )
    return result | {"tokens": len(made.ids), "runs": made.steps}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", type=Path, default=WEIGHTS)
    parser.add_argument("--new", type=int, default=120)
    parser.add_argument("--lookup", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    results = []
    if options.weights.is_dir():
        m = ch.load(options.weights)
        m.special.pop("eos", None)  # stories end; a measurement goes on
        results.append(
            compare(
                "weights: stories260K, lookup", m, [1], 4 * options.new, options.rounds, lookup=options.lookup
            )
        )
    config = ch.ModelConfig(
        vocab_size=50257, d_model=768, n_layers=12, n_heads=12, max_positions=1024, activation="gelu_tanh"
    )
    m = ch.Model(ch.Transformer(config))
    prompt = torch.randint(config.vocab_size, (8,)).tolist() * 4
    results.append(
        compare(
            "periodic: GPT-2 124M shape, lookup",
            m,
            prompt,
            options.new,
            options.rounds,
            lookup=options.lookup,
        )
    )
    near, far = (ch.Transformer(config.replace(n_layers=1)) for _ in range(2))
    near.load_state_dict({name: x for name, x in m.model.state_dict().items() if name in near.state_dict()})
    for name, draft in (("near", near), ("far", far)):
        title = f"{name}: GPT-2 124M shape, a draft of one layer"
        results.append(compare(title, m, prompt, options.new, options.rounds, draft=ch.Model(draft)))
    if options.save:
        save("speculate", results)


if __name__ == "__main__":
    main()
