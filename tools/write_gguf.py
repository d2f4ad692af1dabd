"""Write the header of a Llama checkpoint and its tokenizer as GGUF; `penstock.models.demo` adds the tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import torch

from penstock.models.files import read_header, wanted_shards

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


def write_gguf_head(
    path: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], folder: Path, facts: dict[str, str]
) -> None:
    """Write the header of a file with the tokenizer of `folder`, and with `tensors` (Hugging Face names) in the order
    of its safetensors files. Matrices are bf16, norms f32.

    `facts` are the name, description and licence for the file's header. Without an "lm_head.weight" llama.cpp uses the
    token embedding as output, which is what tied embeddings mean.
    """
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in facts.items():
        writer.add_string(f"general.{key}", value)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    # llama-server takes its default temperature from here; a request may still ask for another.
    writer.add_float32("general.sampling.temp", 0.0)
    add_tokenizer(writer, folder)
    for shard in wanted_shards(folder):
        for stored in read_header(folder / shard).tensors:
            add_tensor(writer, gguf_name(stored.name), tensors[stored.name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("ab") as stream:
        stream.write(b"\0" * (-stream.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))


def gguf_name(name: str) -> str:
    """model.layers.2.mlp.up_proj.weight -> blk.2.ffn_up.weight"""
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


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
