"""A model ready to use: `Model`, a bundle with the tasks as methods, and `load`, which opens a directory."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self, Unpack, overload

import torch
from torch import Tensor

from clearhead.errors import refuse
from clearhead.hub import checkpoint, peft
from clearhead.hub.checkpoint import local_or_downloaded, read_tokenizer_and_settings
from clearhead.hub.preprocessor import Image
from clearhead.hub.towers import has_images, has_towers, load_towers, load_with_images
from clearhead.learn.tasks import generation, reading, results, speech, vectors
from clearhead.learn.tasks.generation import (
    Cancel,
    GenerateOptions,
    Hooks,
    OnText,
    TranslateOptions,
    generate,
)
from clearhead.learn.tasks.images import ImagePrompt
from clearhead.learn.tasks.reading import as_prompts, best_of_each, unwrapped
from clearhead.learn.tasks.results import Answer, Candidate, Classification, Generation, Score, Tags
from clearhead.run.bundle import Bundle, best_device, float_dtype
from clearhead.run.generate.request import Request
from clearhead.run.kernels.parts import like
from clearhead.run.quant.apply import QuantPlan, plan_of, refuse_quantized, rounded

One = str | Sequence[int]  # text or ids
Given = One | ImagePrompt  # a prompt
Many = list[str] | tuple[str, ...] | Sequence[Sequence[int]]
Givens = Many | Sequence[ImagePrompt]
Filled = list[Candidate] | list[list[Candidate]]  # of the one mask, or of each of several
Pair = tuple[str, str]


class Model(Bundle):
    """A Transformer with its tokenizer and settings, ready to use.

    A method takes one input or a list. One input gives one result, and a list gives a list in the same order.
    """

    @overload
    def generate(  # type: ignore[overload-overlap]  # 1 is an int too
        self,
        prompt: Given,
        max_new_tokens: int = ...,
        *,
        num_return: Literal[1] = ...,
        **options: Unpack[GenerateOptions],
    ) -> Generation: ...

    @overload
    def generate(
        self, prompt: Given, max_new_tokens: int = ..., *, num_return: int, **options: Unpack[GenerateOptions]
    ) -> list[Generation]: ...

    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompt: Givens,
        max_new_tokens: int = ...,
        *,
        num_return: Literal[1] = ...,
        **options: Unpack[GenerateOptions],
    ) -> list[Generation]: ...

    @overload
    def generate(
        self,
        prompt: Givens,
        max_new_tokens: int = ...,
        *,
        num_return: int,
        **options: Unpack[GenerateOptions],
    ) -> list[list[Generation]]: ...

    def generate(
        self,
        prompt: Given | Givens,
        max_new_tokens: int = Request.max_new_tokens,
        *,
        num_return: int = 1,
        on_text: OnText | None = None,
        cancel: Cancel | None = None,
        draft: Bundle | str | None = None,
        **options: Any,
    ) -> Generation | list[Generation] | list[list[Generation]]:
        """Continue a prompt, or, with an encoder, answer it.

        With `num_return` above 1, each prompt gives a list, best first. In a batch each row comes out as it
        would alone.

        Args:
            prompt: text, or ids, or an `ImagePrompt`; or a list of them.
            max_new_tokens: new tokens of each row at most.
            num_return: how many of the best beams to give.
            on_text: called with the row's number and its new text as soon as that is final.
            cancel: an event, or a function asked after each token: once set, or True, every row ends.
            draft: what drafts tokens: a smaller model with the same vocabulary, or "mtp", the model's own MTP
                layers; the distribution is the same.
            options: further fields of `Request`: temperature (default 0: greedy), top_k, num_beams, stop, ...
        """
        request = {"max_new_tokens": max_new_tokens, "num_return": num_return, **options}
        single, prompts = as_prompts(prompt)
        return best_of_each(
            generate(self, prompts, request, Hooks(on_text, cancel, draft)), num_return, single
        )

    @overload
    def translate(  # type: ignore[overload-overlap]
        self,
        text: One,
        max_new_tokens: int | None = ...,
        num_beams: int | None = ...,
        length_penalty: float | None = ...,
        *,
        num_return: Literal[1] = ...,
        **options: Unpack[TranslateOptions],
    ) -> Generation: ...

    @overload
    def translate(
        self,
        text: Many,
        max_new_tokens: int | None = ...,
        num_beams: int | None = ...,
        length_penalty: float | None = ...,
        *,
        num_return: Literal[1] = ...,
        **options: Unpack[TranslateOptions],
    ) -> list[Generation]: ...

    @overload
    def translate(
        self,
        text: One | Many,
        max_new_tokens: int | None = ...,
        num_beams: int | None = ...,
        length_penalty: float | None = ...,
        *,
        num_return: int,
        **options: Unpack[TranslateOptions],
    ) -> list[Generation] | list[list[Generation]]: ...

    def translate(
        self,
        text: One | Many,
        max_new_tokens: int | None = None,
        num_beams: int | None = None,
        length_penalty: float | None = None,
        *,
        num_return: int = 1,
        on_text: OnText | None = None,
        cancel: Cancel | None = None,
        draft: Bundle | str | None = None,
        **options: Any,
    ) -> Generation | list[Generation] | list[list[Generation]]:
        """Return what an encoder-decoder makes of a text.
        Beams, length penalty and length are generation_config.json's where it has them, else 4 beams and as
        many tokens as the model has positions, 256 at most. Options are those of `generate`; a temperature
        replaces the beams.
        """
        own = {"max_new_tokens": max_new_tokens, "num_beams": num_beams, "length_penalty": length_penalty}
        request = {**own, "num_return": num_return, **options}
        single, prompts = as_prompts(text)
        generations = generation.translate(self, prompts, request, Hooks(on_text, cancel, draft))
        return best_of_each(generations, num_return, single)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], max_new_tokens: int | None = None, **options: Any
    ) -> Generation:
        """Answer a conversation, a list of {"role": ..., "content": ...}, by the model's chat template.

        Where the model reads images, content may be a list of parts, {"type": "text", "text": ...} and
        {"type": "image", "image": ...}: a path, an array, or a picture of Pillow.

        An answer has `max_new_tokens` at most; by default 512, or as many as still fit. Options are those of
        `generate`, and:
            tools: functions that may be called: typed Python functions, or entries as OpenAI's API has them.
            tool_choice: auto, required, none, or the name of one. parallel_tool_calls: False for one at most.
            template: what the template takes besides. on_part: called with each new `Part` of the answer.
        The answer's `message` is the next one of the conversation; `tool_calls` are its calls.
        """
        hooks = Hooks(options.pop("on_text", None), options.pop("cancel", None), options.pop("draft", None))
        if max_new_tokens is not None:
            options["max_new_tokens"] = max_new_tokens
        return generation.chat(self, messages, options, hooks)

    def looped(self, times: int) -> Self:
        """Return the model with its loop (`config.loop`) run so many times; both have the same weights."""
        config = self.config
        refuse(config.loop is None, "the model has no loop of layers: config.loop makes one")
        first, span, before = config.loop or (0, 0, 0)
        layers = config.n_layers + span * (times - before)
        config = config.replace(loop=(first, span, times), n_layers=layers)
        stack = like(self.model.main, type(self.model.main), spec=config.main)
        name = "encoder" if self.model.decoder is None else "decoder"
        return replace(self, model=like(self.model, type(self.model), config=config, **{name: stack}))

    def score(self, text: One, source: One | None = None) -> Score:
        """Return the log-probability of each token of a text; with an encoder, given a `source`."""
        return generation.score(self, text, source)

    @overload
    def classify(
        self, inputs: str | Pair | Image, batch_size: int = ..., labels: Sequence[str] | None = ...
    ) -> Classification: ...

    @overload
    def classify(
        self, inputs: list[Any], batch_size: int = ..., labels: Sequence[str] | None = ...
    ) -> list[Classification]: ...

    def classify(
        self, inputs: Any, batch_size: int = 32, labels: Sequence[str] | None = None
    ) -> Classification | list[Classification]:
        """Return the class of a text, of a pair of texts `("a", "b")`, or of an image.

        Texts longer than the model takes are cut; of a pair, the longer one. Images are arrays, tensors or
        paths of files; an array or tensor of several images is a list. With two towers (CLIP, SigLIP), the
        classes are `labels`, texts such as "a cat", for images of which it was never trained on the classes.
        """
        single = not isinstance(inputs, list)
        if self.config.input == "patches" or self.towers is not None:
            single = not isinstance(inputs, list | tuple) and getattr(inputs, "ndim", 3) < 4
        given = [inputs] if single else list(inputs)
        if self.towers is not None or labels is not None:
            return unwrapped(vectors.zero_shot(self, given, labels or (), batch_size), single)
        return unwrapped(reading.classify(self, given, batch_size), single)

    def rerank(
        self, query: str, texts: Sequence[str], top: int | None = None, batch_size: int = 32
    ) -> list[results.Ranked]:
        """Return the texts, best answers first, `top` at most.

        A classifier of one class reads the query with each text. Vectors are compared by their cosine, sparse
        ones by their dot product, and those of tokens by MaxSim.
        """
        return vectors.rerank(self, query, texts, top, batch_size)

    @overload
    def tag(self, text: str | list[str], batch_size: int = ...) -> Tags: ...

    @overload
    def tag(self, text: list[list[str]], batch_size: int = ...) -> list[Tags]: ...

    def tag(self, text: str | list[str] | list[list[str]], batch_size: int = 32) -> Tags | list[Tags]:
        """Tag each word of a text, or of a list of words, and join the tags into spans.

        Labels of spans are types, such as PER for B-PER I-PER, in every scheme: IO, IOB, IOE, IOBES, BILOU.

        A word is what the tokenizer splits a text into before it looks for subwords; its tag is that of its
        first subword. Long texts are read in overlapping windows.
        """
        single = isinstance(text, str) or (len(text) > 0 and isinstance(text[0], str))
        texts: Any = [text] if single else text
        return unwrapped(reading.tag(self, texts, batch_size), single)

    @overload
    def fill(self, text: str, k: int = ..., batch_size: int = ...) -> Filled: ...

    @overload
    def fill(self, text: list[str], k: int = ..., batch_size: int = ...) -> list[Filled]: ...

    def fill(self, text: str | list[str], k: int = 5, batch_size: int = 32) -> Filled | list[Filled]:
        """Return the k best tokens for the mask in a text, with their probabilities.
        Several masks give a list for each. Each mask is filled on its own, the others left standing.
        """
        filled = reading.fill(self, [text] if isinstance(text, str) else text, k, batch_size)
        single_or_list: list[Filled] = [masks[0] if len(masks) == 1 else masks for masks in filled]
        return single_or_list[0] if isinstance(text, str) else single_or_list

    @overload
    def answer(self, question: str, context: str, **options: Unpack[reading.AnswerOptions]) -> Answer: ...

    @overload
    def answer(
        self, question: list[str], context: list[str], **options: Unpack[reading.AnswerOptions]
    ) -> list[Answer]: ...

    def answer(
        self, question: Any, context: Any, **options: Unpack[reading.AnswerOptions]
    ) -> Answer | list[Answer]:
        """Return the part of the context that answers the question; a long context is read in windows.

        Options: `none` allows "no answer", an empty text where the model finds that likelier than any answer.
        `max_tokens` is the longest answer, `stride` the tokens that two windows share, and `batch_size` the
        windows at a time.
        """
        if isinstance(question, str):
            return reading.answer(self, [question], [context], **options)[0]
        return reading.answer(self, question, context, **options)

    def embed(self, texts: Any, batch_size: int | None = None, prompt: str | None = None) -> Tensor | Any:
        """Return one vector for each text, in the order given: N texts -> [N, D].

        The states of a text's tokens are pooled as the directory says (sentence-transformers' modules.json),
        else by their mean. Texts longer than the model takes are cut. `prompt` names one of the directory's
        prompts, to be put before each text in place of its usual one. Two towers embed texts and images, as
        `pathlib` paths, arrays or tensors, side by side in one space, as vectors of length one. `batch_size`
        texts run at a time at most; None: as the device reads them fastest.

        A model of sparse vectors (SPLADE) gives a list of `SparseVector`, and one of late interaction
        (ColBERT) a list of matrices [tokens, D]. `prompt` "query" makes a query of each text; without one,
        ColBERT makes a document of it.
        """
        single = isinstance(texts, Image) and getattr(texts, "ndim", 3) < 4
        given: list[Any] = [texts] if single else list(texts)
        if self.towers is not None and prompt is None:
            return vectors.embed_joined(self, given, batch_size)
        return vectors.embed(self, given, batch_size, prompt)

    @overload
    def transcribe(
        self, sound: speech.Sound, **options: Unpack[speech.TranscribeOptions]
    ) -> results.Transcription: ...

    @overload
    def transcribe(
        self, sound: list[Any], **options: Unpack[speech.TranscribeOptions]
    ) -> list[results.Transcription]: ...

    def transcribe(
        self, sound: Any, **options: Unpack[speech.TranscribeOptions]
    ) -> results.Transcription | list[results.Transcription]:
        """Return what is said in a sound, a file or samples [N]; a long one is read by windows.

        Options: `language` by code or name (default: what the model hears), `task` "transcribe" or
        "translate" (to English), `timestamps` for segments with times, `words` for the times of each word,
        `prompt`, a text before the transcript whose names and style the model takes up, `rate` of samples
        that are given (default: the model's), `max_new_tokens` of a window, `batch_size` windows at a time.
        Several numbers of `temperature` are tried in order, until a window passes
        `compression_ratio_threshold` and `logprob_threshold`; `no_speech_threshold` skips silence (default:
        0.6; inf: none), and `seed` is for what is drawn.
        """
        single = not isinstance(sound, list | tuple)
        return unwrapped(speech.transcribe(self, [sound] if single else sound, **options), single)


def load(
    folder: str | Path,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    allow_download: bool = False,
    tokenizer: str | Path | None = None,
    mapped: bool = True,
    parallel: Mapping[str, int] | None = None,
    quantize: str | QuantPlan | None = None,
    check_finite: bool = True,
) -> Model:
    """Open a model directory, clearhead's, Hugging Face's or PEFT's with its base, or a GGUF file.

    There is no network unless `allow_download`. `dtype` is float32, bfloat16, float16 or float64; None: as
    the weights are.
    `device` is "cpu", "cuda", "cuda:1", "mps", or "auto" for the best there is. `tokenizer` names one that
    lies elsewhere: a directory, a tokenizer.json, a SentencePiece .model, llama2.c's .bin. `mapped` weights
    are pages of the file, which processes share and which are copied when written to: the file may be
    replaced or deleted, but not written over or cut short while the model is in use. False reads it into
    memory. `parallel`, such as {"tensor": 2}, splits the model by heads
    over the processes that `torchrun` has started; each reads its part, and all call it with the same inputs.
    `quantize`, "int8", "int4" (groups of 32, no data) or a `QuantPlan`, rounds weights once they are read.
    Weights that are NaN or infinite are refused unless `check_finite` is False.
    """
    cast, place, rounding = float_dtype(dtype), best_device(device), plan_of(quantize, parallel is not None)
    path = local_or_downloaded(folder, allow_download)
    if peft.is_adapter(path):
        refuse(bool(parallel or rounding), f"{path} is an adapter: merge it, clearhead convert {path} OUT")
        adapted = load(peft.base_of(path), dtype, device, False, tokenizer, mapped, check_finite=check_finite)
        adapted.adapters.add(path.name, path)
        adapted.adapters.use(path.name)
        return adapted
    if parallel is not None:
        from clearhead.learn.parallel.split import split_for_use  # takes seconds to import

        empty, unread = open_empty(path, cast, tokenizer)
        refuse_quantized(empty.model, "split over processes")
        split_for_use(empty.model, replace(unread, check_finite=check_finite), parallel, place)
        return empty
    if has_towers(path):
        refuse(rounding is not None, f"{path} has two towers: they are not quantized; load {path / 'text'}")
        joined = load_towers(path, cast, mapped, check_finite).to(place)
        described = joined.description.tower("text")
        settings = read_tokenizer_and_settings(path, described, tokenizer)
        return Model(joined.text, description=described, folder=path, towers=joined, **settings)
    images = None
    if has_images(path):
        model, description, images = load_with_images(path, cast, mapped, check_finite)
        images.to(place)
    else:
        model, description = checkpoint.load_model(
            path, checkpoint.describe(path), cast, mapped, check_finite=check_finite
        )
    settings = read_tokenizer_and_settings(path, description, tokenizer)
    model = model if place.type == "cpu" else model.to(place)
    parts = {"description": description, "image_encoder": images, **settings}
    return Model(rounded(model, rounding), folder=path, **parts)


def open_empty(
    folder: Path, dtype: torch.dtype | None = None, tokenizer: str | Path | None = None
) -> tuple[Model, checkpoint.Unread]:
    """Return the model of a directory with parameters on the meta device, and its weights, still on disk."""
    model, description, unread = checkpoint.open_model(folder, checkpoint.describe(folder), dtype)
    settings = read_tokenizer_and_settings(folder, description, tokenizer)
    return Model(model, description=description, folder=folder, **settings), unread
