"""The generated pages are those in docs/, and every link in the documents leads somewhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from penstock.spec import deployment

ROOT = Path(__file__).parent.parent
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]


@pytest.fixture(scope="module")
def write_docs() -> ModuleType:
    found = importlib.util.spec_from_file_location("write_docs", ROOT / "tools" / "write_docs.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["cli", "spec", "metrics"])
def test_a_generated_page_is_what_the_code_says(write_docs: ModuleType, page: str) -> None:
    written = (ROOT / "docs" / "reference" / f"{page}.md").read_text("utf-8")
    assert written == getattr(write_docs, f"{page}_page")(), "run `make docs`"


def test_every_field_of_the_file_is_on_its_page(write_docs: ModuleType) -> None:
    page = write_docs.spec_page()
    names = [field.name for field in msgspec.structs.fields(deployment.Deployment)]
    assert [name for name in names if f"| `{name}` |" not in page] == []
    assert "| `gateway.port` | whole number | `8000` | 0 |" in page
    assert "fake" not in page


def test_every_verb_is_on_its_page(write_docs: ModuleType) -> None:
    page = write_docs.cli_page()
    assert "\n## up\n" in page
    assert "penstock scale [--no-wait] [--json] [NAME] N" in page


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\((?!https?:|mailto:)([^)#\s]*)#?([^)\s]*)\)", text)
    dead = [file for file, _ in links if file and not (path.parent / file).exists()]
    dead += [
        f"#{anchor}" for file, anchor in links if anchor and anchor not in anchors(path.parent / file if file else path)
    ]
    assert not dead, f"{path.name}: {dead}"


def anchors(path: Path) -> set[str]:
    """GitHub's anchors of a page's headings: lower case, without marks, dashes for spaces."""
    if path.suffix != ".md" or not path.is_file():
        return set()
    heads = re.findall(r"^#+ +(.*)$", path.read_text("utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


# Plain words that module names may use beyond the glossary.
PLAIN = (ROOT / "tests" / "golden" / "plain_words.txt").read_text("utf-8")


def test_module_names_use_the_words_of_the_glossary() -> None:
    legal = set(PLAIN.split()) | set(
        re.findall(r"[a-z0-9]+", (ROOT / "docs" / "reference" / "glossary.md").read_text("utf-8").lower())
    )
    wrong = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in sorted((ROOT / "penstock").rglob("*.py"))
        for word in path.stem.strip("_").split("_")
        if word not in legal and word.removesuffix("s") not in legal
    ]
    assert not wrong, "add to the glossary, or to tests/golden/plain_words.txt:\n" + "\n".join(wrong)
