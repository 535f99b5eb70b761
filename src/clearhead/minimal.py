"""The whole Transformer in one file: encoder, decoder and encoder-decoder, as a textbook chapter has them.

Read this first. It has no options but those that chapters on Transformers show, no cache, no fused kernels.
`clearhead.Transformer` computes the same numbers from the same weights; a test holds one against the other.

    python -m clearhead.minimal        # an encoder-decoder learns to reverse words, in ten seconds

Shapes: B batch, T target length (queries), S source length (keys), D model, H heads, E = D / H head width,
F feed-forward width, V vocabulary. Ids are [B, T]; hidden states are [B, T, D].
"""

import math
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """The size of a model, and the few choices that papers differ in."""

    family: Literal["decoder", "encoder", "encoder-decoder"]
    vocab_size: int
    d_model: int = 512
    n_layers: int = 6  # of each stack
    n_heads: int = 8
    d_ff: int = 2048
    max_positions: int = 512
    positions: Literal["sinusoidal", "learned"] = "sinusoidal"  # the original paper; GPT-2 and BERT
    norm_first: bool = False  # False: x = norm(x + f(x)), the original, BERT; True: x = x + f(norm(x)), GPT-2
    activation: Literal["relu", "gelu", "gelu_tanh"] = "relu"
    embedding_scale: float = 1.0  # the original paper: sqrt(d_model)
    embedding_norm: bool = False  # BERT
    norm_eps: float = 1e-5
    tied: bool = True  # the output layer is the token table


def sinusoidal(length: int, width: int) -> Tensor:
    """Return waves [length, width]: sin on even, cos on odd columns, each pair slower than the one before."""
    position = torch.arange(length, dtype=torch.float64)[:, None]
    speed = 10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    waves = torch.stack([torch.sin(position * speed), torch.cos(position * speed)], dim=-1)
    return waves.flatten(1)[:, :width].float()


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Compute softmax(Q Kᵀ / √E) V: each query mixes the values of the keys that it may see.

    q [B, H, T, E]; k, v [B, H, S, E]; mask broadcasts to [B, H, T, S], True = may see.
    """
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # B H T S
    pattern = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)  # each row sums to one
    return pattern @ v  # B H T E


class Attention(nn.Module):
    """Multi-head attention: H small attentions side by side, each with its own projections.

    Self-attention: `memory` is x itself. Cross-attention: it is the output of the encoder.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        D, self.n_heads = config.d_model, config.n_heads
        self.q, self.k, self.v, self.out = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """Map x [B, T, D], which attends to `memory` [B, S, D], to [B, T, D]."""

        def heads(y: Tensor) -> Tensor:
            return y.view(*y.shape[:2], self.n_heads, -1).transpose(1, 2)  # B T D -> B H T E

        z = attend(heads(self.q(x)), heads(self.k(memory)), heads(self.v(memory)), mask)
        return cast(Tensor, self.out(z.transpose(1, 2).flatten(2)))  # B H T E -> B T D


class FeedForward(nn.Module):
    """Two linear layers with an activation between, applied to each position alone."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(config.d_model, config.d_ff), nn.Linear(config.d_ff, config.d_model)
        self.activation = {
            "relu": nn.ReLU(),
            "gelu": nn.GELU(),
            "gelu_tanh": nn.GELU(approximate="tanh"),
        }[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, T, D] -> [B, T, D]."""
        return cast(Tensor, self.down(self.activation(self.up(x))))  # B T D -> B T F -> B T D


class Block(nn.Module):
    """One layer: attention moves information between positions, the feed-forward works on each of them.

    A decoder's block in an encoder-decoder has cross-attention between the two.
    """

    def __init__(self, config: Config, cross: bool) -> None:
        super().__init__()
        self.norm_first = config.norm_first
        self.attention = Attention(config)
        self.cross = Attention(config) if cross else None
        self.feedforward = FeedForward(config)
        self.norms = nn.ModuleDict(
            {
                name: nn.LayerNorm(config.d_model, eps=config.norm_eps)
                for name in ("attention", "cross", "feedforward")
                if cross or name != "cross"
            }
        )

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor | None, memory_mask: Tensor | None) -> Tensor:
        """Map [B, T, D] -> [B, T, D]; cross-attention reads `memory` [B, S, D]."""
        y = self.norm_input("attention", x)
        x = self.add("attention", x, self.attention(y, y, mask))
        if self.cross is not None:
            x = self.add("cross", x, self.cross(self.norm_input("cross", x), memory, memory_mask))
        return self.add("feedforward", x, self.feedforward(self.norm_input("feedforward", x)))

    def norm_input(self, sublayer: str, x: Tensor) -> Tensor:
        """Return the input of a sublayer: the residual stream, with pre-norm normed first."""
        return cast(Tensor, self.norms[sublayer](x)) if self.norm_first else x

    def add(self, sublayer: str, x: Tensor, y: Tensor) -> Tensor:
        """Add a sublayer's output to the residual stream; with post-norm, norm the sum."""
        return x + y if self.norm_first else cast(Tensor, self.norms[sublayer](x + y))


