"""A trace recomputed by hand: each step from the values of the steps before it and the weights, in float64.

Nothing of the model's own code is used: weights come from the state dict, formulas are written out here.
"""

from __future__ import annotations

import math

import torch

import clearhead as ch
from clearhead.inside.checks.reference_float64 import sees, times
from clearhead.variants.checks import read_kind
from clearhead.variants.kinds import Blocks

ADDED = {"typed": "embedding.types", "placed": "positions.table"}
BENT = ("gate_clamped", "activated", "up_clamped", "up_shifted", "gated")


class Replay:
    """Recompute a trace step by step.

    `chained` computes from what was recomputed, so that errors would add up; otherwise from what was
    recorded.
    """

    def __init__(self, model: ch.Transformer, trace: ch.Trace, chained: bool) -> None:
        self.config, self.trace, self.chained = model.config, trace, chained
        self.weights = {name: weight.detach().double() for name, weight in model.state_dict().items()}
        self.values: dict[str, torch.Tensor] = {}  # what later steps are computed from
        self.made: dict[str, torch.Tensor] = {}  # what was computed
        self.stream = torch.empty(0)
        self.memory = torch.empty(0)
        self.embedded = torch.empty(0)

    def run(self) -> dict[str, float]:
        """Return the largest difference of each step, relative to its largest value where that is above 1.

        Hidden scores do not count as values.
        """
        differences = {}
        for step in self.trace.steps:
            value, recorded = self.compute(step.name), step.value.double()
            assert value.shape == recorded.shape, step.name
            sizes = recorded.abs()
            scale = max(1.0, sizes[sizes < 1e30].max().item())
            differences[step.name] = (value - recorded).abs().max().item() / scale
            assert differences[step.name] == differences[step.name], step.name
            self.made[step.name] = value
            self.values[step.name] = value if self.chained else recorded
            joined = step.name in ("previous.smeared", "previous.paired")
            embedded = joined or (".embedding." in f".{step.name}" and not step.name.endswith(".types"))
            ends = (".add", ".after", ".shortcut.mirrored", ".shortcut.mixed")
            if embedded or step.name.endswith(ends) or step.name in ("norm", "encoder.norm"):
                self.stream = self.values[step.name]
            self.embedded = self.stream if embedded else self.embedded
            if step.name.startswith("encoder."):
                self.memory = self.stream
        return differences

    # Where things are

    def weight(self, name: str) -> torch.Tensor | None:
        """Of the part that a step is called after."""
        if name.startswith("head."):
            return self.weights.get(name)
        stack = "encoder." if name.startswith("encoder.") or self.config.family == "encoder" else "decoder."
        return self.weights.get(stack + name.removeprefix("encoder."))

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        bias = self.weight(f"{name}.bias")
        return x @ self.weight(f"{name}.weight").T + (0 if bias is None else bias)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale, bias, eps = self.weight(f"{name}.weight"), self.weight(f"{name}.bias"), self.config.norm_eps
        scale = scale + 1 if self.config.norm_unit_offset else scale
        if self.config.norm == "layernorm":
            x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
        return x * scale + (0 if bias is None else bias)

    def activation(self, x: torch.Tensor, kind: str) -> torch.Tensor:
        return {
            "relu": lambda: x * (x > 0),
            "gelu": lambda: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
            "gelu_tanh": lambda: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
            "silu": lambda: x / (1 + torch.exp(-x)),
            "quick_gelu": lambda: x / (1 + torch.exp(-1.702 * x)),
        }[kind]()

    def read(self, block: str, sublayer: str) -> torch.Tensor:
        """What a sublayer reads: its norm's answer, that of the norm it shares, or the stream."""
        for owner in (sublayer, "attention") if self.config.parallel else (sublayer,):
            if f"{block}.{owner}_residual.before" in self.values:
                return self.values[f"{block}.{owner}_residual.before"]
        return self.stream

    # The steps

    def compute(self, name: str) -> torch.Tensor:
        at, _, leaf = name.rpartition(".")
        recorded = self.trace[name].value
        if leaf in ("ids", "pixels"):
            return recorded.double()
        if ".blocks." in f".{name}":
            block, _, part = at.rpartition(".")
            if part == "shortcut":
                return self.shortcut(at, leaf)
            if part.endswith("_residual"):
                return self.residual(block, part.removesuffix("_residual"), leaf, name)
            if ".feedforward" in at:
                return self.feedforward(name, at, leaf)
            return self.attention(at, block, part, leaf)
        if at.startswith("head"):
            return self.head(leaf)
        if at == "previous":
            return self.previous(leaf)
        return self.embedding(name, at, leaf)

    def embedding(self, name: str, at: str, leaf: str) -> torch.Tensor:
        config, stack = self.config, "encoder." if name.startswith("encoder.") else ""
        if name.endswith("front.tokens"):
            table, shared = self.weight(f"{name}.weight"), "encoder.embedding.front.tokens.weight"
            return (self.weights[shared] if table is None else table)[self.values[f"{stack}ids"].long()]
        if name.endswith("front.scaled"):
            return self.stream * config.embedding_scale
        if name.endswith("front.patches"):
            pixels, side = self.values["pixels"], config.patch_size
            rows, columns = pixels.shape[2] // side, pixels.shape[3] // side
            corners = [(r * side, c * side) for r in range(rows) for c in range(columns)]
            return torch.stack([pixels[:, :, y : y + side, x : x + side].flatten(1) for y, x in corners], 1)
        if name.endswith(("front.project", "embedding.project")):
            return self.linear(self.stream, name)
        if name.endswith("front.class_token"):
            return torch.cat([self.weight(name)[None, None], self.stream], 1)
        if leaf == "types":
            return self.weight(f"{name}.weight")[torch.zeros(self.stream.shape[:2], dtype=torch.long)]
        if leaf in ("typed", "placed"):
            return (
                self.stream
                + self.values[stack + {"typed": "embedding.types", "placed": "positions.table"}[leaf]]
            )
        if leaf == "table":
            return self.weight(f"{name}.weight")[None, : self.stream.shape[1]]
        if leaf == "norm":
            return self.norm(self.stream, name)
        if leaf == "rotary":
            width, length = int(config.d_head * config.rope_fraction), self.stream.shape[1]
            divisors = [config.rope_base ** (2 * i / width) for i in range(width // 2)]
            angle = torch.tensor([[t / divisor for divisor in divisors] for t in range(length)]).double()
            half = config.rope_layout == "half"
            angle = torch.cat([angle, angle], 1) if half else angle.repeat_interleave(2, 1)
            return torch.stack([angle.cos(), angle.sin()])[:, None, None]
        if leaf == "bias":
            return self.bias(name, stack)
        length, causal = self.stream.shape[1], not stack and config.family != "encoder"
        kind = read_kind(config.attention) if isinstance(config.attention, str) else None
        if isinstance(kind, Blocks):
            pairs = [[(t, s) for s in range(length)] for t in range(length)]
            if leaf == "counts":
                counts = [[times(kind, *pair, length) for pair in row] for row in pairs]
                return torch.tensor(counts)[None, None].double().log()
            table = [[sees(kind, *pair, length, causal) for pair in row] for row in pairs]
            return torch.tensor(table)[None, None].double()
        assert name.removeprefix("encoder.").startswith("mask"), name
        t, s = torch.arange(length)[:, None], torch.arange(length)
        near = (t - s).abs() < (int(leaf) if leaf.isdigit() else length)
        return (near & (s <= t) if causal else near)[None, None].double()

    def previous(self, leaf: str) -> torch.Tensor:
        v, x = self.values, self.stream
        if leaf == "gate":
            return self.linear(x[..., : self.config.smear_gate], "previous.gate")
        if leaf == "before":
            return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
        if leaf == "smeared":
            opened = 1 / (1 + torch.exp(-v["previous.gate"]))
            return x + self.weight("previous.share") * opened * v["previous.before"]
        if leaf == "pairs":
            ids = v["ids"][0].long().tolist()
            hashes = [(a + 1) * 1_000_003 + b for a, b in zip([-1, *ids], ids)]
            return self.weight("previous.table.weight")[[h % self.config.bigrams for h in hashes]][None]
        assert leaf == "paired"
        return x + v["previous.pairs"]

    def shortcut(self, at: str, leaf: str) -> torch.Tensor:
        layer, v = int(at.split(".")[1]), self.values

        def stream(number: int) -> torch.Tensor:  # what a layer has read
            ends = ("attention_residual.add", "feedforward_residual.add")
            return self.embedded if number == 0 else v[f"blocks.{number - 1}.{ends[1]}"]

        if leaf == "mirrored":
            return self.stream + self.weight(f"{at}.mirror") * stream(self.config.n_layers - layer)
        if leaf == "mixed":
            a, b = self.weight(f"{at}.input")
            return a * self.stream + b * stream(0)
        own, first = (v[f"blocks.{number}.attention.v_heads"] for number in (layer, 0))
        if leaf == "values":
            a, b = self.weight(f"{at}.values")
            return a * own + b * first
        if leaf == "table":
            return self.weight(f"{at}.table.weight")[v["ids"].long()]
        heads = torch.stack(v[f"{at}.table"].split(own.shape[-1], -1), 1)
        return v.get(f"{at}.values", own) + heads

    def bias(self, name: str, stack: str) -> torch.Tensor:
        length, config = self.stream.shape[1], self.config
        if config.positions == "alibi":  # for a number of heads that is a power of two
            slopes = [2 ** (-8 * (head + 1) / config.n_heads) for head in range(config.n_heads)]
            table = [[[-m * abs(t - s) for s in range(length)] for t in range(length)] for m in slopes]
            return torch.tensor(table).double()[None]
        table = self.weight(f"{name.removesuffix('bias')}table.weight")

        def bucket(distance: int) -> int:  # key minus query
            buckets, first = config.relative_buckets, 0
            if stack:
                buckets, first = buckets // 2, buckets // 2 * (distance > 0)
                distance = abs(distance)
            else:
                distance = max(-distance, 0)
            exact = buckets // 2
            if distance < exact:
                return first + distance
            far = math.log(distance / exact) / math.log(config.relative_max_distance / exact)
            return first + min(exact + int(far * (buckets - exact)), buckets - 1)

        rows = [torch.stack([table[bucket(s - t)] for s in range(length)]) for t in range(length)]
        return torch.stack(rows).permute(2, 0, 1)[None]

    def residual(self, block: str, sublayer: str, leaf: str, name: str) -> torch.Tensor:
        v, at = self.values, name.rpartition(".")[0]
        if leaf in ("before", "after"):
            return self.norm(self.stream, name)
        ends = [f"{block}.{sublayer}.{end}" for end in ("out", "down", "with_shared", "mixed")]
        answer = next(v[end] for end in ends if end in v)
        if leaf == "inside":
            return self.norm(answer, name)
        answer = v.get(f"{at}.inside", answer)
        if leaf == "scaled":
            return answer * self.config.residual_scale
        assert leaf == "add"
        return self.stream + v.get(f"{at}.scaled", answer)

    def attention(self, at: str, block: str, part: str, leaf: str) -> torch.Tensor:
        config, v = self.config, self.values
        if leaf in ("q", "k", "v", "gate"):
            x = self.memory if part == "cross" and leaf in "kv" else self.read(block, part)
            x = x[..., : config.head_gate] if leaf == "gate" and config.head_gate else x
            return self.linear(x, f"{at}.{leaf}")
        if leaf.endswith("_heads"):
            normed = config.qk_norm == "full" and leaf[0] != "v"
            x = v[f"{at}.{leaf[0]}" + "_norm" * normed]
            return torch.stack(x.split(config.d_value if leaf[0] == "v" else config.d_head, -1), 1)
        if leaf.endswith("_norm"):
            return self.norm(v[f"{at}.{leaf[0]}" + "_heads" * (config.qk_norm == "head")], f"{at}.{leaf}")
        ends = ("_rotated", "_norm", "_heads")
        q, k = (self.latest(*(f"{at}.{side}{end}" for end in ends)) for side in "qk")
        if leaf.endswith("_rotated"):
            x = self.latest(f"{at}.{leaf[0]}_norm", f"{at}.{leaf[0]}_heads")
            return self.rotated(x)
        if leaf == "scores":
            keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
            return torch.stack([q[:, head] @ keys[:, head].transpose(1, 2) for head in range(q.shape[1])], 1)
        scores = self.latest(
            *(f"{at}.{end}" for end in ("masked", "biased", "softcapped", "scaled", "scores"))
        )
        if leaf == "scaled":
            usual = config.attention_scale == config.d_head**-0.5
            return scores * (1 / math.sqrt(q.shape[-1]) if usual else config.attention_scale)
        if leaf == "softcapped":
            return config.attention_softcap * torch.tanh(scores / config.attention_softcap)
        if leaf == "biased":
            stack = "encoder." if at.startswith("encoder.") else ""
            return scores + self.latest(f"{stack}counts", f"{stack}positions.bias")
        lowest = torch.finfo(torch.float32).min
        if leaf == "masked":
            stack, layer = "encoder." if at.startswith("encoder.") else "", int(block.rpartition(".")[2])
            window = config.window[layer] if isinstance(config.window, tuple) else config.window
            mask = v[f"{stack}mask.{window or 'full'}"] if f"{stack}mask" not in v else v[f"{stack}mask"]
            hidden = torch.tensor(lowest).double()
            return scores if part == "cross" else torch.where(mask.bool(), scores, hidden)
        if leaf == "pattern":
            return torch.softmax(torch.where(scores <= lowest, -torch.inf, scores), -1)
        if leaf == "z" and (config.attention_gate or config.head_gate):
            gate = torch.stack(v[f"{at}.gate"].split(config.d_value if config.attention_gate else 1, -1), 1)
            return v[f"{at}.mixed"] / (1 + torch.exp(-gate))
        if leaf in ("z", "mixed"):
            ends = ("shortcut.added", "shortcut.values")
            mixed = [v[f"{block}.{end}"] for end in ends if f"{block}.{end}" in v]
            pattern, values = v[f"{at}.pattern"], mixed[0] if mixed else v[f"{at}.v_heads"]
            values = values.repeat_interleave(pattern.shape[1] // values.shape[1], 1)
            return torch.stack([pattern[:, head] @ values[:, head] for head in range(pattern.shape[1])], 1)
        if leaf == "concat":
            return torch.cat(list(v[f"{at}.z"].unbind(1)), -1)
        assert leaf == "out", leaf
        return self.linear(v[f"{at}.concat"], f"{at}.out")

    def latest(self, *names: str) -> torch.Tensor:
        """The newest of some values; nothing, where there is none yet."""
        found = [name for name in self.values if name in names]
        return self.values[found[-1]] if found else torch.empty(0, 1, 1, 1)

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Each pair as a complex number, turned."""
        cos, sin = self.values["positions.rotary"]
        half, rotated = self.config.rope_layout == "half", cos.shape[-1]
        a = list(range(rotated // 2)) if half else list(range(0, rotated, 2))
        b = [i + rotated // 2 if half else i + 1 for i in a]
        turned = torch.complex(x[..., a], x[..., b]) * torch.complex(cos[..., a], sin[..., a])
        y = x.clone()
        y[..., a], y[..., b] = turned.real, turned.imag
        return y

    def feedforward(self, name: str, at: str, leaf: str) -> torch.Tensor:
        config, v = self.config, self.values
        layer = int(name.partition("blocks.")[2].partition(".")[0])
        if config.n_experts and layer not in config.dense_layers and not at.endswith(".shared"):
            return self.experts(name, at.removesuffix(".experts"), leaf)
        x = self.read(at.removesuffix(".shared").removesuffix(".feedforward"), "feedforward")
        if leaf in ("up", "gate"):
            return self.linear(x, name)
        if leaf in BENT:
            return self.bent(at, leaf)
        assert leaf == "down", leaf
        return self.linear(v[f"{at}.gated" if config.gated else f"{at}.activated"], name)

    def bent(self, at: str, leaf: str) -> torch.Tensor:
        """What happens between the wide projections and the narrow one."""
        config, v = self.config, self.values
        if leaf == "gate_clamped":
            return torch.where(v[f"{at}.gate"] < config.gated_clamp, v[f"{at}.gate"], config.gated_clamp)
        if leaf == "up_clamped":
            return v[f"{at}.up"].clamp(-config.gated_clamp, config.gated_clamp)
        if leaf == "up_shifted":
            return self.latest(f"{at}.up", f"{at}.up_clamped") + config.gated_shift
        if leaf == "activated":
            gate = self.latest(f"{at}.gate", f"{at}.gate_clamped") if config.gated else v[f"{at}.up"]
            return self.activation(gate, config.activation)
        up = self.latest(f"{at}.up", f"{at}.up_clamped", f"{at}.up_shifted")
        return v[f"{at}.activated"] * up

    def experts(self, name: str, at: str, leaf: str) -> torch.Tensor:
        """Row by row: `pairs` are (expert, token, which of its choices), expert by expert."""
        config, v = self.config, self.values
        x = self.read(at.removesuffix(".feedforward"), "feedforward")
        if leaf in ("router", "shared_gate"):
            return self.linear(x, name)
        if leaf == "with_shared":
            share = 1 / (1 + torch.exp(-v[f"{at}.shared_gate"]))
            return v[f"{at}.mixed"] + share * v[f"{at}.shared.down"]
        logits, rows = v[f"{at}.router"][0], x[0]
        if leaf == "chosen":
            order = [sorted(range(len(row)), key=lambda i: -row[i]) for row in logits]
            return torch.tensor(order)[:, : config.n_active_experts].double()
        chosen = v[f"{at}.chosen"].long().tolist()
        if leaf == "weights":
            kept = torch.stack([row[choice] for row, choice in zip(logits, chosen)])
            if config.router_order == "topk_softmax":
                return kept.exp() / kept.exp().sum(-1, keepdim=True)
            shares = kept.exp() / logits.exp().sum(-1, keepdim=True)
            return shares / shares.sum(-1, keepdim=True) if config.router_renormalise else shares
        placed = [(token, enumerate(choice)) for token, choice in enumerate(chosen)]
        pairs = sorted((expert, token, place) for token, choice in placed for place, expert in choice)
        if leaf == "sorted":
            return torch.stack([rows[token] for _, token, _ in pairs])
        if leaf == "mixed":
            mixed = torch.zeros_like(rows)
            for row, (_, token, place) in enumerate(pairs):
                mixed[token] += v[f"{at}.weights"][token, place] * v[f"{at}.experts.down"][row]
            return mixed[None]
        if leaf in BENT:
            return self.bent(f"{at}.experts", leaf)
        last = f"{at}.experts.gated" if config.gated else f"{at}.experts.activated"
        inputs = v[last] if leaf == "down" else v[f"{at}.sorted"]
        names = [f"{at}.experts.{expert}.{leaf}" for expert, _, _ in pairs]
        return torch.stack([self.linear(row, name) for row, name in zip(inputs, names)])

    def head(self, leaf: str) -> torch.Tensor:
        config, v = self.config, self.values
        last = [name for name in v if name.startswith("head.")]
        x = v[last[-1]] if last else self.stream
        if leaf == "added":
            return self.stream + x
        if leaf in ("transform", "pooler", "up", "down"):
            return self.linear(x, f"head.{leaf}")
        if leaf == "out":
            stack = "decoder" if config.family != "encoder" else "encoder"
            tied = config.tie_embeddings and config.head in ("lm", "mlm")
            tables = [self.weights.get(f"{one}.embedding.front.tokens.weight") for one in (stack, "encoder")]
            shared = tables[1] if tables[0] is None else tables[0]
            weight = shared if tied else self.weights["head.out.weight"]
            return x @ weight.T + self.weights.get("head.out.bias", torch.zeros(()).double())
        if leaf in ("activation", "activated"):
            return self.activation(x, config.head_activation)
        if leaf == "norm":
            return self.norm(x, "head.norm")
        if leaf == "scaled":
            return x * config.logit_scale
        if leaf == "softcapped":
            return config.logit_softcap * torch.tanh(x / config.logit_softcap)
        if leaf == "pooled":
            return {"cls": x[:, 0], "last": x[:, -1], "mean": x.sum(1) / x.shape[1]}[config.pooling]
        if leaf == "bent":
            return torch.tanh(x) if config.pooler == "tanh" else x.clamp(min=0)
        if leaf == "probabilities":
            return x.exp() / x.exp().sum(-1, keepdim=True)
        assert leaf == "candidates", leaf
        return x.sort(-1, descending=True).values[..., : self.trace["head.candidates"].shape[-1]]
