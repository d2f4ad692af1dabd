"""Data sets of the usual shapes as lists of `PlannedRequest`, the same for the same seed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence

from penstock.bench.datasets import files
from penstock.bench.datasets.files import Wanted
from penstock.bench.datasets.tokenizers import Tokens
from penstock.bench.load.arrivals import PlannedRequest
from penstock.errors import UserError, nearest

_TRIES = 64
_MOST_BLOCKS = 4096
_MOST = 2**21
MOST_REQUESTS = 10**7
INPUT_TOKENS, OUTPUT_TOKENS = 1000, 200  # where no length is sizes
PREFIX_SIZES = {"n": 8, "prefix": 1000, "suffix": 100}


def from_spec(text: str, wanted: Wanted, tokens: Callable[[], Tokens]) -> list[PlannedRequest]:
    """The requests that a KIND:OPTIONS of the command line means; `tokens` is called only where something is counted.

    random, prefix:n=8,prefix=1000,suffix=100, turns:sessions=10,turns=4,first=200, sharegpt:FILE, jsonl:FILE,
    replay:FILE, prompt:TEXT.  Raises UserError.
    """
    kind, _, rest = text.partition(":")
    shape = _SHAPES.get(kind)
    if shape is None:
        close = nearest(kind, _SHAPES)
        raise UserError(
            f'cannot use data set "{text[:80]}": no such kind',
            hint=f'Did you mean "{close}"?' if close else f"Kinds: {', '.join(_SHAPES)}.",
        )
    _check(wanted)
    return shape(rest, wanted, tokens)


class Writer:
    """Texts of an exact number of tokens, from a seed. `special` counts what the tokenizer puts around a prompt."""

    def __init__(self, tokens: Tokens, seed: int, special: bool) -> None:
        self.rng = random.Random(seed)
        self._seed, self._blocks = seed, dict[int, list[str]]()
        self._tokens, self._special = tokens, special
        self._words = tokens.words()

    def text(self, n_tokens: int, before: str = "") -> tuple[str, int]:
        """A text, and how many tokens `before` and it together have: `n_tokens`, or the nearest that was found.

        Words are added and taken away by the count of the whole text until it is right: joined texts may join tokens.
        """
        begun = self._tokens.count(before, self._special) if before else 0
        pieces = self.rng.choices(self._words, k=max(0, n_tokens - begun))
        nearest_text, nearest_off = "", n_tokens
        for _ in range(_TRIES):
            text = "".join(pieces) if before else "".join(pieces).lstrip(" ")
            n_found = self._tokens.count(before + text, self._special)
            off = n_found - n_tokens
            if abs(off) < abs(nearest_off):
                nearest_text, nearest_off = text, off
            if off == 0:
                break
            n_words = round(abs(off) * len(pieces) / max(1, n_found - begun))
            if off > 0 and n_words > 1:
                del pieces[-n_words:]
            elif off > 0 and pieces:
                pieces[-1:] = [pieces[-1][:-1]] if len(pieces[-1]) > 2 else []  # part of a word may be what fits
            else:
                pieces += self.rng.choices(self._words, k=max(1, n_words))
        if not nearest_text:
            raise UserError(
                f"cannot make a text of {n_tokens} tokens", hint="Ask for more, or give texts: --dataset jsonl:FILE."
            )
        return nearest_text, n_tokens + nearest_off

    def traced(self, n_tokens: int, ids: Sequence[int], block_tokens: int) -> tuple[str, int]:
        """A text whose blocks of `block_tokens` words are the same wherever their ids are."""
        if not ids:
            return self.text(n_tokens)
        words = [word for block in ids for word in self._block(block, block_tokens)]
        text = "".join(words[:n_tokens])  # with its first space: a word without it may be two tokens
        return text, self._tokens.count(text, self._special)

    def _block(self, block: int, n_words: int) -> list[str]:
        if block not in self._blocks:
            if len(self._blocks) >= _MOST_BLOCKS:
                self._blocks.clear()
            self._blocks[block] = random.Random(f"{self._seed} {block}").choices(self._words, k=n_words)
        return self._blocks[block]

    def length(self, n_tokens: int, range_ratio: float) -> int:
        """As vLLM's --random-range-ratio: from n (1 - ratio) to n (1 + ratio), all alike."""
        if not range_ratio:
            return n_tokens
        return self.rng.randint(
            max(1, math.floor(n_tokens * (1 - range_ratio))), math.ceil(n_tokens * (1 + range_ratio))
        )


