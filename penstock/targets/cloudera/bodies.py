"""Bodies of requests, judged by the workbench's own description of its API (swagger.json): versions differ. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from penstock.errors import PenstockError

# Fields that older versions lack, without which a workload does the same: they are left out there.
LEFT_OUT = frozenset({"project_id", "job_id", "description"})
_PARAMETER = re.compile(r"\{[^}]*\}")
_KINDS: dict[str, tuple[type, ...]] = {"string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,)}


class Judge(msgspec.Struct, frozen=True):
    """`calls`: by "POST /projects/{}/jobs" the fields of the body, None where it has none. `types`: by name."""

    calls: dict[str, Any]
    types: dict[str, Any]

    @staticmethod
    def read(document: Any) -> Judge:
        """Raises PenstockError for what is no OpenAPI 2 document."""
        if not isinstance(document, Mapping) or not isinstance(document.get("paths"), Mapping):
            raise PenstockError("cannot read the workbench's swagger.json: it lists no paths")
        calls = {}
        for path, methods in document["paths"].items():
            for method, call in methods.items():
                body: Any = next((row for row in call.get("parameters", ()) if row.get("in") == "body"), {})
                calls[f"{method.upper()} {_plain(path)}"] = body.get("schema")
        return Judge(calls, dict(document.get("definitions", {})))

    def knows(self, method: str, path: str) -> bool:
        return self._schema(method, path) is not _UNKNOWN

    def takes(self, method: str, path: str, field: str) -> bool:
        """Whether the body of that call has that field in this version."""
        schema = self._resolved(self._schema(method, path))
        return field in (schema.get("properties") or {})

    def problems(self, method: str, path: str, body: Mapping[str, object]) -> list[str]:
        """What this version of the API would refuse or drop of that body."""
        schema = self._schema(method, path)
        if schema is _UNKNOWN:
            return [f"this workbench has no {method} {path}"]
        return list(self._problems(body, schema, ""))

    def sent(self, method: str, path: str, body: Mapping[str, object]) -> dict[str, object]:
        """The body without what this version lacks and nothing depends on.  Raises PenstockError for the rest."""
        kept = {name: value for name, value in body.items() if name not in LEFT_OUT or self.takes(method, path, name)}
        problems = self.problems(method, path, kept)
        if problems:
            message = f"cannot send {method} {path}: this version of the workbench takes it otherwise"
            raise PenstockError(message, detail="\n".join(problems))
        return kept

    def _schema(self, method: str, path: str) -> Any:
        words = path.split("/")
        for call, schema in self.calls.items():
            known_method, _, known = call.partition(" ")
            parts = known.split("/")
            if known_method == method and len(parts) == len(words) and all(map(_fits, parts, words)):
                return schema
        return _UNKNOWN

    def _resolved(self, schema: Any) -> Mapping[str, Any]:
        if not isinstance(schema, Mapping):
            return {}
        name = str(schema.get("$ref", "")).rpartition("/")[2]
        found = self.types.get(name, {}) if name else schema
        return found if isinstance(found, Mapping) else {}

    def _problems(self, value: object, schema: Any, where: str) -> Iterator[str]:
        kind = self._resolved(schema)
        fields = kind.get("properties")
        if isinstance(value, Mapping) and isinstance(fields, Mapping):
            for name, inner in value.items():
                path = f"{where}.{name}" if where else name
                if name not in fields:
                    yield f"{path}: this version has no such field"
                else:
                    yield from self._problems(inner, fields[name], path)
        elif isinstance(value, Mapping) and "additionalProperties" in kind:
            for name, inner in value.items():
                yield from self._problems(inner, kind["additionalProperties"], f"{where}.{name}")
        elif isinstance(value, list) and kind.get("type") == "array":
            for index, inner in enumerate(value):
                yield from self._problems(inner, kind.get("items"), f"{where}[{index}]")
        elif kind and not _is_of(value, kind):
            yield f"{where or 'the body'}: {value!r} is no {kind.get('format') or kind.get('type')}"


_UNKNOWN = object()


def _plain(path: str) -> str:
    """A path of the document as we spell it: "/api/v2/projects/{project.id}" is "/projects/{}"."""
    return _PARAMETER.sub("{}", path.removeprefix("/api/v2"))


def _fits(part: str, word: str) -> bool:
    """ "{}:stop" fits "ab12:stop"."""
    if "{}" not in part:
        return part == word
    head, _, tail = part.partition("{}")
    return word.startswith(head) and word.endswith(tail) and ":" not in word.removesuffix(tail)


def _is_of(value: object, kind: Mapping[str, Any]) -> bool:
    """In proto3's JSON a number of 64 bits is text of digits."""
    if kind.get("format") in ("int64", "uint64"):
        return isinstance(value, str) and value.lstrip("-").isdigit()
    types = _KINDS.get(str(kind.get("type")))
    if types is None:
        return kind.get("type") not in ("array", "object") or isinstance(value, list | Mapping)
    return isinstance(value, types) and (bool in types or not isinstance(value, bool))
