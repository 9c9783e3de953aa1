"""The glossary: every term is met in a chapter, linked where it is met first, and explained in the chapter it names."""

import json
import re
from pathlib import Path

import pytest

BOOK = Path(__file__).parents[1] / "chapters"
GLOSSARY = (BOOK / "glossary.md").read_text(encoding="utf-8")
ENTRIES = dict(re.findall(r"^## (.+)\n\n(.+)$", GLOSSARY, re.M))
# Words that are also used in their everyday sense, or in another one, before the term is met.
EVERYDAY = {"allocated", "heap", "imagined", "meter", "peak", "segment", "stage", "temporary", "view"}
ABBREVIATIONS = {"1F1B", "BF16", "FP16", "FP8", "GPipe", "OOM", "SDPA", "ZeRO"}
NO_PROSE = re.compile(
    r"(?s:```.*?```)|`[^`\n]*`|\[[^\]\n]*\]\((?!glossary)[^)\n]*\)|(?<=\]\()[^)\n]*|\$[^$\n]*\$|<[^>\n]*>|^\|.*$"
    r"|^\*\*In one sentence:.*$",  # which the map quotes
    re.M,
)


def slug(term):
    return term.lower().replace(" ", "-")


def prose():
    """Of each cell of text: its chapter; its prose without code, formulas and titles of what it links; headings; terms
    that it links."""
    for path in sorted(BOOK.glob("[0-9][0-9]_*.ipynb")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "markdown":
                text = "".join(cell["source"])
                headings = " ".join(re.findall(r"^#+ .*$", text, re.M))
                without = re.sub(r"^#+ .*$", "", text, flags=re.M)
                links = re.findall(r"\]\(glossary\.md#([^)]*)\)", text)
                yield path.name, NO_PROSE.sub(" ", without), headings, links


def uses(term, text):
    words = r"[\s-]".join(map(re.escape, term.split()))
    return re.search(rf"(?<![\w-]){words}(?:s|es|ed)?(?![\w-])", text, 0 if term in ABBREVIATIONS else re.IGNORECASE)


def test_terms_are_in_order_and_each_names_a_chapter_that_is_there():
    assert list(ENTRIES) == sorted(ENTRIES, key=str.lower) and len(ENTRIES) > 50
    for term, text in ENTRIES.items():
        title, name = re.search(r" \[(\d\d · .+)\]\((.+\.ipynb)\)$", text).groups()
        cells = json.loads((BOOK / name).read_text(encoding="utf-8"))["cells"]
        assert "".join(cells[0]["source"]).startswith(f"# {title}\n"), term


def test_every_link_has_an_entry_and_every_entry_at_most_one_link():
    links = [link for *_, found in prose() for link in found]
    assert len(links) == len(set(links)) and set(links) <= set(map(slug, ENTRIES))


@pytest.mark.parametrize("term", ENTRIES)
def test_a_link_finds_its_entry_on_github_and_in_jupyterlab(term):
    """A heading's anchor is in lower case on GitHub, and as written in JupyterLab: such a heading has one more."""
    in_jupyterlab = term.replace(" ", "-")
    own = f'<a id="{slug(term)}"></a>\n\n## {term}\n' in GLOSSARY
    assert own == (in_jupyterlab != slug(term))


@pytest.mark.parametrize("term", ENTRIES)
def test_a_term_is_linked_where_it_is_met_first_or_is_a_headings(term):
    """Not after the chapter that explains it; a chapter or section whose heading it is explains it there."""
    explained = re.search(r"\]\((.+\.ipynb)\)$", ENTRIES[term])[1]
    for chapter, text, headings, links in prose():
        if slug(term) in links:
            assert chapter <= explained
            return
        if uses(term, headings) and chapter == explained:
            return
        assert term in EVERYDAY or not uses(term, text), f"{chapter} uses {term} first, without a link: {text[:80]!r}"
    raise AssertionError(f"no chapter has {term}")
