"""Counting tokens by the model's tokenizer.json, or else by its server. Of hub ids only the local cache is read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError, UserError
from penstock.models import fetch, files, sources
from penstock.spec.deployment import DEMO_MODEL
from penstock.wire.client import Client

_FILE = "tokenizer.json"
# How many tokens of a vocabulary are looked at for whole words: enough that no two prompts begin alike by chance.
_SAMPLED = 8192


class Tokens(ABC):
    """`source`: where counts come from, for people."""

    source: str

    @abstractmethod
    def count(self, text: str, special: bool = True) -> int:
        """Tokens of a plain prompt; with `special` also those that the tokenizer puts around it."""

    def words(self) -> list[str]:
        """Pieces of text, each with a space before it, that mostly are one token each."""
        return [f" {word}" for word in _WORDS.split()]


class Words(Tokens):
    """A word is a token: about right for common words."""

    source = "words"

    def count(self, text: str, special: bool = True) -> int:
        return len(text.split())


class FileTokens(Tokens):
    """A model's tokenizer.json, read with the package `tokenizers`.  Raises UserError."""

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ImportError as exc:
            raise UserError(
                "cannot count tokens: the package tokenizers is not installed", hint="pip install 'penstock[bench]'"
            ) from exc
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as exc:  # it raises Exception itself, whatever is wrong with the file
            raise UserError(f'cannot read tokenizer "{path}"', detail=" ".join(str(exc).split())[:300]) from exc
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.source = str(path)

    def count(self, text: str, special: bool = True) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def words(self) -> list[str]:
        """Words of the vocabulary that stay one token each anywhere."""
        size = self._tokenizer.get_vocab_size()
        step = max(1, size // _SAMPLED)
        texts = self._tokenizer.decode_batch([[number] for number in range(0, size, step)])
        candidates = [text for text in texts if text.startswith(" ") and text[1:].isascii() and text[1:].isalpha()]
        twice = self._tokenizer.encode_batch([text + text for text in candidates], add_special_tokens=False)
        whole = [text for text, coded in zip(candidates, twice, strict=True) if len(coded.ids) == 2]
        return whole if len(whole) >= 64 else super().words()


class ServerTokens(Tokens):
    """The server's /tokenize (vLLM's and llama.cpp's form), one call a count."""

    def __init__(self, client: Client, model: str | None) -> None:
        self._client, self._model = client, model
        self.source = f"{client.base_url}/tokenize"
        self.count("a")  # refuses at once where there is no such path

    def count(self, text: str, special: bool = True) -> int:
        body = {"prompt": text, "content": text, "add_special_tokens": special, "add_special": special}
        named = {"model": self._model} if self._model else {}
        try:
            answer = self._client.post_json("/tokenize", {**named, **body})
        except PenstockError as exc:
            raise UserError(
                f"cannot count tokens: {exc.message}", hint="Name the model's folder: --tokenizer FOLDER."
            ) from exc
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(tokens, list):
            raise UserError(
                f"cannot count tokens: {self.source} gives no list of tokens",
                hint="Name the model's folder: --tokenizer",
            )
        return len(tokens)


def tokens_of(model: str | None, client: Client | None = None, served: str | None = None) -> Tokens:
    """The counter of a model (folder, tokenizer.json, hub id, penstock-demo), or of the server.  Raises UserError."""
    path = locate(model) if model else None
    if path is not None:
        return FileTokens(path)
    if client is None:
        raise UserError(
            f'cannot count tokens of model "{model}": no {_FILE} on this machine',
            detail="A folder, a hub id that was downloaded before, or penstock-demo.",
            hint="Name the model's folder: --tokenizer FOLDER.",
        )
    return ServerTokens(client, served or model)


def locate(model: str) -> Path | None:
    if model == DEMO_MODEL:
        return files.BUNDLED / _FILE
    path = Path(model).expanduser()
    if path.name == _FILE and path.is_file():
        return path
    for folder in (path, path.parent):  # a GGUF file has it in its folder
        if (folder / _FILE).is_file() and (folder == path or path.is_file()):
            return folder / _FILE
    snapshot = fetch.found(sources.parse(model)) if sources.is_remote(model) else None
    return snapshot / _FILE if snapshot is not None and (snapshot / _FILE).is_file() else None


# Common words that most vocabularies hold whole: what texts are made of where the vocabulary cannot be read.
_WORDS = """
about above across after again against all almost along already also always among another answer any area around ask
back ball base because become bed been before began begin behind below best better between big bird black blue boat
body book both bottom box boy bring brought build built busy call came car care carry cause center certain change
check child children city class clear close cold color come common complete contain correct could country course cover
cross cry cut dark day deep describe did differ direct distance dog done door down draw drive dry during each early
earth ease east eat end enough even ever every example eye face fact fall family far farm fast father feel feet few
field figure fill final find fine fire first fish five fly follow food foot force form found four free friend from
front full game gave general girl give glass gold gone good govern great green ground group grow half hand happen hard
head hear heard heart heat heavy help here high hold home horse hot hour house hundred idea inch interest island just
keep kind king knew know land language large last late laugh lead learn leave left less letter life light like line
list listen little live long look lot love machine made main make man many map mark mean measure men might mile mind
minute miss money moon more morning most mother mountain move much music
"""
