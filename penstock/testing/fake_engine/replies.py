"""Replies of the fake engine: an `Ask` in, vLLM 0.32.0's bytes out, key by key. Pure."""

from __future__ import annotations

import json

from penstock.testing.fake_engine.options import Options
from penstock.testing.fake_engine.requests import Ask

VERSION = "0.32.0"
FINGERPRINT = f"vllm-{VERSION}-fakefake"
DONE = b"data: [DONE]\n\n"
# What vLLM says to every request when its engine process is gone.
ENGINE_DIED = "EngineCore encountered an issue. See stack trace (above) for the root cause."
# What vLLM says to new requests while it drains.
STOPPING = "cannot schedule new futures after shutdown"


def dump(value: object) -> str:
    """JSON as vLLM writes it: no spaces, UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def error_event(message: str) -> bytes:
    """The event that ends a stream whose engine died. vLLM writes this one with spaces."""
    facts = {"error": {"message": message, "type": "InternalServerError", "param": None, "code": 500}}
    return b"data: " + json.dumps(facts).encode() + b"\n\n"


def models(options: Options, created: int) -> dict[str, object]:
    return {"object": "list", "data": [_card(name, options, created) for name in options.names]}


def _card(name: str, options: Options, created: int) -> dict[str, object]:
    permission = {
        "id": "modelperm-0000000000000000",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": options.model,
        "parent": None,
        "max_model_len": options.max_model_len,
        "permission": [permission],
    }


def usage(ask: Ask, n_tokens: int) -> dict[str, object]:
    counts: dict[str, object] = {
        "prompt_tokens": ask.n_prompt_tokens,
        "total_tokens": ask.n_prompt_tokens + n_tokens,
        "completion_tokens": n_tokens,
    }
    return counts if ask.n_cached_tokens is None else counts | {"prompt_tokens_details": _details(ask)}


def _details(ask: Ask) -> dict[str, object]:
    return {"cached_tokens": ask.n_cached_tokens, "created_cache_tokens": 0, "multimodal_tokens": None}


def whole(ask: Ask, reply_id: str, model: str, created: int) -> bytes:
    text, counts = ask.text(0, ask.n_tokens), usage(ask, ask.n_tokens)
    counts |= {"prompt_tokens_details": counts.get("prompt_tokens_details"), "completion_tokens_details": None}
    end = {"logprobs": None, "finish_reason": ask.finish_reason, "stop_reason": None, "token_ids": None}
    choice: dict[str, object] = {"index": 0}
    if ask.is_chat:
        unused = {"refusal": None, "annotations": None, "audio": None, "function_call": None, "reasoning": None}
        message: dict[str, object] = {"role": "assistant", "content": text, **unused}
        message |= ask.chosen.message() if ask.chosen is not None else {}
        choice |= {"message": message, **end, "routed_experts": None}
        tail = {"prompt_logprobs": None, "prompt_token_ids": None, "prompt_text": None}
    else:
        choice |= {"text": text, **end, "prompt_logprobs": None, "prompt_token_ids": None, "routed_experts": None}
        tail = {}
    reply = {
        "id": reply_id,
        "object": "chat.completion" if ask.is_chat else "text_completion",
        "created": created,
        "model": model,
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": counts,
        **tail,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }
    return dump(reply).encode()


class Events:
    """The events of one stream. What every chunk repeats is made once: a chunk costs one JSON string."""

    def __init__(self, ask: Ask, reply_id: str, model: str, created: int) -> None:
        self.ask = ask
        kind = "chat.completion.chunk" if ask.is_chat else "text_completion"
        head = dump({"id": reply_id, "object": kind, "created": created, "model": model})[:-1]
        self._head = f"data: {head}"
        self._open = self._head + ',"choices":[{"index":0,' + ('"delta":' if ask.is_chat else '"text":')
        ids = '"token_ids":null}]' if ask.is_chat else '"prompt_token_ids":null,"token_ids":null}]'
        stop = "" if ask.is_chat else '"stop_reason":null,'
        self._close = f',"logprobs":null,"finish_reason":null,{stop}{ids}'
        self._finish = f',"logprobs":null,"finish_reason":"{ask.finish_reason}","stop_reason":null,{ids}'

    def first(self) -> bytes:
        if not self.ask.is_chat:
            return b""
        choice = '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        tail = f'{self._usage(0)},"prompt_token_ids":null,"prompt_text":null}}\n\n'
        return f'{self._head},"choices":[{choice}]{tail}'.encode()

    def tokens(self, first: int, end: int, per_chunk: int = 1) -> bytes:
        """Chunks with tokens `first` .. `end` - 1. The one with the last token carries the finish reason."""
        chunks = []
        per_chunk = 1 if self.ask.deltas else per_chunk
        for i in range(first, end, per_chunk):
            upto = min(i + per_chunk, end)
            is_last = upto == self.ask.n_tokens
            close = self._finish if is_last else self._close
            shows_print = is_last and not self.ask.includes_usage
            mark = f',"system_fingerprint":"{FINGERPRINT}"' if shows_print else ""
            chunks.append(f"{self._open}{self._piece(i, upto)}{close}{self._usage(upto)}{mark}}}\n\n")
        return "".join(chunks).encode()

    def _piece(self, first: int, end: int) -> str:
        ask = self.ask
        if not ask.is_chat:
            return dump(ask.text(first, end))
        return dump(ask.deltas[first]) if first < len(ask.deltas) else f'{{"content":{dump(ask.text(first, end))}}}'

    def end(self) -> bytes:
        if not self.ask.includes_usage:
            return DONE
        counted = dump(usage(self.ask, self.ask.n_tokens))
        return f'{self._head},"choices":[],"usage":{counted},"system_fingerprint":"{FINGERPRINT}"}}\n\n'.encode() + DONE

    def _usage(self, n_tokens: int) -> str:
        if not self.ask.continues_usage:
            return ""
        details = {"completion_tokens_details": None} if self.ask.is_chat else {}
        return f',"usage":{dump(usage(self.ask, n_tokens) | details)}'
