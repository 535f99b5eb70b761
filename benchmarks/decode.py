"""Decoding on a CPU: greedy, beams, speculation, long texts."""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as nnf
from benchmarks.common import alternate, by_processor, case_parser, device_name, report, save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import MarianConfig, MarianMTModel, logging

import clearhead as ch
from clearhead.run.generate.decode import decode, greedy
from clearhead.run.generate.request import Request
from clearhead.run.generate.sequence import Ends, Prompts, Sequence
from clearhead.run.generate.stream import TextStream
from clearhead.run.kernels.prepare import prepared

# decode ---------------------------------------------------------------------------------------------------


def translate2(peer: object, folder: str, threads: int) -> Callable[[Tensor, int], object]:
    """Convert the same weights for CTranslate2; give it a vocabulary, as its converter asks for files."""
    import ctranslate2
    from ctranslate2.converters.transformers import GPT2Loader

    spec = GPT2Loader().get_model_spec(peer)
    words = [f"t{number}" for number in range(50257)]
    spec.register_vocabulary(words)
    spec.config.bos_token = spec.config.eos_token = words[-1]
    spec.config.unk_token = words[-2]
    spec.validate()
    spec.optimize(quantization=None)
    spec.save(folder)
    generator = ctranslate2.Generator(folder, device="cpu", compute_type="float32", intra_threads=threads)

    def run(ids: Tensor, new: int) -> object:
        prompts = [[words[token] for token in row] for row in ids.tolist()]
        return generator.generate_batch(
            prompts, max_length=new, min_length=new, include_prompt_in_result=False
        )

    return run


SHAPES = {
    "gpt2": ch.ModelConfig(
        vocab_size=50257, d_model=768, n_layers=12, n_heads=12, max_positions=1024, activation="gelu_tanh"
    ),
    "smollm2": ch.ModelConfig(
        vocab_size=49152, d_model=576, n_layers=30, n_heads=9, n_kv_heads=3, d_ff=1536, gated=True,
        activation="silu", norm="rmsnorm", positions="rope", bias=False, max_positions=2048,
    ),
}  # fmt: skip


def peer_of(shape: str) -> torch.nn.Module:
    """Return transformers' model of the shape."""
    import transformers

    transformers.logging.set_verbosity_error()
    if shape == "gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval()
    config = SHAPES[shape]
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size, hidden_size=config.d_model, num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads, num_key_value_heads=config.n_kv_heads,
            intermediate_size=config.d_ff, tie_word_embeddings=True,
        )
    ).eval()  # fmt: skip


def run_decode() -> None:
    """Time greedy decoding with the cache on the CPU, float32: clearhead and its peers in turn.

        python benchmarks/run.py decode [--shape gpt2 smollm2] [--batches 1 2 4 8] [--new 48]
        [--rounds 3] [--save]

    The shapes are those of GPT-2 124M and SmolLM2-135M, with random weights. The peers are transformers,
    for GPT-2 CTranslate2 where it is installed, and clearhead without the step compiled from C.
    """
    parser = case_parser(run_decode)
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    results = []
    for shape in options.shape:
        torch.manual_seed(0)
        config = SHAPES[shape]
        plain, peer = ch.Transformer(config), peer_of(shape)
        model, before = prepared(plain), prepared(plain, native=False)
        folder = tempfile.TemporaryDirectory()
        compared = shape == "gpt2" and find_spec("ctranslate2") is not None
        other = translate2(peer, folder.name, torch.get_num_threads()) if compared else None
        for batch in options.batches:
            ids = torch.randint(config.vocab_size, (batch, options.prompt))
            jobs = {
                "clearhead": lambda ids=ids, model=model: greedy(model, ids, options.new),
                "clearhead without C": lambda ids=ids, model=before: greedy(model, ids, options.new),
                "transformers generate": lambda ids=ids, peer=peer: peer.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=options.new,
                    min_new_tokens=options.new,
                    do_sample=False,
                    pad_token_id=0,
                ),
            }
            if other is not None:
                jobs["ctranslate2"] = lambda ids=ids, other=other: other(ids, options.new)
            title = (
                f"CPU greedy decode, {shape} float32, batch {batch}, {options.prompt} + {options.new} tokens"
            )
            results.append(report(title, alternate(jobs, options.rounds), batch * options.new))
        folder.cleanup()
    if options.save:
        save(by_processor("cpu_decode"), results)