def _random(rest: str, wanted: Wanted, tokens: Callable[[], Tokens]) -> list[PlannedRequest]:
    options_of("random", rest, {})
    writer = Writer(tokens(), wanted.seed, special=not wanted.chat)
    requests = []
    for _ in range(wanted.n_requests):
        n_in = writer.length(wanted.input_tokens or INPUT_TOKENS, wanted.range_ratio)
        n_out = writer.length(wanted.output_tokens or OUTPUT_TOKENS, wanted.range_ratio)
        text, n_tokens = writer.text(n_in)
        requests.append(PlannedRequest(text, n_tokens, n_out, n_off=n_tokens - n_in))
    return requests


def _shared_prefix(rest: str, wanted: Wanted, tokens: Callable[[], Tokens]) -> list[PlannedRequest]:
    sizes = options_of("prefix", rest, PREFIX_SIZES)
    writer = Writer(tokens(), wanted.seed, special=not wanted.chat)
    beginnings = [writer.text(sizes["prefix"])[0] for _ in range(sizes["n"])]
    length = sizes["prefix"] + sizes["suffix"]
    requests = []
    for index in range(wanted.n_requests):
        before = beginnings[index % sizes["n"]]
        text, n_tokens = writer.text(length, before)
        n_out = wanted.output_tokens or OUTPUT_TOKENS
        requests.append(PlannedRequest(before + text, n_tokens, n_out, n_off=n_tokens - length))
    writer.rng.shuffle(requests)
    return requests


def _turns(rest: str, wanted: Wanted, tokens: Callable[[], Tokens]) -> list[PlannedRequest]:
    """Conversations: turn k holds the k-1 turns before it and waits for the answer to the last of them.

    The assistant's part is drawn beforehand, so that prompts are the same in every run.
    """
    n_turns = options_of("turns", rest, {"turns": 4, "sessions": 0, "first": 0})["turns"]
    sizes = options_of("turns", rest, {"turns": 4, "sessions": -(-wanted.n_requests // n_turns), "first": 0})
    n_in, n_out = wanted.input_tokens or 100, wanted.output_tokens or 100
    writer = Writer(tokens(), wanted.seed, special=False)
    conversations: list[list[dict[str, str]]] = [[] for _ in range(sizes["sessions"])]
    lengths, offs = [0] * sizes["sessions"], [0] * sizes["sessions"]
    requests: list[PlannedRequest] = []
    for turn in range(n_turns):
        for session, messages in enumerate(conversations):
            n_new = sizes["first"] if turn == 0 and sizes["first"] else n_in
            for role, n_asked in (("assistant", n_out if turn else 0), ("user", n_new)):
                if n_asked:
                    text, n_tokens = writer.text(n_asked)
                    messages.append({"role": role, "content": text})
                    lengths[session] += n_tokens
                    offs[session] += n_tokens - n_asked
            before = len(requests) - sizes["sessions"] if turn else None
            requests.append(PlannedRequest([*messages], lengths[session], n_out, before, n_off=offs[session]))
    return requests[: wanted.n_requests]


def _prompt(rest: str, wanted: Wanted, _: Callable[[], Tokens]) -> list[PlannedRequest]:
    if not rest:
        raise UserError("cannot use an empty prompt", hint='prompt:TEXT, such as "prompt:Singapore is a".')
    return [PlannedRequest(rest, None, wanted.output_tokens or 64)] * wanted.n_requests


_Shape = Callable[[str, Wanted, Callable[[], Tokens]], list[PlannedRequest]]
_SHAPES: dict[str, _Shape] = {
    "random": _random,
    "prefix": _shared_prefix,
    "turns": _turns,
    "sharegpt": files.sharegpt,
    "jsonl": files.jsonl,
    "replay": lambda rest, wanted, tokens: files.replay(
        rest, wanted, lambda: Writer(tokens(), wanted.seed, False).traced
    ),
    "prompt": _prompt,
}


def options_of(kind: str, text: str, defaults: Mapping[str, int]) -> dict[str, int]:
    """ "n=8,prefix=1000" over the defaults: whole numbers above 0.  Raises UserError."""
    sizes = dict(defaults)
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
        sizes[name] = int(value)
    return sizes


def _check(wanted: Wanted) -> None:
    if not 1 <= wanted.n_requests <= MOST_REQUESTS:
        raise UserError(f"cannot make {wanted.n_requests} requests", hint=f"From 1 to {MOST_REQUESTS:,}.")
    for name in ("input_tokens", "output_tokens"):
        value = getattr(wanted, name)
        if value is not None and not 1 <= value <= _MOST:
            raise UserError(f"cannot use {name} {value}", hint=f"From 1 to {_MOST:,}.")
