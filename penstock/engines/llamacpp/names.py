"""Names of llama.cpp's /metrics.

From the page of xllamacpp 2026.10 (tests/golden/llamacpp/metrics.txt). Averages are since the engine's start.
"""

from __future__ import annotations

from penstock.engines import Family, Metrics

METRICS = Metrics(
    "llamacpp:requests_processing",
    "llamacpp:requests_deferred",
    ("llamacpp:tokens_predicted_total", "llamacpp:prompt_tokens_total", "llamacpp:n_decode_total"),
    prompt_tokens=("llamacpp:prompt_tokens_total", "llamacpp:prompt_tokens_cached_total"),
    output_tokens="llamacpp:tokens_predicted_total",
    cached_tokens="llamacpp:prompt_tokens_cached_total",
)
PREFIX = "llamacpp:"
# They have no labels: a process serves one model.
FAMILIES: dict[str, Family] = {
    "llamacpp:requests_processing": Family("gauge", "Requests that run."),
    "llamacpp:requests_deferred": Family("gauge", "Requests that wait for a slot."),
    "llamacpp:prompt_tokens_total": Family("counter", "Prompt tokens, without cached ones."),
    "llamacpp:prompt_tokens_cached_total": Family("counter", "Prompt tokens that were cached."),
    "llamacpp:prompt_seconds_total": Family("counter", "Time spent on prompts."),
    "llamacpp:tokens_predicted_total": Family("counter", "Output tokens."),
    "llamacpp:tokens_predicted_seconds_total": Family("counter", "Time spent on output tokens."),
    "llamacpp:n_decode_total": Family("counter", "Calls of llama_decode()."),
    "llamacpp:n_tokens_max": Family("counter", "The longest sequence so far, prompt and answer."),
    "llamacpp:spec_decode_num_drafts_total": Family("counter", "Drafts of speculative decoding."),
    "llamacpp:spec_decode_num_draft_tokens_total": Family("counter", "Tokens of these drafts."),
    "llamacpp:spec_decode_num_accepted_tokens_total": Family("counter", "Draft tokens that were accepted."),
    "llamacpp:spec_decode_num_accepted_tokens_per_pos_total": Family(
        "counter", "Accepted ones by place in the draft.", ("position",)
    ),
    "llamacpp:prompt_tokens_seconds": Family("gauge", "Prompt tokens a second, on average."),
    "llamacpp:predicted_tokens_seconds": Family("gauge", "Output tokens a second, on average."),
    "llamacpp:n_busy_slots_per_decode": Family("gauge", "Slots at work in a call of llama_decode(), on average."),
}
