"""How the text of one request may go on, found in the text itself, and how often that came true."""

import torch
from torch import Tensor

from clearhead.run.generate.decode import agreed
from clearhead.run.generate.speculate import Guesser

LEARNED = 0.25  # how far one more guess moves the share of those that came true


class Guesses:
    """How the text of one request may go on, and how often such guesses came true."""

    def __init__(self, guesser: Guesser) -> None:
        self.guesser, self.share = guesser, 0.0
        self.start, self.found = 0, list[int]()  # where the guesses of this step stand, and what they are
        self.read = 0  # how many of them the step reads

    def look(self, tokens: list[int], most: int) -> None:
        """Compare the last guesses with what came, and guess up to `most` tokens behind `tokens`."""
        for guess, came in zip(self.found, tokens[self.start :]):
            self.share += LEARNED * ((guess == came) - self.share)
            if guess != came:
                break
        self.start, self.read = len(tokens), 0
        self.found = self.guesser.guess(tokens, most, _nothing).tokens

    def at(self, place: int) -> int | None:
        """Return the guess at a place of the text that this step reads; None: there is none."""
        return self.found[place - self.start] if self.start <= place < self.start + self.read else None

    def end(self, tokens: list[int]) -> tuple[int, int]:
        """End a step; return how many guesses were read, and how many of them `tokens` has."""
        read, self.read = self.read, 0
        return read, agreed(self.found[:read], tokens[self.start :])


def _nothing() -> Tensor:
    return torch.zeros(1)  # what is looked up is not drawn
