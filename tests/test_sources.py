"""What a user types as a model's source, and which files of it an engine needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import UserError
from penstock.models import sources
from penstock.models.sources import Source


def test_a_source_is_read_from_what_a_user_types(tmp_path: Path) -> None:
    for text, source in (
        ("Qwen/Qwen3-0.6B", Source("hub", "Qwen/Qwen3-0.6B")),
        ("hf://Qwen/Qwen3-0.6B@v1.0", Source("hub", "Qwen/Qwen3-0.6B", "v1.0")),
        ("ms://Qwen/Qwen3-0.6B", Source("modelscope", "Qwen/Qwen3-0.6B")),
        ("org/name:Q4_K_M", Source("hub", "org/name", None, "Q4_K_M")),
        ("hf://org/name@abc/q4/m.gguf", Source("hub", "org/name", "abc", "q4/m.gguf")),
        ("s3://bucket/a/b/", Source("store", "s3://bucket/a/b")),
        (str(tmp_path), Source("folder", str(tmp_path))),
        (f"file://{tmp_path}", Source("folder", str(tmp_path))),
    ):
        assert sources.parse(text) == source
    assert sources.parse("org/name@main", "v2").revision == "v2"
    for text in (f"{tmp_path}/none", f"file://{tmp_path}/none", "name", "org/../name", "http://host/x", "a/b/../../c"):
        with pytest.raises(UserError):
            sources.parse(text)


def test_the_weights_are_taken_once_or_one_quantisation_and_copies_of_them_are_left() -> None:
    names = ["config.json", "tokenizer.model", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    others = ["original/consolidated.00.pth", "original/params.json", "consolidated.safetensors", "pytorch_model.bin"]
    others += ["README.md", "onnx/model.onnx", ".gitattributes", "modeling_x.py", "x-Q4_K_M.gguf"]
    assert sources.choose("m", [*names, *others]) == sorted(names)
    assert "modeling_x.py" in sources.choose("m", [*names, *others], with_code=True)
    of_mistral = ["consolidated.safetensors", "params.json"]
    assert sources.choose("m", of_mistral) == of_mistral
    names = ["m-Q4_K_M.gguf", "m-Q8_0.gguf", "big/m-F16-00001-of-00002.gguf", "big/m-F16-00002-of-00002.gguf"]
    for wanted, taken in ((None, names[:1]), ("q8_0", names[1:2]), ("big/m-F16-00001-of-00002.gguf", names[2:])):
        assert sources.choose("m", names, wanted) == taken
    with pytest.raises(UserError, match='no GGUF file "q5"') as caught:
        sources.choose("m", names, "q5")
    assert "m-Q4_K_M.gguf, m-Q8_0.gguf" in str(caught.value.detail)


def test_pickled_weights_are_refused_unless_they_are_allowed() -> None:
    names = ["config.json", "pytorch_model.bin"]
    with pytest.raises(UserError, match="no file of weights") as caught:
        sources.choose("org/name", names)
    assert "can run code" in str(caught.value.detail) and "cache.allow_pickle" in str(caught.value.hint)
    assert sources.choose("org/name", names, allow_pickle=True) == names
    with pytest.raises(UserError, match="no file of weights") as caught:
        sources.choose("org/name", ["README.md"])
    assert caught.value.detail == "It has README.md."


def test_a_folder_with_a_link_out_of_it_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a.safetensors").write_bytes(b"abc")
    assert sources.resolve(sources.parse(str(folder))).n_bytes == 3
    (tmp_path / "secret.json").touch()
    (folder / "b.json").symlink_to("../secret.json")
    with pytest.raises(UserError, match="it is a link out of"):
        sources.resolve(sources.parse(str(folder)))
