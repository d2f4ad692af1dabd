"""A request as curl and as Python, and what other programs need to use the same address. Pure: text in, text out.

The key is never in a snippet: all of them read it from the environment variable PENSTOCK_KEY.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pprint import pformat

import msgspec

_WIDTH = 100
_LOOPBACK = re.compile(r"https?://(localhost|127\.[\d.]+|\[::1\])(?=[:/]|\Z)")
_CONTEXT_TOKENS = 8192  # where the server does not say how long a request may be
# What OpenAI's client takes by name; the rest goes into its extra_body.
# https://platform.openai.com/docs/api-reference/chat/create
_OPENAI_FIELDS = {
    *("model", "messages", "stream", "max_tokens", "max_completion_tokens", "stop", "seed", "n", "response_format"),
    *("temperature", "top_p", "frequency_penalty", "presence_penalty", "logit_bias", "logprobs", "top_logprobs"),
    *("reasoning_effort", "tools", "tool_choice"),
}


class Snippet(msgspec.Struct, frozen=True):
    """`place`: where `text` belongs."""

    name: str
    place: str
    text: str


def as_curl(base_url: str, body: Mapping[str, object], has_key: bool = True) -> str:
    """A shell command (sh, bash, zsh, fish) that sends the chat request `body`; streams are shown as they come.

    The body travels on standard input, since one argument of a command ends at 128 KiB.
    """
    lines = [
        f"printf '%s' '{_shell_json(body)}' |",
        f"  curl -sSN {shlex.quote(api(base_url) + '/chat/completions')} \\",
        "  -H 'content-type: application/json' \\",
        *(['  -H "authorization: Bearer $PENSTOCK_KEY" \\'] if has_key else []),
        "  -d @-",
    ]
    return "\n".join(lines) + "\n"


def as_python(base_url: str, body: Mapping[str, object], has_key: bool = True) -> str:
    """A program that sends the chat request `body` with the openai package and prints the answer as it comes."""
    known = {name: value for name, value in body.items() if name in _OPENAI_FIELDS}
    extra = {name: value for name, value in body.items() if name not in _OPENAI_FIELDS}
    if extra:
        known["extra_body"] = extra
    arguments = "".join(f"    {name}={_literal(value, len(name) + 5)},\n" for name, value in known.items())
    key = 'os.environ["PENSTOCK_KEY"]' if has_key else '"none"'
    imports = "import os\n\n" if has_key else ""
    head = f"{imports}from openai import OpenAI\n\nclient = OpenAI(base_url={api(base_url)!r}, api_key={key})\n"
    call = f"client.chat.completions.create(\n{arguments})"
    if not body.get("stream"):
        return f"{head}answer = {call}\nprint(answer.choices[0].message.content)\n"
    return (
        f"{head}for chunk in {call}:\n"
        "    if chunk.choices:\n"
        '        print(chunk.choices[0].delta.content or "", end="", flush=True)\n'
        "print()\n"
    )


def elsewhere(base_url: str, model: str, max_model_len: int | None = None, has_key: bool = True) -> tuple[Snippet, ...]:
    """What makes other programs use `model` at `base_url`, one snippet each."""
    address = api(base_url)
    question = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "stream": True}
    return (
        Snippet("Open WebUI", "in a terminal", _open_webui(address, has_key)),
        Snippet("LibreChat", "librechat.yaml; the key in .env", _librechat(address, model, has_key)),
        Snippet(
            "Continue",
            "~/.continue/config.yaml; the key in ~/.continue/.env",
            _continue(address, model, has_key),
        ),
        Snippet("Zed", "settings.json; the key in PENSTOCK_API_KEY", _zed(address, model, max_model_len)),
        Snippet("OpenAI, Python", "pip install openai", as_python(base_url, question, has_key)),
        Snippet("OpenAI, JavaScript", "npm install openai", _javascript(address, model, has_key)),
    )


def api(base_url: str) -> str:
    """The address that OpenAI's clients want: "http://h:8000" and "http://h:8000/v1/" -> "http://h:8000/v1"."""
    return base_url.rstrip("/").removesuffix("/v1").rstrip("/") + "/v1"


