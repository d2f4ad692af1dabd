"""The environment by which published chat pages are configured, so that their manifests work with this one. Pure.

    HOST                     the server, "http://vllm:8000"; a bare one only next to CONTEXT_PATH, since shells set HOST
    CONTEXT_PATH             "/v1/chat/completions": its part before /v1 belongs to the server's address
    LLM_ENGINE               "openai-chat" or "vllm"; others speak no OpenAI API
    MODEL_ID                 the model that is asked
    DISABLE_SYSTEM_MESSAGE   "true": no system message
    GRADIO_SERVER_NAME, GRADIO_SERVER_PORT   where the page listens

Source: https://github.com/GoogleCloudPlatform/accelerated-platforms, use-cases/inferencing/serving-with-vllm, and
https://www.gradio.app/guides/environment-variables.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.chat.page.config import PageConfig
from penstock.errors import UserError

PORT = 7860
_CHAT = "/v1/chat/completions"
_ENGINES = ("openai-chat", "openai", "vllm")
_TRUE = ("1", "true", "yes", "on")


def names_a_server(environment: Mapping[str, str]) -> bool:
    return "CONTEXT_PATH" in environment or "://" in environment.get("HOST", "")


def config_of(environment: Mapping[str, str], folder: str) -> PageConfig:
    """The page that these variables describe, without its key.  Raises UserError."""
    path, engine = environment.get("CONTEXT_PATH") or _CHAT, environment.get("LLM_ENGINE") or _ENGINES[0]
    base, has_api, _ = path.partition("/v1/")
    if engine.lower() not in _ENGINES or not has_api:
        message = f'cannot ask LLM_ENGINE "{engine}" at CONTEXT_PATH "{path}": the page speaks OpenAI\'s API'
        raise UserError(message, hint=f"Set LLM_ENGINE={_ENGINES[0]} and CONTEXT_PATH={_CHAT}.")
    server = (environment.get("HOST") or "127.0.0.1:8000").rstrip("/")
    server = server if "://" in server else f"http://{server}"
    port = environment.get("GRADIO_SERVER_PORT") or str(PORT)
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f'cannot listen on GRADIO_SERVER_PORT "{port}": it is no port')
    return PageConfig(
        gateway=f"{server}/{base.strip('/')}".rstrip("/"),
        host=environment.get("GRADIO_SERVER_NAME") or "127.0.0.1",
        port=int(port),
        folder=folder,
        has_login=False,
        model=environment.get("MODEL_ID") or None,
        has_system=environment.get("DISABLE_SYSTEM_MESSAGE", "").lower() not in _TRUE,
        root_path=environment.get("GRADIO_ROOT_PATH", ""),
    )
