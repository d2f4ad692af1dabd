"""The /metrics pages of several engines as one: each family once, each sample with the labels of its replica. Pure.

https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format

Line by line that takes 4 us a line. But a label's value holds no raw quote and no raw line end, so the bytes
`{engine="` are where the labels of a sample begin, and nowhere else: one `bytes.replace` for a family inserts ours.
Where it did not reach every line, they are read one by one: samples without labels, names of older versions, a label
that an engine and we both set, broken lines. One wrong line would cost Prometheus the pages of all replicas.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from penstock.gateway.metrics.counters import Labels, escape_label

MAX_LINE_BYTES = 65536
# What follows a family's name in its samples.
_PARTS = {b"histogram": (b"_bucket", b"_sum", b"_count"), b"summary": (b"", b"_sum", b"_count")}
_KINDS = frozenset((b"counter", b"gauge", b"histogram", b"summary"))
_NAME = re.compile(rb"[a-zA-Z_:][a-zA-Z0-9_:]*")
_TEXT = rb'"((?:[^"\\]++|\\.)*+)"'
_LABELS = rb'\{((?:[^"}]++|"(?:[^"\\]++|\\.)*+")*+)\}'
_SAMPLE = re.compile(
    rb"([a-zA-Z_:][a-zA-Z0-9_:]*)[ \t]*(?:" + _LABELS + rb')?[ \t]*([^ \t{}"]+)((?:[ \t]+-?[0-9]+)?)[ \t]*'
)
# The end of a sample's labels and no number after it. In a label's value that quote would be escaped.
_BROKEN = re.compile(rb'"\} (?!(?:[-+]?[0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?|NaN|[-+]Inf)(?:\n|\Z))')
_LABEL = re.compile(rb"[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*" + _TEXT + rb"[ \t]*(?:,|\Z)")


class _Family:
    """A family of the one page. `blocks`: its samples, a replica each; a block begins with a line end.

    `opening`: how the labels of its samples begin, b'{engine="'.
    """

    __slots__ = ("about", "blocks", "kind", "last_page", "name", "opening")

    def __init__(self, name: bytes, kind: bytes, about: bytes) -> None:
        self.name, self.kind, self.about = name, kind, about
        self.blocks: list[bytes] = []
        self.last_page = 0
        self.opening = b""


class _Own:
    """The labels of a replica: their names and the text of all."""

    __slots__ = ("names", "text")

    def __init__(self, labels: Labels) -> None:
        self.names = tuple(name.encode() for name, _ in labels)
        self.text = b",".join(b'%s="%s"' % (name.encode(), escape_label(value).encode()) for name, value in labels)


class EnginePages:
    """Families that begin with one of `prefixes`, from any number of pages. `renamed`: old names -> present ones."""

    def __init__(self, prefixes: Sequence[str], renamed: Mapping[str, str]) -> None:
        self._prefixes = tuple(prefix.encode() for prefix in prefixes)
        self._renamed = {old.encode(): name.encode() for old, name in renamed.items()}
        self._families: dict[bytes, _Family] = {}
        self._by_type: dict[bytes, _Family | None] = {}  # by a TYPE line's "name kind"; None: left out
        self._n_pages = 0

    def add(self, page: bytes, labels: Labels) -> None:
        """Adds a replica's page. A family whose kind differs from that of an earlier page is left out."""
        self._n_pages += 1
        own = _Own(labels)
        if not page.isascii():
            page = page.decode(errors="replace").encode()
        page = page.replace(b"\r\n", b"\n")
        is_sound = _BROKEN.search(page) is None
        older: list[tuple[bytes, _Family, bytes]] = []
        family, about = None, b""
        for part in (b"\n" + page.rstrip(b"\n")).split(b"\n# "):
            end = part.find(b"\n")
            if part[:5] != b"TYPE ":
                about = part if end < 0 else part[:end]
                if end >= 0 and family is not None:  # a comment among the samples
                    family.blocks.append(_rewrite(family.name, family, part[end:], own))
                continue
            header = part[5:end] if end >= 0 else part[5:]
            family = self._by_type[header] if header in self._by_type else self._open(header, about)
            if family is None:
                continue
            name = header.partition(b" ")[0]
            if name != family.name:
                older.append((name, family, part[end:]))
                family = None
            elif family.last_page == self._n_pages:
                family = None  # its second TYPE line
            else:
                family.last_page = self._n_pages
                if end >= 0:
                    block = _insert(family, part[end:], own) if is_sound else None
                    family.blocks.append(_rewrite(name, family, part[end:], own) if block is None else block)
        for name, family, block in older:
            if family.last_page != self._n_pages:
                family.last_page = self._n_pages
                family.blocks.append(_rewrite(name, family, block, own))

    def write(self) -> Iterator[bytes]:
        """The one page, a family at a time."""
        for family in self._families.values():
            about = b"# HELP %s %s\n" % (family.name, family.about) if family.about else b""
            yield b"".join((about, b"# TYPE %s %s" % (family.name, family.kind), *family.blocks, b"\n"))

    def _open(self, header: bytes, about: bytes) -> _Family | None:
        name, _, kind = header.partition(b" ")
        family = None
        if name.startswith(self._prefixes) and _NAME.fullmatch(name) and not name.endswith(b"_created"):
            kind = kind if kind in _KINDS else b"untyped"
            words = b"HELP %s " % name
            name = self._renamed.get(name, name)
            family = self._families.get(name)
            if family is None:
                about = about[len(words) :] if about.startswith(words) else b""
                family = self._families[name] = _Family(name, kind, about)
            elif family.kind != kind:
                family = None
        self._by_type[header] = family
        return family


