"""What vLLM refuses at start whatever the memory, and configs that no model has: told with their numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_shapes import solved

from penstock.errors import PenstockError, UserError
from penstock.models import catalog


@pytest.mark.parametrize(
    ("model", "gpu", "asked", "words"),
    [
        ("llama-3.1-8b", "v100-sxm2-32", {"dtype": "bfloat16"}, "needs compute capability 8.0, v100-sxm2-32 has 7.0"),
        ("llama-3.1-8b", "t4", {"dtype": "bfloat16"}, "use --dtype half"),
        ("gemma-2-9b", "h100-sxm", {"dtype": "half"}, "vLLM refuses float16 for gemma2"),
        ("qwen3-0.6b", "t4", {"kv_cache_dtype": "fp8"}, "a KV cache in fp8 needs compute capability 8.0, t4 has 7.5"),
        ("deepseek-v2-lite", "a100-sxm4-80", {"kv_cache_dtype": "fp8"}, "needs compute capability 8.9"),
        ("gpt-oss-20b", "t4", {"gpus_per_node": 4}, "weights in mxfp4 need compute capability 8.0, t4 has 7.5"),
        ("qwen3-32b-fp8", "v100-sxm2-32", {"gpus_per_node": 4}, "weights in fp8-block need compute capability 7.5"),
        ("llama-3.1-8b", "h100-sxm", {"quantization": "bitsandbytes"}, "does not read bnb-nf4 weights"),
        ("llama-3.1-8b", "h100-sxm", {"block_size": 17}, "block size 17 is not a multiple of 16"),
    ],
)
def test_what_does_not_start_says_why(model: str, gpu: str, asked: dict[str, Any], words: str) -> None:
    sizing = solved(model, gpu, **asked)
    assert not sizing.fits and sizing.is_refused
    assert sizing.reason.startswith("vLLM would not start: ") and words in sizing.reason
    assert sizing.speed is None and sizing.users is None and sizing.levers == ()
    assert sizing.weights is not None  # the memory is told all the same


@pytest.mark.parametrize(
    ("model", "gpu", "asked"),
    [
        ("qwen3-0.6b", "t4", {"max_model_len": 4096}),
        ("qwen3-0.6b", "t4", {"max_model_len": 4096, "kv_cache_dtype": "fp8", "engine_version": "0.22"}),
        ("llama-3.1-8b", "a100-sxm4-80", {"kv_cache_dtype": "fp8"}),
        ("gpt-oss-20b", "a100-sxm4-40", {}),
        ("llama-3.1-8b", "h100-sxm", {"quantization": "bitsandbytes", "engine_version": "0.19"}),
        ("internlm2.5-7b", "h100-sxm", {"max_model_len": 65_536}),  # 32,768 x dynamic 2
        ("llama-3.1-8b", "mi300x", {"kv_cache_dtype": "fp8"}),  # no compute capability: not judged
    ],
)
def test_what_vllm_takes_is_not_refused(model: str, gpu: str, asked: dict[str, Any]) -> None:
    assert not solved(model, gpu, **asked).is_refused


def test_every_problem_of_the_start_is_told() -> None:
    sizing = solved("qwen3-0.6b", "t4", dtype="bfloat16", kv_cache_dtype="fp8", max_model_len=1_000_000)
    told = " ".join((sizing.reason, *sizing.warnings))
    assert all(word in told for word in ("max_model_len 1,000,000", "bfloat16 needs", "KV cache in fp8"))


def test_an_unknown_quantization_is_told_the_nearest() -> None:
    with pytest.raises(PenstockError) as caught:
        solved("llama-3.1-8b", "h100-sxm", quantization="fp8_per_chanel")
    assert caught.value.exit_code == 4 and caught.value.hint == "did you mean fp8_per_channel?"


NO_UNIT, LONGROPE = "it saves memory, not arithmetic", "4,096 tokens of context for this model (LongRoPE)"


@pytest.mark.parametrize(
    ("model", "gpu", "asked", "words", "is_said"),
    [
        ("qwen3-0.6b", "t4", {"max_model_len": 4096}, "no bfloat16", True),
        ("gpt-oss-20b", "h100-sxm", {}, NO_UNIT, True),
        ("gpt-oss-20b", "b200-sxm", {}, NO_UNIT, False),
        ("qwen3-32b-fp8", "a100-sxm4-80", {"max_model_len": 4096}, NO_UNIT, True),
        ("qwen3-32b-fp8", "h100-sxm", {"max_model_len": 4096}, NO_UNIT, False),
        ("phi-3.5-mini", "h100-sxm", {}, LONGROPE, True),
        ("phi-3.5-mini", "h100-sxm", {"max_model_len": 131_072}, LONGROPE, False),
        ("qwen3-0.6b", "v100-sxm2-32", {"max_model_len": 4096}, "CUDA 13", True),
        ("qwen3-0.6b", "v100-sxm2-32", {"max_model_len": 4096, "engine_version": "0.11"}, "CUDA 13", False),
        # A user may lift the model's own length, so it is no refusal.
        ("llama-3.1-8b", "h200-sxm", {"max_model_len": 131_073}, "over the model's 131,072: vLLM refuses it", True),
        ("command-r-v01", "h200-sxm", {"max_model_len": 8193}, "over the model's 8,192: vLLM refuses it", True),
    ],
)
def test_what_starts_otherwise_than_expected_is_warned_of(
    model: str, gpu: str, asked: dict[str, Any], words: str, is_said: bool
) -> None:
    sizing = solved(model, gpu, **asked)
    assert sizing.fits and any(words in warning for warning in sizing.warnings) is is_said


@pytest.mark.parametrize(
    ("model", "gpu", "asked", "dtype", "length"),
    [
        ("qwen3-0.6b", "t4", {"max_model_len": 4096}, "float16", 4096),
        ("gemma-2-9b", "v100-sxm2-32", {}, "float32", 8192),  # unstable in float16
        ("phi-3.5-mini", "h100-sxm", {}, "bfloat16", 4096),  # LongRoPE starts with its original length
        ("command-r-v01", "h200-sxm", {"config": {"model_max_length": 131_072}}, "bfloat16", 131_072),
    ],
)
def test_dtype_and_length_are_those_that_vllm_falls_back_to(
    model: str, gpu: str, asked: dict[str, Any], dtype: str, length: int
) -> None:
    config = {**catalog.model_config(model), **asked.get("config", {})}
    settings = solved(model, gpu, **{**asked, "config": config}).settings
    assert settings is not None and (settings.dtype, settings.max_model_len) == (dtype, length)


def test_float32_takes_twice_the_bytes() -> None:
    weights = solved("gemma-2-9b", "v100-sxm2-32").weights
    assert weights is not None and weights.per_gpu_gib[0] > 34


def test_requests_over_the_context_have_no_speed() -> None:
    sizing = solved("llama-3.1-8b", "h100-sxm", input_tokens=2_000_000_000, max_model_len=8192)
    assert sizing.fits and sizing.speed is None and sizing.users is None
    assert any("2,000,000,200 tokens are over max_model_len 8,192" in warning for warning in sizing.warnings)


# ---- configs that no model has ---------------------------------------------------------------------------------------


def test_a_vision_part_of_nonsense_is_refused() -> None:
    config = catalog.model_config("qwen3-vl-8b")
    config["vision_config"]["hidden_size"] = -5
    with pytest.raises(UserError, match="hidden_size of vision_config is -5, not a count"):
        solved("qwen3-vl-8b", "h100-sxm", config)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 10**9}, "more than any model has"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"vocab_size": "many"}, "vocab_size is 'many', not a count"),
        ({"num_attention_heads": 0}, "attention heads is 0"),
        ({"num_key_value_heads": 3}, "32 attention heads do not divide by 3 KV heads"),
        ({"architectures": []}, "it names no architecture"),
        ({"architectures": 7}, "architectures is 7, not a list"),
        ({"quantization_config": "fp8"}, "quantization_config is not an object"),
        ({"quantization_config": {"quant_method": "fp8", "ignored_layers": ["re:("]}}, "no regular expression"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": {}}}, "a value of the wrong kind"),
    ],
)
def test_a_config_that_cannot_be_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        solved("llama-3.1-8b", "h100-sxm", {**catalog.model_config("llama-3.1-8b"), **fields})
    assert words in caught.value.message and caught.value.exit_code == 2


VALUES = st.one_of(
    st.sampled_from([None, 0, 1, -1, 3, 10**9, 10**18, 1.5, float("nan"), True, "", "x", "bfloat16"]),
    st.sampled_from([[], {}, [1], ["x"], {"a": 1}, [None], [[1, 2]], {"a": {}}, ["full_attention"]]),
    st.integers(0, 2**40),
)


def spots(config: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """(object, key) of every field, nested ones too."""
    for key, value in config.items():
        yield config, key
        if isinstance(value, dict):
            yield from spots(value)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_broken_configs_are_answered_or_refused(data: st.DataObject) -> None:
    """A field dropped, of another type, zero or huge: exit code 0, 2, 3 or 4, never a traceback."""
    model = data.draw(st.sampled_from(catalog.model_names()))
    config = copy.deepcopy(catalog.model_config(model))
    for _ in range(data.draw(st.integers(1, 2))):
        holder, key = data.draw(st.sampled_from(list(spots(config))))
        if data.draw(st.booleans()):
            holder[key] = copy.deepcopy(data.draw(VALUES))  # the next change may be inside it
        else:
            del holder[key]
    try:
        sizing = solved(
            model, "h100-sxm", config, gpus_per_node=4, max_model_len=data.draw(st.sampled_from([None, 99]))
        )
    except PenstockError as error:
        assert error.exit_code in (2, 4)
    else:
        assert sizing.reason