class Stack(nn.Module):
    """Embedding and positions, blocks one after the other, and with pre-norm a last norm."""

    positions: Tensor

    def __init__(self, config: Config, tokens: nn.Embedding, cross: bool) -> None:
        super().__init__()
        self.tokens, self.scale = tokens, config.embedding_scale
        waves = sinusoidal(config.max_positions, config.d_model)  # max_positions D
        if config.positions == "learned":
            self.positions = nn.Parameter(torch.randn_like(waves) * 0.02)
        else:
            self.register_buffer("positions", waves, persistent=False)
        norms = [nn.LayerNorm(config.d_model, eps=config.norm_eps) for _ in range(2)]
        self.embedding_norm = norms[0] if config.embedding_norm else None
        self.blocks = nn.ModuleList(Block(config, cross) for _ in range(config.n_layers))
        self.norm = norms[1] if config.norm_first else None

    def forward(
        self, ids: Tensor, mask: Tensor, memory: Tensor | None = None, memory_mask: Tensor | None = None
    ) -> Tensor:
        """Map ids [B, T] to hidden states [B, T, D]."""
        x = self.tokens(ids) * self.scale + self.positions[: ids.shape[1]]  # B T D
        x = x if self.embedding_norm is None else self.embedding_norm(x)
        for block in self.blocks:
            x = block(x, mask, memory, memory_mask)
        return x if self.norm is None else cast(Tensor, self.norm(x))


class Transformer(nn.Module):
    """An encoder, a decoder, or both, and an output layer that scores every token of the vocabulary."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        tokens = nn.Embedding(config.vocab_size, config.d_model)
        nn.init.normal_(tokens.weight, std=config.d_model**-0.5)
        self.encoder = Stack(config, tokens, cross=False) if "encoder" in config.family else None
        self.decoder = (
            Stack(config, tokens, cross=self.encoder is not None) if "decoder" in config.family else None
        )
        self.out = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tied:
            self.out.weight = tokens.weight

    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        source: Tensor | None = None,
        source_mask: Tensor | None = None,
    ) -> Tensor:
        """Map ids [B, T] to logits [B, T, V]."""
        return cast(Tensor, self.out(self.hidden(ids, mask, source, source_mask)))

    def hidden(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        source: Tensor | None = None,
        source_mask: Tensor | None = None,
    ) -> Tensor:
        """Map ids [B, T] to hidden states [B, T, D]; of an encoder-decoder, `source` feeds the encoder.

        Masks: True = real token, False = padding, which stands on the right.
        """
        T = ids.shape[1]
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        all_real = real[:, None, None, :]  # B 1 1 S: every token may see all real ones
        causal = all_real & torch.ones(T, T, dtype=torch.bool, device=ids.device).tril()
        if self.decoder is None:
            return cast(Tensor, cast(Stack, self.encoder)(ids, all_real))
        if self.encoder is None:
            return cast(Tensor, self.decoder(ids, causal))  # a token may see itself and those before it
        assert source is not None, "an encoder-decoder needs source, the ids that its encoder reads"
        real = torch.ones_like(source, dtype=torch.bool) if source_mask is None else source_mask
        memory_mask = real[:, None, None, :]
        return cast(Tensor, self.decoder(ids, causal, self.encoder(source, memory_mask), memory_mask))

    def loss(self, ids: Tensor, targets: Tensor, source: Tensor | None = None, ignored: int = -100) -> Tensor:
        """Return the mean cross-entropy of `targets` [B, T]; those that are `ignored` do not count."""
        logits = self(ids, source=source)
        return nnf.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=ignored)

    @torch.no_grad()
    def generate(
        self, ids: Tensor, max_new_tokens: int, source: Tensor | None = None, temperature: float = 0.0
    ) -> Tensor:
        """Append tokens one at a time, each the likeliest (temperature 0) or drawn from the distribution."""
        for _ in range(max_new_tokens):
            logits = self(ids, source=source)[:, -1]  # B V, of the token that comes next
            if temperature == 0:
                token = logits.argmax(dim=-1, keepdim=True)
            else:
                token = torch.multinomial((logits / temperature).softmax(dim=-1), 1)
            ids = torch.cat([ids, token], dim=1)
        return ids


def reverse_words(steps: int = 200, seed: int = 0) -> float:
    """Teach an encoder-decoder to write words of eight letters backwards; return the share it gets right."""
    torch.manual_seed(seed)
    start, letters, length = 0, 26, 8  # id 0 begins every answer; ids 1 to 26 are letters
    model = Transformer(Config("encoder-decoder", letters + 1, d_model=64, n_layers=2, n_heads=4, d_ff=128))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def batch(size: int) -> tuple[Tensor, Tensor, Tensor]:
        words = torch.randint(1, letters + 1, (size, length))
        answers = words.flip(1)
        return words, torch.cat([torch.full((size, 1), start), answers[:, :-1]], dim=1), answers

    for step in range(1, steps + 1):
        words, ids, answers = batch(64)
        loss = model.loss(ids, answers, source=words)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step}  loss {loss.item():.4f}")
    words, ids, answers = batch(256)
    written = model.generate(ids[:, :1], length, source=words)[:, 1:]
    return (written == answers).all(dim=1).float().mean().item()


if __name__ == "__main__":
    print(f"{reverse_words():.1%} of unseen words reversed without a mistake")