def _insert(family: _Family, block: bytes, own: _Own) -> bytes | None:
    """The samples with our labels first; None where a line has not the labels that were expected."""
    n_lines = block.count(b"\n")
    # All samples of a family have the same labels, as those who write them have it.
    line = block[: block.find(b"\n", 1)] if n_lines > 1 else block
    if any(name + b'="' in line for name in own.names):
        return None
    if not family.opening:
        at = line.find(b"{")
        end = line.find(b'="', at)
        family.opening = line[at : end + 2] if 0 <= at < end else b"\0"  # which is on no page
    opening = family.opening
    changed = block.replace(opening, b"{%s,%s" % (own.text, opening[1:]))
    is_whole = len(changed) - len(block) == n_lines * (len(own.text) + 1) and block.count(b'"} ') == n_lines
    return changed if is_whole else None


def _rewrite(name: bytes, family: _Family, block: bytes, own: _Own) -> bytes:
    """The samples of `name` with our labels first, as the family's, line by line. What is no sample is left out."""
    samples = {name + part: family.name + part for part in _PARTS.get(family.kind, (b"",))}
    lines = []
    for line in block.split(b"\n"):
        match = _SAMPLE.fullmatch(line) if len(line) <= MAX_LINE_BYTES else None
        if match is None or match[1] not in samples or not _is_number(match[3]):
            continue
        theirs = _rename_labels(match[2] or b"", own.names)
        if theirs is not None:
            pairs = b"%s,%s" % (own.text, theirs) if theirs else own.text
            lines.append(b"\n%s{%s} %s%s" % (samples[match[1]], pairs, match[3], match[4]))
    return b"".join(lines)


def _rename_labels(text: bytes, names: Sequence[bytes]) -> bytes | None:
    """An engine's labels; one that has a name of ours gets "exported_" in front, as in Prometheus. None: broken."""
    pairs: dict[bytes, bytes] = {}
    text, at = text.strip(b" \t"), 0
    while at < len(text):
        match = _LABEL.match(text, at)
        if match is None or match[1] in pairs:
            return None
        pairs[match[1]] = match[2]
        at = match.end()
    for name in names:
        if name in pairs:
            other = b"exported_" + name
            while other in pairs or other in names:
                other = b"exported_" + other
            pairs[other] = pairs.pop(name)
    return b",".join(b'%s="%s"' % pair for pair in pairs.items())


def _is_number(text: bytes) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return b"_" not in text
