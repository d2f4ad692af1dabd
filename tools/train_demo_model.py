"""Train the demo model from scratch and write it to penstock/models/demo_model, as safetensors and as GGUF.

    python tools/train_demo_model.py                  # about 12 minutes on 2 cores, a minute on a GPU
    python tools/train_demo_model.py --steps 300      # a quick, worse one
    python tools/train_demo_model.py --check          # only measure the model that is there

The data come from demo_data.py and docs/. The seed, the thread count and the operations are fixed. Measured:
the first 60 steps, run twice on one machine, gave the same bits. Another processor or another version may round
differently and write other weights.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # what deterministic operations need on a GPU

import tokenizers
import torch
from demo_check import CARD, measure
from demo_corpus import END, PAD, START, Corpus, Example, Sampler, build_corpus, encode
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM
from write_gguf import write_gguf_head

REPO = Path(__file__).resolve().parent.parent
OUT = REPO / "penstock" / "models" / "demo_model"
N_SHARDS = 3
SEED = 20
IGNORED = -100  # the label that cross_entropy skips
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",  # the name before transformers 5
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 2048,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-05,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "use_cache": True,
    "bos_token_id": None,
}


@dataclass(frozen=True)
class Recipe:
    steps: int = 2500
    batch_tokens: int = 2560
    max_tokens: int = 640
    peak_rate: float = 3e-3
    warmup_steps: int = 100
    threads: int = 2


def train_tokenizer(corpus: Corpus) -> Tokenizer:
    """A byte-level BPE tokenizer; it can spell any text, and it splits as GPT-2 does, which llama.cpp knows."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    lines = [line for e in corpus.exchanges for line in (*e.questions, e.answer, e.answer)]
    lines += [text for text, _ in corpus.texts]
    lines += [line.lower() for line in lines]
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    if tokenizer.get_vocab_size() != CONFIG["vocab_size"]:
        raise ValueError(f"the corpus gives only {tokenizer.get_vocab_size()} tokens")
    return tokenizer