# beam -----------------------------------------------------------------------------------------------------


def reference(folder: Path, vocabulary: int) -> MarianMTModel:
    """A random model, saved to `folder`."""
    config = MarianConfig(
        vocab_size=vocabulary,
        d_model=512,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=2048,
        decoder_ffn_dim=2048,
        max_position_embeddings=512,
        activation_function="swish",
        scale_embedding=True,
        pad_token_id=vocabulary - 1,  # the last, and a row of zeros, as in the models of this kind
        decoder_start_token_id=vocabulary - 1,
        eos_token_id=None,  # nothing ends early
        bos_token_id=None,
        forced_eos_token_id=None,
    )
    model = MarianMTModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # so that beams change places, as in a trained model
            if parameter.ndim > 1 and "embed" not in name and "shared" not in name:
                parameter.mul_(8.0)
    model.save_pretrained(folder)
    return model


def beam_translate2(
    folder: Path, model: MarianMTModel, sources: list[list[int]], options: argparse.Namespace
) -> Callable[[], object]:
    """Convert the same weights for CTranslate2; give it a vocabulary, as its converter asks for files."""
    import ctranslate2
    from ctranslate2.converters.transformers import MarianMTLoader

    words = [f"t{number}" for number in range(options.vocabulary - 1)]  # it leaves out padding, the last
    loader = MarianMTLoader()
    spec = loader.get_model_spec(model)
    spec.register_source_vocabulary(words)
    spec.register_target_vocabulary(words)
    # It needs one, and never writes it before the last token.
    spec.config.eos_token = spec.config.decoder_start_token = words[0]
    spec.config.unk_token = words[1]
    spec.validate()
    spec.optimize(quantization=None)
    folder.mkdir()
    spec.save(str(folder))
    peer = ctranslate2.Translator(
        str(folder), device="cpu", compute_type="float32", intra_threads=options.threads
    )
    texts = [[words[token] for token in source] for source in sources]
    return lambda: peer.translate_batch(
        texts,
        beam_size=options.beams,
        max_decoding_length=options.new,
        min_decoding_length=options.new,
        max_batch_size=len(texts),
    )


def run_beam() -> None:
    """Time beam search on the CPU: a translation model of Marian's shape, float32, clearhead and peers in
    turn.

    The model has 6 + 6 layers and width 512. Sources of mixed length in one batch; nothing ends before the
    last token, on any side. CTranslate2 where it is installed.

    python benchmarks/run.py beam [--beams 4] [--sentences 32] [--new 32] [--threads 2] [--rounds 3] [--save]
    """
    parser = case_parser(run_beam)
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--sentences", type=int, default=32)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    logging.set_verbosity_error()
    lengths = torch.randint(5, 41, (options.sentences,)).tolist()
    sources = [torch.randint(2, options.vocabulary - 1, (length,)).tolist() for length in lengths]
    pad = options.vocabulary - 1
    ids = torch.tensor([source + [pad] * (max(lengths) - len(source)) for source in sources])
    mask = torch.tensor([[1] * length + [0] * (max(lengths) - length) for length in lengths])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        peer = reference(folder / "model", options.vocabulary)
        m = ch.load(folder / "model")
        assert not m.stops

        def ours() -> list[ch.Generation]:
            return m.generate(sources, options.new, num_beams=options.beams)

        def theirs() -> torch.Tensor:
            return peer.generate(
                ids, attention_mask=mask, num_beams=options.beams, max_new_tokens=options.new, do_sample=False
            )

        same = sum(mine.ids == row[1:].tolist() for mine, row in zip(ours(), theirs()))
        print(f"{same} of {len(sources)} rows are the same tokens in clearhead and transformers")
        jobs: dict[str, Callable[[], object]] = {"clearhead": ours, "transformers generate": theirs}
        if find_spec("ctranslate2") is not None:
            jobs["ctranslate2"] = beam_translate2(folder / "ct2", peer, sources, options)
        title = (
            f"CPU beam search, Marian shape float32, {options.beams} beams, "
            f"{len(sources)} sources of 5 to 40, {options.new} new tokens"
        )
        results = [report(title, alternate(jobs, options.rounds), len(sources) * options.new)]
    if options.save:
        save(by_processor("cpu_beam"), results)