def _shell_json(body: Mapping[str, object]) -> str:
    r"""JSON that any shell leaves alone between single quotes, and a terminal into which it is pasted.

    A quote becomes \u0027. fish reads \\ between single quotes as one backslash, so a backslash becomes \u005c.
    Characters that do not print, escape sequences and marks that turn the direction of text among them, are written
    as escapes too. All of these can stand only inside the strings of JSON.
    """
    text = json.dumps(body, ensure_ascii=False, indent=2)
    text = text.replace("\\\\", "\\u005c").replace("'", "\\u0027")
    return "".join(char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in text)


def _literal(value: object, column: int) -> str:
    """`value` in Python's syntax, indented as an argument that begins at `column`."""
    lines = pformat(value, width=_WIDTH - column, sort_dicts=False).splitlines()
    return ("\n" + " " * column).join(lines)


# https://docs.openwebui.com/getting-started/env-configuration (read 2026-11)
def _open_webui(address: str, has_key: bool) -> str:
    # A container's loopback is its own, and a gateway on loopback listens nowhere else.
    network = "--network=host" if _LOOPBACK.match(address) else "-p 8080:8080"
    key = 'OPENAI_API_KEY="$PENSTOCK_KEY"' if has_key else "OPENAI_API_KEY=none"
    return (
        f"{key} docker run -d --name open-webui {network} \\\n"
        f"  -e OPENAI_API_BASE_URL={shlex.quote(address)} -e OPENAI_API_KEY -e ENABLE_OLLAMA_API=false \\\n"
        "  -v open-webui:/app/backend/data ghcr.io/open-webui/open-webui:main\n"
        "# then http://localhost:8080; in one that runs already: Admin Settings, Connections, OpenAI API\n"
    )


# https://www.librechat.ai/docs/configuration/librechat_yaml/object_structure/custom_endpoint (read 2026-11)
def _librechat(address: str, model: str, has_key: bool) -> str:
    return f"""\
version: 1.3.17
cache: true
endpoints:
  custom:
    - name: penstock
      apiKey: {'"${PENSTOCK_KEY}"' if has_key else '"none"'}
      baseURL: {json.dumps(address)}
      models:
        default: [{json.dumps(model)}]
        fetch: true
      titleConvo: true
      titleModel: current_model
"""


# https://docs.continue.dev/reference (read 2026-11)
def _continue(address: str, model: str, has_key: bool) -> str:
    return f"""\
name: penstock
version: 1.0.0
schema: v1
models:
  - name: {json.dumps(model)}
    provider: openai
    model: {json.dumps(model)}
    apiBase: {json.dumps(address)}
    apiKey: {"${{ secrets.PENSTOCK_KEY }}" if has_key else "none"}
    roles: [chat, edit, apply]
"""


# https://zed.dev/docs/ai/use-api-access (read 2026-11): the key's variable is the provider's name and _API_KEY.
def _zed(address: str, model: str, max_model_len: int | None) -> str:
    card = {"name": model, "max_tokens": max_model_len or _CONTEXT_TOKENS, "capabilities": {"tools": False}}
    provider = {"api_url": address, "available_models": [card]}
    return json.dumps({"language_models": {"openai_compatible": {"penstock": provider}}}, indent=2) + "\n"


# https://github.com/openai/openai-node (read 2026-11)
def _javascript(address: str, model: str, has_key: bool) -> str:
    key = "process.env.PENSTOCK_KEY" if has_key else '"none"'
    return f"""\
import OpenAI from "openai";

const client = new OpenAI({{ baseURL: {json.dumps(address)}, apiKey: {key} }});
const stream = await client.chat.completions.create({{
  model: {json.dumps(model)},
  messages: [{{ role: "user", content: "Hello" }}],
  stream: true,
}});
for await (const chunk of stream) process.stdout.write(chunk.choices[0]?.delta?.content ?? "");
"""