def batches(tokenizer: Tokenizer, sampler: Sampler, recipe: Recipe) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless batches of documents of about the same length: ids and labels, shape (documents, tokens).

    Every document starts at position 0, as it will when served. Padding is on the right, where a causal model
    cannot see it, so no mask is needed.
    """
    while True:
        pool = [encode(tokenizer, sampler.document()) for _ in range(1024)]
        pool = sorted((e for e in pool if len(e.ids) <= recipe.max_tokens), key=lambda e: len(e.ids))
        groups: list[list[Example]] = [[]]
        for example in pool:
            if (len(groups[-1]) + 1) * len(example.ids) > recipe.batch_tokens:
                groups.append([])
            groups[-1].append(example)
        sampler.rng.shuffle(groups)
        yield from (pad(group) for group in groups if group)


def pad(group: list[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(e.ids) for e in group)
    ids = torch.zeros(len(group), width, dtype=torch.long)
    labels = torch.full((len(group), width), IGNORED)
    for row, example in enumerate(group):
        n = len(example.ids)
        ids[row, :n] = torch.tensor(example.ids)
        target = [i if learnt else IGNORED for i, learnt in zip(example.ids, example.learnt, strict=True)]
        labels[row, : n - 1] = torch.tensor(target[1:])
    return ids, labels


def rate_at(step: int, recipe: Recipe) -> float:
    """Linear warm-up, then a cosine down to zero."""
    if step < recipe.warmup_steps:
        return recipe.peak_rate * (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
    return recipe.peak_rate * 0.5 * (1 + math.cos(math.pi * done))


def train(tokenizer: Tokenizer, corpus: Corpus, recipe: Recipe) -> tuple[LlamaForCausalLM, float]:
    """The trained model (float32) and its mean loss over the last 100 steps, in nats per learnt token."""
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG | {"dtype": "float32", "torch_dtype": "float32", "use_cache": False}))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.train().to(device)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.peak_rate, betas=(0.9, 0.97), fused=True)
    source = batches(tokenizer, Sampler(corpus, SEED), recipe)
    losses: list[float] = []
    n_tokens, start = 0, time.monotonic()
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, recipe)
        ids, labels = (tensor.to(device) for tensor in next(source))
        # bfloat16 products are nearly twice as fast here, and the model learns to live with its engines' rounding.
        with torch.autocast(device, dtype=torch.bfloat16):
            hidden = model.model(input_ids=ids).last_hidden_state
            wanted = labels != IGNORED
            logits = model.lm_head(hidden[wanted])
        loss = cross_entropy(logits.float(), labels[wanted])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        n_tokens += ids.numel()
        if step % 100 == 99:
            mean, spent = sum(losses[-100:]) / 100, time.monotonic() - start
            print(
                f"step {step + 1}/{recipe.steps}  loss {mean:.4f}  {n_tokens / spent:.0f} tokens/s  {spent:.0f} s",
                flush=True,
            )
    return model.cpu(), sum(losses[-100:]) / len(losses[-100:])


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONFIG["max_position_embeddings"],
        "bos_token": None,
        "eos_token": END,
        "pad_token": PAD,
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", settings)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_shards(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Cut the tensors, in order, into N_SHARDS files of about the same size, with the index that the Hub uses."""
    total = sum(t.nbytes for t in tensors.values())
    shards: list[dict[str, torch.Tensor]] = [{} for _ in range(N_SHARDS)]
    done = 0
    for name, tensor in tensors.items():
        shards[min(N_SHARDS - 1, done * N_SHARDS // total)][name] = tensor
        done += tensor.nbytes
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{N_SHARDS:05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)  # safetensors writes files that only their owner can read
        where |= dict.fromkeys(shard, file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})


def write_model(tokenizer: Tokenizer, model: LlamaForCausalLM, folder: Path) -> None:
    """Write both forms of the model into a new folder."""
    folder.mkdir(parents=True)
    end_id, pad_id = tokenizer.token_to_id(END), tokenizer.token_to_id(PAD)
    config = CONFIG | {"eos_token_id": end_id, "pad_token_id": pad_id}
    write_json(folder / "config.json", config)
    # vLLM takes its default temperature from here; the toy is only right when it takes its best token.
    greedy = {"do_sample": False, "temperature": 0.0, "eos_token_id": end_id, "pad_token_id": pad_id}
    write_json(folder / "generation_config.json", greedy)
    write_tokenizer(tokenizer, folder)
    tensors = {
        n: t.detach().to(torch.bfloat16).contiguous() for n, t in model.state_dict().items() if n != "lm_head.weight"
    }
    write_shards(tensors, folder)
    facts = {
        "name": "penstock demo",
        "description": "A toy of three million parameters that shows that penstock works.",
        "license": "apache-2.0",
    }
    write_gguf_head(folder / "penstock-demo.gguf.head", tensors, config, folder, facts)


def move_into_place(folder: Path) -> None:
    """Swap the finished folder with the one that is there, so that no reader sees half a model."""
    old = folder.with_name(folder.name + ".old")
    if OUT.exists():
        OUT.rename(old)
    folder.rename(OUT)
    shutil.rmtree(old, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--threads", type=int, default=Recipe.threads)
    parser.add_argument("--check", action="store_true", help="train nothing; measure the model that is there")
    options = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(options.threads)
    corpus = build_corpus(REPO / "docs")
    if options.check:
        print(measure(OUT, corpus, SEED + 1))
        return
    recipe = Recipe(steps=options.steps, threads=options.threads)
    tokenizer = train_tokenizer(corpus)
    start = time.monotonic()
    model, loss = train(tokenizer, corpus, recipe)
    minutes = (time.monotonic() - start) / 60
    folder = OUT.with_name(f".{OUT.name}.{os.getpid()}")
    write_model(tokenizer, model, folder)
    facts = measure(folder, corpus, SEED + 1) | {
        "n_parameters": f"{sum(p.numel() for p in model.parameters()):,}",
        "steps": str(recipe.steps),
        "minutes": f"{minutes:.0f}",
        "place": torch.cuda.get_device_name() if torch.cuda.is_available() else f"{recipe.threads} threads",
        "loss": f"{loss:.4f}",
        "torch": torch.__version__,
        "tokenizers": tokenizers.__version__,
    }
    (folder / "README.md").write_text(CARD.format(**facts), encoding="utf-8")
    move_into_place(folder)


if __name__ == "__main__":
    main()
