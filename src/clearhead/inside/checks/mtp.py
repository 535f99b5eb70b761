"""Rows of the equality suite for multi-token prediction: drafts that change no token, the loss as a loop."""

import torch
import torch.nn.functional as F

from clearhead.core.masks import tokens_from
from clearhead.core.stack import Inputs as StackInputs
from clearhead.inside.checks.rows import Comparison, Inputs, gap
from clearhead.learn.batches.batch import Batch
from clearhead.learn.losses import Terms, batch_loss
from clearhead.run.generate.decode import decode, steps_back
from clearhead.run.generate.request import Request
from clearhead.run.generate.sequence import Prompts
from clearhead.run.generate.speculate import MTPDrafter
from clearhead.variants.mtp import states_after


def mtp_rows(inputs: Inputs) -> list[Comparison]:
    """Return the rows about MTP layers."""
    model, config = inputs.model, inputs.model.config
    layers = config.n_mtp_layers > 0
    return [
        inputs.compare(
            "MTP drafts = greedy decoding",
            "greedy tokens with drafts of the model's own MTP layers with one pass over the whole text",
            _drafted,
            fits=layers and steps_back(model) and not config.rotates_by_length and inputs.length > 2,
        ),
        inputs.compare(
            "MTP loss = loop",
            "the loss of the MTP layers over all rows with a loop over rows, layers and tokens",
            _loss,
            fits=layers and inputs.length > 1 + config.n_mtp_layers,
        ),
    ]


def _drafted(inputs: Inputs) -> float:
    """Compare log-probabilities, those of the tokens also with the best at their place."""
    new = inputs.length // 2
    prompt = inputs.main[:1, : inputs.length - new].tolist()
    request = Request(max_new_tokens=new, logprobs=True)
    drafter = MTPDrafter(inputs.model, 3, request)
    row = decode(inputs.model, request, Prompts(prompt), drafters=[drafter])[0]
    text = torch.tensor([prompt[0] + row.ids], device=inputs.device)
    values = inputs.model(text).logits[0, len(prompt[0]) - 1 : -1].float().log_softmax(-1)
    chosen = values.gather(-1, text[0, len(prompt[0]) :, None])[:, 0]
    reported = torch.tensor(row.logprobs, device=inputs.device)
    return max(gap(reported, chosen), gap(reported, values.amax(-1)))


def _loss(inputs: Inputs) -> float:
    model, ids, weight = inputs.model, inputs.main, 0.5
    batch = Batch(ids[:, :-1], ids[:, 1:].clone())
    model.training = True  # of the whole alone, whose loss then has that of its MTP layers: nothing drops out
    try:
        whole = batch_loss(model, batch, balance=0.0, terms=Terms(mtp_weight=weight))[0]
        main = batch_loss(model, batch, balance=0.0)[0]
    finally:
        model.training = False
    total = torch.zeros((), device=inputs.device)
    for row in ids[:, None]:
        states, length = model(row[:, :-1]).hidden, row.shape[1] - 1
        for number, layer in enumerate(model.mtp or (), 1):
            later, tokens = row[:, number:-1], tokens_from(1, length - number, inputs.device)
            states = states_after(model, layer, states[:, : length - number], StackInputs(later), tokens)
            for place, token in enumerate(row[0, number + 1 :]):
                logits = model.head(states[:, place : place + 1], None)[0, 0].float()
                total += F.cross_entropy(logits, token)
    return gap(whole, main + weight / model.config.n_mtp_layers * total)
