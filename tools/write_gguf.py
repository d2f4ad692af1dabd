"""Write a Llama checkpoint and its tokenizer as one GGUF file that llama.cpp reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import torch

# Hugging Face name inside a layer: GGUF name.
# https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/tensor_mapping.py
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_gguf(
    path: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], folder: Path, facts: dict[str, str]
) -> None:
    """Write `tensors` (Hugging Face names) with the tokenizer of `folder`. Matrices become bf16, norms f32.

    `facts` are the name, description and licence for the file's header. Without an "lm_head.weight" llama.cpp uses the
    token embedding as output, which is what tied embeddings mean.
    """
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in facts.items():
        writer.add_string(f"general.{key}", value)
    n_heads, n_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(n_heads)
    writer.add_head_count_kv(n_kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    # llama-server takes its default temperature from here; a request may still ask for another.
    writer.add_float32("general.sampling.temp", 0.0)
    add_tokenizer(writer, folder)
    for name, tensor in tensors.items():
        if name.endswith("q_proj.weight"):
            tensor = permute_for_rope(tensor, n_heads)
        elif name.endswith("k_proj.weight"):
            tensor = permute_for_rope(tensor, n_kv_heads)
        add_tensor(writer, gguf_name(name), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    """model.layers.2.mlp.up_proj.weight -> blk.2.ffn_up.weight"""
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


def permute_for_rope(weight: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Reorder the rows of each head from halves (a0 a1 .. b0 b1 ..) to pairs (a0 b0 a1 b1 ..).

    Hugging Face rotates the first half of a head against the second; llama.cpp rotates neighbours. See
    `LlamaModel.permute` in llama.cpp's convert_hf_to_gguf.py.
    """
    rows, columns = weight.shape
    return weight.reshape(n_heads, 2, rows // n_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def add_tensor(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor) -> None:
    if tensor.ndim == 1:
        writer.add_tensor(name, tensor.to(torch.float32).numpy())
        return
    raw = tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
    writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    """Vocabulary, merges, special tokens and chat template, as the two tokenizer files of `folder` have them."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    special = {token["content"] for token in tokenizer["added_tokens"] if token["special"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    assert [vocabulary[token] for token in tokens] == list(range(len(tokens))), "token ids have a gap"
    writer.add_tokenizer_model("gpt2")
    # llama.cpp's name for the regular expression that tokenizers' ByteLevel(use_regex=True) splits with.
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in tokens])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(vocabulary[settings["eos_token"]])
    writer.add_eot_token_id(vocabulary[settings["eos_token"]])
    writer.add_pad_token_id(vocabulary[settings["pad_token"]])
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    writer.add_chat_template(settings["chat_template"])
