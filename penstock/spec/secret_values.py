"""Which texts of a deployment file look like secrets: it is copied to wherever the deployment runs. Pure."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from penstock.errors import Problem
from penstock.spec.blocks import SECRETS_FROM
from penstock.spec.deployment import Deployment, Variable

_SECRET_NAME = re.compile(
    r"(?!.*(?:FILE|PATH|DIR|NAME|URL|URI|ENDPOINT|TTL|MODE|VERSION|PROVIDER)\Z)"
    r"(?!(?:.*_)?(?:BOS|EOS|PAD|UNK|SEP|CLS|MASK|IMAGE|VIDEO|AUDIO|STOP|START|END|NEW|PER)_TOKEN\Z)"
    r"(?!(?:.*_)?(?:PUBLIC|SORT|CACHE|PRIMARY|PARTITION|ROUTING|HASH|TOPOLOGY)_KEY\Z)"
    r"(?:.*(?:SECRET|PASSWO?R?D|PASSPHRASE|CREDENTIAL|AUTHORIZATION|(?:API|ACCESS|ACCOUNT|PRIVATE|AUTH)_?KEY)"
    r"|(?:.*_)?(?:TOKEN|KEY|PASS|SSHPASS|PWD|PAT|AUTH|SIG|SIGNATURE)_?\d*\Z)"
)
_VARIABLES, _OWN = {"env", "env_vars"}, {"args", "runtime_env", "patch"}  # where names are the user's
_ANY_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_LOGIN = re.compile(r"://[^\s/?#:@]*:(?![$@])[^\s/?#@]+@")
# How keys of known services begin: https://docs.github.com/en/code-security/reference/supported-secret-scanning-patterns
_KEY = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY|hooks\.slack\.com/services/\w|(?<![A-Za-z0-9])(?:"
    r"(?:hf_|api_org_|gh[oprsu]_|npm_|gsk_|r8_|xai-|pplx-|nvapi-|sk-(?:[a-z]+\d*-)*)[A-Za-z0-9]{16}"
    r"|(?:[prs]k_(?:live|test)_|github_pat_|glpat-|dckr_pat_|dop_v1_|hv[bs]\.|pypi-|AIza|ya29\.|SG\.)[\w-]{16}"
    r"|xox[a-z]-[\w-]{8}|A[KS]IA[A-Z0-9]{12}|eyJ[\w-]{10,}\.[\w-]{4}|(?i:bearer|basic) +(?!\$)[\w+/.=-]{12})"
)
# NAME=value and --name value: in scripts, options, queries of URLs and connection strings.
_ASSIGNED = re.compile(r"(?:(?<![\w$-])(?:--)?([A-Za-z][\w.-]*)=|--([a-z][\w-]*)\s+)(?=[\"']?([^\s\"'&,;]+))")
_HARMLESS = re.compile(
    r"(?is)(?:|[*]+|true|false|yes|no|on|off|none|null|auto|default|[\d.]{1,4}|(?:\.\.?|~)?/.*|\$[\w({].*|[<\[{].*)\Z"
)
_HEX = re.compile(r"(?i)[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?<![a-z0-9])[0-9a-f]{16,}(?![a-z0-9])")
_NAMED = re.compile(r"engine\.(env|args)\.|\w+\.runtime_env\.")  # where keys are names of the user's
_CURES = {
    "engine.args.api-key": "remove it: engines have keys that penstock makes, and clients those of gateway.auth: keys",
    "gateway.store": "put it into ~/.pgpass or PGPASSWORD",
    "observe.remote_write.url": "remove it, and put the token into token_file",
}
_NO_NAME = "remove it: programs find logins in variables, in ~/.netrc and in files of mode 600"


def secret_problems(deployment: Deployment) -> Iterator[Problem]:
    """One for each text that looks like a secret. No message shows the text."""
    plain, env = msgspec.to_builtins(deployment), deployment.engine.env
    del plain["ui"]  # words for people
    plain["engine"]["env"] = {name: value for name, value in env.items() if isinstance(value, str)}
    found = [(path, *like) for path, name, text in _texts(plain, "", "") if (like := _why(path, name, text))]
    secret = [name for name, value in env.items() if isinstance(value, Variable) and value.secret]
    for path, name, why in (*found, *((f"engine.env.{name}", name, "secret: true") for name in secret)):
        is_variable = path.startswith("engine.env.")
        name = path.split(".")[2] if is_variable else name
        cure = SECRETS_FROM[deployment.target].format(name=variable_of(name)) if name else _NO_NAME
        if is_variable:
            cure += f"; if it is no secret: engine: {{env: {{{name}: {{value: ..., secret: false}}}}}}"
        message = f"looks like a secret ({why}), and files of the deployment would show it"
        yield Problem(path, message, _CURES.get(path, cure))


def _texts(value: Any, path: str, name: str) -> Iterator[tuple[str, str, str]]:
    """Path, name if the user chose it, and text of each value; JSON is looked into."""
    if isinstance(value, str) and value.startswith(("{", "[")):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if isinstance(value, Mapping):
        for key, item in value.items():
            where = f"{path}.{key}" if path else key
            variable = str(value.get("name", "")) if key == "value" else ""  # of a container
            yield from _texts(item, where, variable or (key if _NAMED.match(where) else ""))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item, path, name)
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield path, name, str(value)


def _why(path: str, name: str, text: str) -> tuple[str, str] | None:
    """The name of what looks like a secret, if it has one, and how it does."""
    assigned = [(match[1] or match[2], match[3]) for match in _ASSIGNED.finditer(text)]
    for named, value in ((name, text), *assigned):
        if secret_names([named]) and not _HARMLESS.match(value):
            return named, f"by the name {named}"
    if (is_login := _LOGIN.search(text)) or _KEY.search(text):
        return name, "a URL with a password" if is_login else "it begins as keys of a known service do"
    is_variable = name and not path.startswith("engine.args.")
    return (name, "it is random") if is_variable and not _HARMLESS.match(text) and _is_random(text) else None


def _is_random(text: str) -> bool:
    """Return whether a word changes between capitals, small letters and digits as by chance: in base 62 after 62 % of
    its letters, in base 36 after 40 %, in names of models after 25 %."""
    words = [word for word in re.findall(r"[A-Za-z0-9]{16,}", _HEX.sub(" ", text)) if len(set(word)) >= 11]
    changes = r"[a-z](?=[A-Z0-9])|[A-Z](?=[a-z0-9])|[0-9](?=[A-Za-z])"
    return any(len(re.findall(changes, word)) >= 0.34 * len(word) for word in words)


def variable_of(name: str) -> str:
    """The name as one of a variable: "hf-token" and "hfToken" are HF_TOKEN."""
    return re.sub(r"[-.]|(?<=[a-z0-9])(?=[A-Z])", "_", name).upper()


def secret_names(names: Iterable[str]) -> list[str]:
    """Those whose values are probably secret, so that nothing that is sent in clear may show them."""
    return [name for name in names if _SECRET_NAME.match(variable_of(name))]


def without_secrets(value: Any, is_secret: bool = False, is_own: bool = False) -> Any:
    """Plain settings to share: values of variables, texts with a secret's name and logins in addresses become "***"."""
    if isinstance(value, Mapping):
        hidden = {*value} if is_secret else {*_VARIABLES, *(secret_names(value) if is_own else ())}
        return {name: without_secrets(item, name in hidden, is_own or name in _OWN) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(item, is_secret, is_own) for item in value]
    if isinstance(value, str):
        return "***" if is_secret else _ANY_LOGIN.sub("***", value)
    return value
