"""Attributes of a request's span. Those of generative AI are young and change: only this file has them. Pure.

https://github.com/open-telemetry/semantic-conventions-genai (2026-11, status "development"), and for HTTP
https://opentelemetry.io/docs/specs/semconv/http/http-spans/
"""

from __future__ import annotations

from typing import Final

# What a path does.
OPERATIONS: Final[dict[bytes, str]] = {
    b"/v1/chat/completions": "chat",
    b"/v1/responses": "chat",
    b"/v1/completions": "text_completion",
    b"/v1/embeddings": "embeddings",
}

OPERATION: Final = "gen_ai.operation.name"
PROVIDER: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
MAX_TOKENS: Final = "gen_ai.request.max_tokens"
STREAM: Final = "gen_ai.request.stream"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
FIRST_CHUNK_S: Final = "gen_ai.response.time_to_first_chunk"

METHOD: Final = "http.request.method"
PATH: Final = "url.path"
STATUS: Final = "http.response.status_code"
USER_AGENT: Final = "user_agent.original"
CLIENT: Final = "client.address"
ERROR: Final = "error.type"

# No convention has these.
REQUEST_ID: Final = "penstock.request_id"
KEY: Final = "penstock.key"
REPLICA: Final = "penstock.replica"
