"""Time beam search on the CPU: a translation model of Marian's shape, float32, clearhead and peers in turn.

The model has 6 + 6 layers and width 512. Sources of mixed length in one batch; nothing ends before the last
token, on any side. CTranslate2 where it is installed.

python benchmarks/beam.py [--beams 4] [--sentences 32] [--new 32] [--threads 2] [--rounds 3] [--save]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import MarianConfig, MarianMTModel, logging

import clearhead as ch
from common import alternate, by_processor, report, save


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


def translate2(
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--sentences", type=int, default=32)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true")
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
            jobs["ctranslate2"] = translate2(folder / "ct2", peer, sources, options)
        title = (
            f"CPU beam search, Marian shape float32, {options.beams} beams, "
            f"{len(sources)} sources of 5 to 40, {options.new} new tokens"
        )
        results = [report(title, alternate(jobs, options.rounds), len(sources) * options.new)]
    if options.save:
        save(by_processor("cpu_beam"), results)


if __name__ == "__main__":
    main()
