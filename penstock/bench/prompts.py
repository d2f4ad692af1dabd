"""Asks that need no data: one fixed prompt, as hey sends it, and random words. Seeded."""

from __future__ import annotations

import random

from penstock.bench.ask import Ask

MOST = 10_000
# Words that most tokenizers have whole, so that a word is about a token.
_WORD_LIST = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work night point home water room mother area money story "
    "fact month lot right study book eye job word business issue side kind head house service friend father power "
    "hour game line end member law car city community name president team minute idea kid body information back "
    "parent face others level office door health person art war history party result change morning reason research"
)
_WORDS = _WORD_LIST.split(" ")


def fixed(prompt: str, output_tokens: int) -> list[Ask]:
    """The one ask of every request."""
    return [Ask(prompt, None, output_tokens)]


def random_words(n_words: int, output_tokens: int, n_asks: int, seed: int) -> list[Ask]:
    """Asks of `n_words` random words, all different so that no prefix cache helps.

    A word is about a token; how many tokens it really was, the server's usage tells.
    """
    source = random.Random(seed)
    return [Ask(" ".join(source.choices(_WORDS, k=n_words)), None, output_tokens) for _ in range(n_asks)]