# speculate ------------------------------------------------------------------------------------------------


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


def run_speculate() -> None:
    """Time speculation on the CPU, greedy, one row: tokens a second with and without drafts, alternating.

    Runs of the model per token are counted too. Each setting is what it says. `weights`: real stories260K
    weights tell a story and repeat themselves as much as they do. `periodic`: a 124M GPT-2 shape with
    random weights, whose text goes in circles: the most that lookup can give. `near`: its first layer alone
    guesses for it, which with random weights is nearly always right: the most that such a draft can give.
    `far`: another random layer guesses, always wrong: what speculation costs where it fails.

    python benchmarks/run.py speculate [--weights DIR] [--new 120] [--lookup 8] [--rounds 3] [--threads 1]
    [--save]
    """
    parser = case_parser(run_speculate)
    parser.add_argument("--weights", type=Path, default=WEIGHTS)
    parser.add_argument("--new", type=int, default=120)
    parser.add_argument("--lookup", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
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


# mtp --------------------------------------------------------------------------------------------------------


def run_mtp() -> None:
    """Train a character GPT with one MTP layer, then let the layer draft for its own model.

    Greedy texts are timed in turn with plain decoding, whose tokens they have. The runs of the model and the
    share of draft tokens that were accepted are of texts drawn at temperature 0.8.

    python benchmarks/run.py mtp [--text tinyshakespeare.txt] [--device cuda] [--steps 2000] [--new 120]
        [--texts 10] [--rounds 3] [--threads 1] [--save]
    """
    parser = case_parser(run_mtp)
    numbers = {"steps": 2000, "new": 120, "texts": 10, "rounds": 3, "threads": 1}
    for name, usual in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--text", default="stdlib-docs")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    settings = {"model.n_mtp_layers": 1, "train.mtp_weight": 0.3, "train.steps": options.steps}
    settings |= {"train.samples": 0, "train.device": options.device, "train.threads": options.threads}
    # Rotary positions and a longer context than the recipe's, so that no text has to slide.
    settings |= {"model.positions": "rope", "model.max_positions": 256, "data.batch_size": 4}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        trained = ch.train(options.text, recipe="char-gpt-cpu", out=out, settings=settings)
    m, results = trained.model.to(options.device), []
    m.special.pop("eos", None)
    prompt = m.encode(["Return the "])[0]
    for count in (1, 2, 4):
        drafts = {"draft": "mtp", "draft_tokens": count}
        row = compare(f"MTP, {count} draft tokens", m, prompt, options.new, options.rounds, **drafts)
        drawn = [
            m.generate(prompt, options.new, temperature=0.8, seed=seed, **drafts)
            for seed in range(options.texts)
        ]
        tokens, runs = sum(len(text.ids) for text in drawn), sum(text.steps for text in drawn)
        shares = {"accepted": (tokens - runs) / (runs * count), "runs_a_token": runs / tokens}
        print("  " + ", ".join(f"{name} {share:.3f}" for name, share in shares.items()))
        loss = {"loss": trained.metrics["loss"], "steps": options.steps, "text": Path(options.text).name}
        results.append({**row, **shares, **loss})
    if options.save:
        save(f"mtp_{options.device}", results)


# long -----------------------------------------------------------------------------------------------------


def quickest(times: list[float]) -> float:
    """The tenth part of the times is below this."""
    return sorted(times)[len(times) // 10]


def attention_seconds(config: ch.ModelConfig, keys: int) -> float:
    """Of one token in all layers: one query per head over this many keys in a buffer made for more."""
    E, heads = config.d_model // config.n_heads, config.n_kv_heads or config.n_heads
    q = torch.randn(1, heads, config.n_heads // heads, E)
    # Each layer has keys of its own, which the caches must hold in turn.
    shape = (2, config.n_layers, 1, heads, config.max_positions, E)
    k, v = torch.randn(shape)[..., :keys, :]
    # Weights are read in between, and push keys out of the caches.
    others = torch.randn(config.n_layers, 4 * config.d_model, config.d_model)
    times = []
    for _ in range(50):
        took = 0.0
        for layer in range(config.n_layers):
            others[layer].sum()
            start = time.process_time()
            nnf.scaled_dot_product_attention(q, k[layer], v[layer])
            took += time.process_time() - start
        times.append(took)
    return quickest(times)


def byte_tokenizer() -> Tokenizer:
    """One token per byte."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    tokenizer.train_from_iterator(
        [], trainers.BpeTrainer(vocab_size=256, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    )
    return tokenizer


def run_long() -> None:
    """Time a long generation on the CPU: the cost of a token as the row grows, and the share of attention in
    it.

    The work that grows with the row is attention over its keys: the same queries, keys and values through
    PyTorch's kernel alone, timed in the same run at the same lengths. Whatever else grew would show as a
    rest that grows. Times are CPU time of the process, with one thread unless told otherwise, and of the
    quickest tenth: a busy machine only ever adds.

    python benchmarks/run.py long [--new 4000] [--every 500] [--window 0] [--text] [--penalties] [--threads 1]
        [--save]
    """
    parser = case_parser(run_long)
    parser.add_argument("--new", type=int, default=4000)
    parser.add_argument("--every", type=int, default=500)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--window", type=int, default=0, help="keys that each layer sees; 0: all")
    parser.add_argument("--text", action="store_true", help="stream the text with a stop string, too")
    parser.add_argument(
        "--penalties", action="store_true", help="penalties and no-repeat n-grams, which look back"
    )
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = ch.ModelConfig(
        vocab_size=256,
        d_model=options.width,
        n_layers=options.layers,
        n_heads=8,
        n_kv_heads=4,
        positions="rope",
        norm="rmsnorm",
        gated=True,
        bias=False,
        max_positions=options.new + 1,
        window=options.window or None,
    )
    model, stamps = prepared(ch.Transformer(config)), []
    stream = TextStream(byte_tokenizer(), stop=("never said",)) if options.text else None

    def watch(number: int, row: Sequence) -> None:
        if stream is not None:
            stream.push(row.ids[-1])
        stamps.append(time.process_time())

    looking = (
        {"repetition_penalty": 1.1, "frequency_penalty": 0.01, "no_repeat_ngram": 6}
        if options.penalties
        else {}
    )
    prompts = Prompts([[1]])
    decode(model, Request(), prompts)
    request = Request(max_new_tokens=options.new, temperature=1.0, **looking)
    decode(model, request, prompts, Ends(on_token=watch))
    steps = [later - earlier for earlier, later in itertools.pairwise(stamps)]
    print(
        f"{options.new} tokens, width {options.width}, {options.layers} layers  "
        f"[{device_name()}, torch {torch.__version__}]"
    )
    print("        tokens   ms a token   attention alone   all the rest")
    curve = []
    for start in range(0, len(steps), options.every):
        piece = steps[start : start + options.every]
        middle = start + len(piece) // 2
        whole = quickest(piece) * 1e3
        attention = attention_seconds(config, min(middle, options.window or middle)) * 1e3
        rest = whole - attention
        curve.append(
            {
                "from": start,
                "ms": round(whole, 3),
                "attention_ms": round(attention, 3),
                "rest_ms": round(rest, 3),
            }
        )
        print(f"  {start:>5} - {start + len(piece):>5}{whole:>13.3f}{attention:>18.3f}{rest:>15.3f}")
    grown, attended = (curve[-1][key] - curve[0][key] for key in ("ms", "attention_ms"))
    print(
        f"  grown by {grown:.3f} ms a token, of which attention alone {attended:.3f}; "
        f"all the rest by {grown - attended:+.3f}"
    )
    if options.save:
        result = {"device": device_name(), "torch": torch.__version__, "curve": curve}
        result |= {"grown_ms": round(grown, 3), "attention_grown_ms": round(attended, 3)}
        save("long_window" if options.window else "long", [result])
