"""What a cache remembers of the tokens of a ragged batch where no layer asks for all of them."""

import torch

from clearhead.core.masks import Tokens, join


def latest(tokens: Tokens, count: int) -> Tokens:
    """Return the last `count` slots, and before them the last real token of each row to count on from.

    As long as there are no more than twice as many, all are returned.
    """
    if tokens.length <= 2 * count:
        return tokens
    gone, kept = tokens.map(lambda x: x[:, :-count]), tokens.map(lambda x: x[:, -count:])
    last = torch.where(gone.real_mask(), gone.order, -1).argmax(1, keepdim=True)  # B 1
    return join(gone.map(lambda x: x.expand(len(last), -1).gather(1, last)), kept)
