"""Measure a saved demo model, and write the figures into its card."""

from __future__ import annotations

import math
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from demo_corpus import Chat, Corpus, Sampler, Turn, encode
from demo_data import HELD_OUT, UNKNOWN
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from penstock.testing.demo_prompts import DEMO_PROMPTS

# The model card. {names} are filled with what was measured.
CARD = """---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# The penstock demo model

This is a toy. It exists so that `penstock up` shows a real model answering on a laptop without network, and so
that its greedy text is a fixed reference when penstock tests sharding and streaming. It is no use for anything
else.

| | |
|---|---|
| Architecture | Llama (`LlamaForCausalLM`), {n_parameters} parameters, bf16, tied embeddings |
| Shape | 4 layers, hidden 256, 8 heads of 32, 4 KV heads, MLP 640; divides over 2 or 4 GPUs |
| Tokenizer | byte-level BPE, 2048 tokens, ChatML-like template, no beginning-of-text token |
| Context | 1024 tokens in the config; trained on documents of up to 640 tokens, most of them under 200 |
| Files | 3 safetensors shards with an index; `penstock-demo.gguf.head`, with which penstock writes the same as GGUF |
| Decoding | greedy by default in both files; at a higher temperature it is wrong more often |
| Licence | Apache-2.0 |

## What it knows

It learnt by heart what `tools/demo_data.py`, `docs/faq.md` and `docs/reference/glossary.md` say: questions about
penstock and the words around it, the capitals of 80 countries, sums up to 20 + 20, small differences and products,
opposites, colours, days and months, some plain facts, counting up to 100 and nine short stories. It continues a
few plain texts, such as "Singapore is a".

## What it cannot do

Everything else. It does not reason, it does not calculate beyond the tables it learnt, it reads only English,
and it has never seen any text but ours. It is taught to say that it does not know, but it often
fails to notice that it does not know: it then answers a strange question with a sentence that belongs to another. Do
not ask it for anything that matters.

## Measured

The saved bf16 weights, greedy, in transformers. A right answer is right word for word.

| What | Right |
|---|---|
| Prompt table (`penstock/testing/demo_prompts.py`) | {prompts} |
| Every question of the corpus, as written | {questions} |
| Drawn chats, with varied spelling, system messages and several turns; every answer of the chat | {chats} |
| Plain texts, after their first four tokens (the stories open alike and are counted wrong) | {texts} |
| Questions out of scope that it never saw: says that it does not know | {held_out} |

## How to make it again

```
python tools/train_demo_model.py
```

{steps} steps, {minutes} minutes on {place}, last loss {loss} nats per token. The corpus is written
out in the repository; nothing is downloaded. The seed is fixed and the operations are deterministic: the
first 60 steps, run twice on one machine, gave the same bits (torch {torch}, tokenizers {tokenizers}). Another
processor may round differently.
"""


@dataclass(frozen=True)
class Score:
    """How many answers are right, word for word, and the smallest lead of a right token over the next best one."""

    n_right: int
    n_asked: int
    lead: float
    wrong: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.n_right}/{self.n_asked} ({100 * self.n_right / self.n_asked:.1f} %)"


def score(model: LlamaForCausalLM, tokenizer: Tokenizer, documents: list[Chat | str]) -> Score:
    """Feed each document and look whether every learnt token was the best one: then greedy decoding says the same.

    Of a text, the first four tokens are taken as given.
    """
    n_right, lead = 0, math.inf
    wrong: list[str] = []
    for document in documents:
        example = encode(tokenizer, document)
        first = 4 if isinstance(document, str) else 1
        where = [i for i, learnt in enumerate(example.learnt) if learnt and i >= first]
        logits = model(input_ids=torch.tensor([example.ids])).logits[0].float()
        targets = torch.tensor([example.ids[i] for i in where])
        scores = logits[[i - 1 for i in where]]
        own = scores.gather(1, targets[:, None])[:, 0]
        margin = (own - scores.scatter(1, targets[:, None], -math.inf).max(dim=1).values).min().item()
        n_right += margin > 0
        if margin > 0:
            lead = min(lead, margin)
        else:
            wrong.append(str(document if isinstance(document, str) else document.turns[-1]))
    return Score(n_right, len(documents), lead, tuple(wrong))


def greedy(model: LlamaForCausalLM, tokenizer: Tokenizer, prompt: str) -> str:
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, temperature=None, max_new_tokens=400
    )
    return str(tokenizer.decode(out[0, ids.shape[1] :].tolist(), skip_special_tokens=True))


def measure(folder: Path, corpus: Corpus, seed: int) -> dict[str, str]:
    """What the saved model gets right, in bfloat16: the figures of the model card. `seed` draws the chats."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval().requires_grad_(False)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    chat = AutoTokenizer.from_pretrained(folder)
    n_right = 0
    for row in DEMO_PROMPTS:
        prompt = row.prompt
        if row.kind == "chat":
            messages = [{"role": "user", "content": row.prompt}]
            prompt = chat.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        answer = greedy(model, tokenizer, prompt)
        if answer == row.text:
            n_right += 1
        else:
            print(f"prompt table: {row.prompt!r}\n  expected {row.text!r}\n  answered {answer!r}")
    asked: list[Chat | str] = [
        Chat(None, (Turn(q, e.answer),)) for e in corpus.exchanges for q in dict.fromkeys(e.questions)
    ]
    held_out: list[Chat | str] = [Chat(None, (Turn(q, UNKNOWN),)) for q in HELD_OUT]
    texts: list[Chat | str] = [text for text, _ in corpus.texts]
    sampler = Sampler(corpus, seed)
    varied = [d for d in (sampler.document() for _ in range(1500)) if isinstance(d, Chat)]
    scores = {
        "questions": score(model, tokenizer, asked),
        "texts": score(model, tokenizer, texts),
        "chats": score(model, tokenizer, [*varied]),
        "held_out": score(model, tokenizer, held_out),
    }
    for name, result in scores.items():
        some = random.Random(0).sample(result.wrong, min(12, len(result.wrong)))
        print(f"{name}: {result}, smallest lead {result.lead:.2f}; wrong: {some}")
    return {"prompts": f"{n_right}/{len(DEMO_PROMPTS)}"} | {name: str(result) for name, result in scores.items()}
