"""What a load test asks: data sets of the usual shapes as lists of `Ask`, the same for the same seed.

Made from numbers (random, shared prefixes, conversations), or read from a file that the user names: nothing is ever
downloaded. `from_spec` reads the words of the command line; `files` has the shapes that are read.

`input_tokens` of an ask counts its own text; what a chat template puts around it is `Tokens.template_tokens`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from penstock.bench.datasets import files
from penstock.bench.datasets.files import Wanted
from penstock.bench.datasets.tokenizers import Tokens
from penstock.bench.load.arrivals import Ask
from penstock.errors import UserError, nearest

_TRIES = 64
_MOST = 2**21
MOST_REQUESTS = 10**7


def from_spec(text: str, wanted: Wanted, tokens: Callable[[], Tokens]) -> list[Ask]:
    """The asks that a word of the command line means.  Raises UserError, also for a file that is not there.

    `tokens` is called only where something must be counted. Shapes:
      random                                 texts of exactly `input_tokens` tokens (default 1000, answers 200)
      prefix:n=8,prefix=1000,suffix=100      `n` beginnings shared by all, each ask with an end of its own
      turns:sessions=10,turns=4,first=200    conversations; every turn holds what was said before it
      sharegpt:FILE  jsonl:FILE  replay:FILE see `files`
      prompt:TEXT                            the same text every time (answers 64)
    """
    kind, _, rest = text.partition(":")
    made = _SHAPES.get(kind)
    if made is None:
        close = nearest(kind, _SHAPES)
        raise UserError(
            f'cannot use data set "{text[:80]}": no such kind',
            hint=f'Did you mean "{close}"?' if close else f"Kinds: {', '.join(_SHAPES)}.",
        )
    _check(wanted)
    return made(rest, wanted, tokens)


def describe(asks: Sequence[Ask]) -> dict[str, float | int | None]:
    """What a set of asks comes to: counts and mean tokens; None where nobody counted."""
    counted = [ask.input_tokens for ask in asks if ask.input_tokens is not None]
    return {
        "n": len(asks),
        "mean_input_tokens": sum(counted) / len(asks) if asks and len(counted) == len(asks) else None,
        "mean_output_tokens": sum(ask.output_tokens for ask in asks) / len(asks) if asks else None,
        "n_sessions": len({ask.session for ask in asks if ask.session is not None}),
    }


class Writer:
    """Texts of an exact number of tokens, from a seed. `special` counts what the tokenizer puts around a prompt."""

    def __init__(self, tokens: Tokens, seed: int, special: bool) -> None:
        self.rng = random.Random(seed)
        self._tokens, self._special = tokens, special
        self._words = tokens.words()

    def text(self, n_tokens: int, before: str = "") -> str:
        """A text with which `before` and it together are exactly `n_tokens` long.  Raises UserError if it finds none.

        Words are added and taken away by the count of the whole text until it is right: joined texts may join tokens.
        """
        begun = self._tokens.count(before, self._special) if before else 0
        pieces = self.rng.choices(self._words, k=max(0, n_tokens - begun))
        for _ in range(_TRIES):
            text = "".join(pieces)
            whole = before + text if before else text.lstrip(" ")
            n_found = self._tokens.count(whole, self._special)
            off = n_found - n_tokens
            if off == 0:
                return text if before else whole
            n_words = round(abs(off) * len(pieces) / max(1, n_found - begun))
            if off > 0 and n_words > 1:
                del pieces[-n_words:]
            elif off > 0 and pieces:
                pieces[-1:] = [pieces[-1][:-1]] if len(pieces[-1]) > 2 else []  # part of a word may be what fits
            else:
                pieces += self.rng.choices(self._words, k=max(1, n_words))
        raise UserError(
            f"cannot make a text of exactly {n_tokens} tokens",
            detail=f"Counted by {self._tokens.source}, {_TRIES} tries.",
            hint="Ask for another number of tokens, or give texts of your own: --dataset jsonl:FILE.",
        )

    def drawn(self, length: int, spread: float) -> int:
        """A length from length * (1 - spread) to length * (1 + spread), at least 1."""
        if spread == 0:
            return length
        return max(1, self.rng.randint(round(length * (1 - spread)), round(length * (1 + spread))))


def _random(rest: str, wanted: Wanted, tokens: Callable[[], Tokens]) -> list[Ask]:
    _options("random", rest, {})
    writer = Writer(tokens(), wanted.seed, special=not wanted.chat)
    n_in, n_out = wanted.input_tokens or 1000, wanted.output_tokens or 200
    asks = []
    for _ in range(wanted.n_requests):
        length = writer.drawn(n_in, wanted.spread)
        asks.append(Ask(writer.text(length), length, writer.drawn(n_out, wanted.spread)))
    return asks


def _shared_prefix(rest: str, wanted: Wanted, tokens: Callable[[], Tokens]) -> list[Ask]:
    """Each beginning is exactly `prefix` tokens by itself, and each whole text exactly prefix + suffix."""
    given = _options("prefix", rest, {"n": 8, "prefix": 1000, "suffix": 100})
    writer = Writer(tokens(), wanted.seed, special=not wanted.chat)
    beginnings = [writer.text(given["prefix"]) for _ in range(given["n"])]
    length = given["prefix"] + given["suffix"]
    asks = []
    for index in range(wanted.n_requests):
        before = beginnings[index % given["n"]]
        asks.append(Ask(before + writer.text(length, before), length, wanted.output_tokens or 200))
    writer.rng.shuffle(asks)
    return asks


def _turns(rest: str, wanted: Wanted, tokens: Callable[[], Tokens]) -> list[Ask]:
    """Conversations: turn k holds the k-1 turns before it, then a new question of `input_tokens` (default 100).

    What the assistant said before is text of `output_tokens` made up beforehand, not the answer that came: prompts are
    then the same in every run, and a server's cache keeps the questions alike but not its own words. All first turns
    come first, then all second ones; each waits for the answer to the turn before it.
    """
    n_turns = _options("turns", rest, {"turns": 4, "sessions": 0, "first": 0})["turns"]
    given = _options("turns", rest, {"turns": 4, "sessions": -(-wanted.n_requests // n_turns), "first": 0})
    n_in, n_out = wanted.input_tokens or 100, wanted.output_tokens or 100
    writer = Writer(tokens(), wanted.seed, special=False)
    said: list[list[dict[str, str]]] = [[] for _ in range(given["sessions"])]
    lengths = [0] * given["sessions"]
    asks: list[Ask] = []
    for turn in range(n_turns):
        for session, messages in enumerate(said):
            n_new = given["first"] if turn == 0 and given["first"] else n_in
            if turn:
                messages.append({"role": "assistant", "content": writer.text(n_out)})
                lengths[session] += n_out
            messages.append({"role": "user", "content": writer.text(n_new)})
            lengths[session] += n_new
            before = len(asks) - given["sessions"] if turn else None
            asks.append(Ask([*messages], lengths[session], n_out, f"session-{session}", before))
    return asks[: wanted.n_requests]


def _prompt(rest: str, wanted: Wanted, _: Callable[[], Tokens]) -> list[Ask]:
    if not rest:
        raise UserError("cannot use an empty prompt", hint='prompt:TEXT, such as "prompt:Singapore is a".')
    return [Ask(rest, None, wanted.output_tokens or 64)] * wanted.n_requests


_Shape = Callable[[str, Wanted, Callable[[], Tokens]], list[Ask]]
_SHAPES: dict[str, _Shape] = {
    "random": _random,
    "prefix": _shared_prefix,
    "turns": _turns,
    "sharegpt": files.sharegpt,
    "jsonl": files.jsonl,
    "replay": lambda rest, wanted, tokens: files.replay(
        rest, wanted, lambda: Writer(tokens(), wanted.seed, False).text
    ),
    "prompt": _prompt,
}


def _options(kind: str, text: str, defaults: Mapping[str, int]) -> dict[str, int]:
    """ "n=8,prefix=1000" over the defaults: whole numbers above 0.  Raises UserError."""
    found = dict(defaults)
    for word in filter(None, text.split(",")):
        name, _, value = word.partition("=")
        legal = f"Options of {kind}: {', '.join(defaults) or 'none'}."
        if name not in defaults:
            close = nearest(name, defaults)
            raise UserError(
                f'cannot use data set "{kind}:{text[:80]}": no option "{name[:40]}"',
                hint=f'Did you mean "{close}"?' if close else legal,
            )
        if not (value.isascii() and value.isdigit() and len(value) < 8 and 1 <= int(value) <= _MOST):
            raise UserError(
                f'cannot use data set "{kind}:{text[:80]}": {name} is not a whole number from 1 to {_MOST:,}',
                hint=legal,
            )
        found[name] = int(value)
    return found


def _check(wanted: Wanted) -> None:
    if not 1 <= wanted.n_requests <= MOST_REQUESTS:
        raise UserError(f"cannot make {wanted.n_requests} requests", hint=f"From 1 to {MOST_REQUESTS:,}.")
    if not 0 <= wanted.spread < 1:
        raise UserError(f"cannot spread lengths by {wanted.spread:g}", hint="A share from 0 to below 1.")
    for name in ("input_tokens", "output_tokens"):
        value = getattr(wanted, name)
        if value is not None and not 1 <= value <= _MOST:
            raise UserError(f"cannot use {name} {value}", hint=f"From 1 to {_MOST:,}.")


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
