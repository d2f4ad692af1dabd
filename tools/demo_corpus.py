"""Turn the tables of demo_data.py and two pages of docs/ into training documents.

An `Exchange` is one answer with the questions that lead to it. A text is plain text to continue. `Sampler` draws one
training document at a time: a chat of one or more exchanges, or a text. Questions are varied as they are drawn (case,
final mark, a polite opening), so that a rule is learnt rather than one spelling.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from demo_data import (
    COLOURS,
    CONFUSED,
    COUNTRIES,
    COUNTRY_TEXTS,
    DAYS,
    FACTS,
    FAQ_ALSO,
    MONTHS,
    NUMBERS,
    OPENINGS,
    OPPOSITES,
    OTHER_TOPICS,
    PENSTOCK_TEXT,
    SOUNDS,
    STORIES,
    SYSTEMS,
    TALK,
    TOO_BIG,
    TOY,
    UNKNOWN,
    UNKNOWN_FILL,
    UNKNOWN_TEMPLATES,
    UNTAUGHT,
    VERBS,
)
from tokenizers import Tokenizer

END, START, PAD = "<|im_end|>", "<|im_start|>", "<|endoftext|>"


@dataclass(frozen=True)
class Exchange:
    """One answer, the questions that lead to it, and how often it is drawn compared with others."""

    questions: tuple[str, ...]
    answer: str
    weight: float = 1.0


class Turn(NamedTuple):
    question: str
    answer: str


@dataclass(frozen=True)
class Chat:
    system: str | None
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Corpus:
    """Everything the model learns. `capitals` maps a country to its answer, for follow-up questions."""

    exchanges: tuple[Exchange, ...]
    texts: tuple[tuple[str, float], ...]
    capitals: dict[str, str]


def build_corpus(docs: Path) -> Corpus:
    """All exchanges and texts. Raises ValueError if one question has two answers."""
    pages = [
        *read_page(docs / "faq.md", faq_questions),
        *read_page(docs / "reference" / "glossary.md", glossary_questions),
    ]
    facts = list(parse_exchanges(FACTS))
    talk = TALK.replace("{toy}", TOY).replace("{untaught}", UNTAUGHT).replace("{confused}", CONFUSED)
    exchanges = [
        *(Exchange(e.questions, e.answer, 2.0) for e in pages),
        *(Exchange(e.questions, e.answer, 3.0) for e in parse_exchanges(talk)),
        *facts,
        *verb_exchanges(),
        *country_exchanges(),
        *pair_exchanges(),
        *order_exchanges(),
        *arithmetic_exchanges(),
        *count_exchanges(),
        *story_exchanges(),
    ]
    refuse_contradictions(exchanges)
    countries = parse_countries()
    texts = [
        *((line, 4.0) for line in COUNTRY_TEXTS.strip().splitlines()),
        *((short_description(*row), 0.5) for row in countries if upper_first(row[0]) not in described_countries()),
        *((f"The capital of {c} is {capital}.", 1.0) for c, capital, _ in countries),
        *((e.answer, 1.5) for e in [*facts, *pages, *verb_exchanges()]),
        *((story, 3.0) for story in STORIES.values()),
        *((f"{a} + {b} = {a + b}", 0.3) for a in range(21) for b in range(21)),
        *((f"The opposite of {a} is {b}.", 1.0) for a, b in pairs(OPPOSITES)),
        (", ".join(map(str, range(1, 101))) + ".", 4.0),
        (PENSTOCK_TEXT, 4.0),
    ]  # fmt: skip
    return Corpus(
        tuple(exchanges), tuple(texts), {c: f"The capital of {c} is {capital}." for c, capital, _ in countries}
    )


def parse_exchanges(table: str) -> Iterator[Exchange]:
    for line in table.strip().splitlines():
        questions, answer = line.split(" => ")
        yield Exchange(tuple(q.strip() for q in questions.split(" | ")), answer)


def parse_countries() -> list[tuple[str, str, str]]:
    rows = (row.strip().split(":") for row in COUNTRIES.replace("\n", " ").split(";"))
    return [(country, capital, region) for country, capital, region in rows]


def described_countries() -> dict[str, str]:
    """Countries with a description of their own: "Singapore" -> "Singapore is a small island country ..."."""
    return {line.split(" is ")[0]: line for line in COUNTRY_TEXTS.strip().splitlines()}


def short_description(country: str, capital: str, region: str) -> str:
    return f"{upper_first(country)} is a country in {region}. Its capital is {capital}."


def pairs(table: str) -> list[tuple[str, str]]:
    return [(a, b) for a, b in (item.strip().split(":") for item in table.split(","))]


def upper_first(text: str) -> str:
    return text[0].upper() + text[1:]


def read_page(path: Path, questions: Callable[[str], tuple[str, ...]]) -> Iterator[Exchange]:
    """One exchange per "###" heading of a Markdown page: the heading and its first paragraph, as plain text."""
    for section in re.split(r"^### ", path.read_text(encoding="utf-8"), flags=re.M)[1:]:
        heading, rest = section.split("\n", 1)
        paragraph = rest.strip().split("\n\n")[0]
        yield Exchange(questions(heading.strip()), " ".join(paragraph.replace("`", "").split()))


def faq_questions(heading: str) -> tuple[str, ...]:
    question = heading.replace("`", "")
    return (question, *(q for q in FAQ_ALSO.get(question, "").split(" | ") if q))


def glossary_questions(heading: str) -> tuple[str, ...]:
    names = [name for name in re.split(r" \(|\)", heading) if name]
    countable = names[0] in {
        "deployment", "plan", "target", "node", "replica", "run", "engine", "gateway", "lease", "ledger", "preflight",
        "dry run", "orphan", "workload", "cold start", "token", "shard", "chat template", "mixture of experts", "rank",
    }  # fmt: skip
    article = ("an " if names[0][0] in "aeiou" else "a ") if countable else ""
    out: list[str] = []
    for name in names:
        out += [f"What is {article}{name}?", f"What does {name} mean?", f"Define {name}.", f"Explain {name}."]
        out += [f"Tell me about {name}.", f"What is {name}?"]
    return tuple(dict.fromkeys(out))


def verb_exchanges() -> Iterator[Exchange]:
    for verb, answer in VERBS.items():
        name = f"penstock {verb}"
        yield Exchange(
            (f"What does {name} do?", f"What is {name}?", f"Explain {name}.", f"When do I use {name}?",
             f"What is {name} for?", f"Tell me about {name}.", f"What does the verb {verb} do?"),
            answer, 2.0,
        )  # fmt: skip


def country_exchanges() -> Iterator[Exchange]:
    described = described_countries()
    for country, capital, region in parse_countries():
        name = upper_first(country)
        answer = f"The capital of {country} is {capital}."
        yield Exchange(
            (
                f"What is the capital of {country}?",
                f"What is the capital of {country}?",  # the usual question is drawn twice as often
                f"What's the capital of {country}?",
                f"What is the capital city of {country}?",
                f"Which city is the capital of {country}?",
                f"Capital of {country}?",
                f"Tell me the capital of {country}.",
                f"Name the capital of {country}.",
                f"{name} capital?",
                f"Do you know the capital of {country}?",
            ),
            answer,
            2.0,
        )
        yield Exchange(
            (f"Which country has the capital {capital}?", f"{capital} is the capital of which country?",
             f"What country is {capital} the capital of?"),
            f"{capital} is the capital of {country}.", 0.7,
        )  # fmt: skip
        text = described.get(name, short_description(country, capital, region))
        yield Exchange(
            (
                f"Tell me about {country}.",
                f"What is {country}?",
                f"Describe {country}.",
                f"What do you know about {country}?",
            ),
            text,
            0.7,
        )
        if capital != country:
            asks = (f"Where is {capital}?", f"In which country is {capital}?", f"What country is {capital} in?")
            yield Exchange(asks, f"{capital} is in {country}.", 0.7)
        yield Exchange((f"Where is {country}?", f"Where can I find {country}?"), f"{name} is in {region}.", 0.5)


def pair_exchanges() -> Iterator[Exchange]:
    for thing, colour in pairs(COLOURS):
        article = "an" if thing[0] in "aeiou" else "a" if thing not in {"sky", "sun", "sea", "night"} else "the"
        noun = (
            thing if thing in {"grass", "snow", "coal", "blood", "milk", "chocolate", "sand"} else f"{article} {thing}"
        )
        questions = (f"What colour is {noun}?", f"What color is {noun}?", f"Which colour is {noun}?")
        yield Exchange(questions, f"{upper_first(noun)} is {colour}.")
    for word, other in pairs(OPPOSITES):
        questions = (f"What is the opposite of {word}?", f"Opposite of {word}?", f"Tell me the opposite of {word}.")
        yield Exchange(questions, f"The opposite of {word} is {other}.")
    for animal, sound in pairs(SOUNDS):
        article = "an" if animal[0] in "aeiou" else "a"
        asks = (f"What sound does {article} {animal} make?", f"What does {article} {animal} say?")
        yield Exchange(asks, f"{upper_first(article)} {animal} says {sound}.")


def order_exchanges() -> Iterator[Exchange]:
    for table, kind in ((DAYS, "day"), (MONTHS, "month")):
        names = table.split()
        for i, name in enumerate(names):
            after, before = names[(i + 1) % len(names)], names[i - 1]
            yield Exchange(
                (f"Which {kind} comes after {name}?", f"What comes after {name}?"), f"{after} comes after {name}."
            )
            yield Exchange(
                (f"Which {kind} comes before {name}?", f"What comes before {name}?"), f"{before} comes before {name}."
            )


def arithmetic_exchanges() -> Iterator[Exchange]:
    words = NUMBERS.split()
    for a in range(21):
        for b in range(21):
            questions = [
                f"What is {a} + {b}?", f"What is {a} + {b}?", f"{a} + {b}", f"{a}+{b}", f"{a} + {b} =",
                f"{a} + {b} = ?", f"What is {a} plus {b}?", f"How much is {a} plus {b}?",
                f"How much is {a} + {b}?", f"Calculate {a} + {b}.", f"Add {a} and {b}.",
            ]  # fmt: skip
            if a <= 10 and b <= 10:
                questions.append(f"What is {words[a]} plus {words[b]}?")
            yield Exchange(tuple(questions), f"{a} + {b} = {a + b}.")
            if b <= a:
                questions = [f"What is {a} - {b}?", f"{a} - {b}", f"What is {a} minus {b}?", f"How much is {a} - {b}?"]
                yield Exchange(tuple(questions), f"{a} - {b} = {a - b}.")
            if a <= 12 and b <= 12:
                questions = [f"What is {a} * {b}?", f"{a} * {b}", f"What is {a} times {b}?", f"What is {a} x {b}?"]
                yield Exchange(tuple(questions), f"{a} * {b} = {a * b}.")


def count_exchanges() -> Iterator[Exchange]:
    for n in (*range(2, 21), 25, 30, 40, 50, 60, 70, 80, 90, 100):
        up = ", ".join(map(str, range(1, n + 1)))
        yield Exchange(
            (f"Count from 1 to {n}.", f"Count to {n}.", f"Can you count to {n}?"), f"{up}.", 1.5 if n <= 20 else 4.0
        )
        if n <= 20:
            down = ", ".join(map(str, range(n, 0, -1)))
            yield Exchange(
                (f"Count down from {n}.", f"Count from {n} to 1.", f"Count backwards from {n}."), f"{down}.", 1.5
            )
    even = ", ".join(map(str, range(2, 21, 2)))
    yield Exchange(
        ("Count by twos to 20.", "Name the even numbers up to 20.", "List the even numbers up to 20."), f"{even}."
    )


def story_exchanges() -> Iterator[Exchange]:
    names = [f"the {topic}" if topic == "moon" else f"a {topic}" for topic in STORIES]
    known = ", ".join(names[:-1]) + " or " + names[-1]
    for name, story in zip(names, STORIES.values(), strict=True):
        asks = ("Tell me a story about", "Tell a story about", "Write a story about", "Write a short story about")
        yield Exchange(tuple(f"{ask} {name}." for ask in asks), story, 2.5)
    yield Exchange(
        ("Tell me a story.", "Do you know a story?", "Tell me a short story.", "Tell a story."), STORIES["cat"], 2.0
    )
    questions = tuple(f"Tell me a story about {o.strip()}." for o in OTHER_TOPICS.split(";"))
    yield Exchange(questions, f"I know only a few stories. Ask me for one about {known}.", 2.0)


def refuse_contradictions(exchanges: list[Exchange]) -> None:
    answers: dict[str, str] = {}
    for exchange in exchanges:
        for question in exchange.questions:
            key = normalise(question)
            if answers.setdefault(key, exchange.answer) != exchange.answer:
                raise ValueError(f'two answers to "{question}": "{answers[key]}" and "{exchange.answer}"')


def normalise(question: str) -> str:
    return question.lower().rstrip("?.! ")


def vary(question: str, rng: random.Random) -> str:
    """The same question as another person might type it."""
    draw = rng.random()
    if draw < 0.55:
        return question
    text = question
    if draw < 0.75 and text[-1] in "?.":
        text = text[:-1]
    if draw > 0.65:
        text = text.lower()
    if draw > 0.95:
        text = question.upper() if draw < 0.97 else question
    if draw > 0.9 and draw < 0.95:
        text = rng.choice(OPENINGS) + question
    return text


class Sampler:
    """Draws training documents from a corpus. The same seed gives the same documents."""

    def __init__(self, corpus: Corpus, seed: int) -> None:
        self.rng = random.Random(seed)
        self.corpus = corpus
        self.answers = {normalise(q): e.answer for e in corpus.exchanges for q in e.questions}
        self.exchange_weights = list(_cumulate(e.weight for e in corpus.exchanges))
        self.text_weights = list(_cumulate(weight for _, weight in corpus.texts))
        self.templates = [t.strip() for line in UNKNOWN_TEMPLATES.strip().splitlines() for t in line.split(" | ")]
        self.fill = {key: [v.strip() for v in values.split(";")] for key, values in UNKNOWN_FILL.items()}

    def document(self) -> Chat | str:
        """A text (15 %), a chat of one exchange (50 %), or a longer chat."""
        draw = self.rng.random()
        if draw < 0.15:
            return self.rng.choices(self.corpus.texts, cum_weights=self.text_weights)[0][0]
        n_turns = 1 if draw < 0.65 else self.rng.choice((2, 2, 2, 3, 4, 5, 6))
        turns: list[Turn] = []
        while len(turns) < n_turns:
            turns.extend(self.turns())
        system = self.rng.choice(SYSTEMS) if self.rng.random() < 0.2 else None
        return Chat(system, tuple(turns))

    def turns(self) -> list[Turn]:
        draw = self.rng.random()
        if draw < 0.13:
            return [Turn(vary(self.unknown_question(), self.rng), UNKNOWN)]
        if draw < 0.15:
            a, b = self.rng.randrange(21, 1000), self.rng.randrange(1, 1000)
            form = self.rng.choice(
                ("What is {} + {}?", "{} + {}", "How much is {} plus {}?", "What is {} * {}?", "What is {} - {}?")
            )
            return [Turn(form.format(*self.rng.sample((a, b), 2)), TOO_BIG)]
        if draw < 0.17:
            first, second = self.rng.sample(sorted(self.corpus.capitals), 2)
            follow = self.rng.choice(("And of {}?", "And {}?", "What about {}?", "And the capital of {}?"))
            return [
                Turn(vary(f"What is the capital of {first}?", self.rng), self.corpus.capitals[first]),
                Turn(vary(follow.format(second), self.rng), self.corpus.capitals[second]),
            ]
        exchange = self.rng.choices(self.corpus.exchanges, cum_weights=self.exchange_weights)[0]
        return [Turn(vary(self.rng.choice(exchange.questions), self.rng), exchange.answer)]

    def unknown_question(self) -> str:
        """A question out of scope; never one that the corpus answers."""
        for _ in range(100):
            template = self.rng.choice(self.templates)
            values = {key: self.rng.choice(fill) for key, fill in self.fill.items()}
            values |= {"n": str(self.rng.randrange(2, 500)), "m": str(self.rng.randrange(2, 50))}
            question = template.format(**values)
            if normalise(question) not in self.answers:
                return question
        raise AssertionError("every unknown question has an answer")


@dataclass(frozen=True)
class Example:
    """Token ids of one document and, for each, whether the model must learn to say it."""

    ids: list[int]
    learnt: list[bool]


def encode(tokenizer: Tokenizer, document: Chat | str) -> Example:
    """A text is learnt whole; of a chat only the answers are. Both end with the end-of-turn token."""
    if isinstance(document, str):
        ids: list[int] = tokenizer.encode(document + END).ids
        return Example(ids, [True] * len(ids))
    example = Example([], [])

    def add(text: str, learnt: bool) -> None:
        ids = tokenizer.encode(text).ids
        example.ids.extend(ids)
        example.learnt.extend([learnt] * len(ids))

    if document.system is not None:
        add(f"{START}system\n{document.system}{END}\n", False)
    for turn in document.turns:
        add(f"{START}user\n{turn.question}{END}\n{START}assistant\n", False)
        add(turn.answer + END, True)
        add("\n", False)
    return example


def _cumulate(weights: Iterator[float]) -> Iterator[float]:
    total = 0.0
    for weight in weights:
        total += weight
        yield total
