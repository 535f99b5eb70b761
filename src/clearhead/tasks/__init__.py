"""What a model is for: classes of a text, tags of its words, words under a mask, answers in a context, translation.

Each function here is a method of `Model`. One input gives one result, and a list gives a list in the same order. Inputs
of like length share a batch, padded on the right, and come out as they would alone.
"""

from clearhead.tasks.answers import answer
from clearhead.tasks.blanks import fill
from clearhead.tasks.classes import classify
from clearhead.tasks.results import Answer, Candidate, Classification, Span, Tags, Word
from clearhead.tasks.translation import translate
from clearhead.tasks.words import spans_of, tag, tag_all

__all__ = [
    "Answer",
    "Candidate",
    "Classification",
    "Span",
    "Tags",
    "Word",
    "answer",
    "classify",
    "fill",
    "spans_of",
    "tag",
    "tag_all",
    "translate",
]
