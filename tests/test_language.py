"""No page and no text of the library uses a word that `language.py` bans."""

from __future__ import annotations

from pathlib import Path

import pytest
from language import REPO, Text, page, pages, prose_of, texts_of_library, texts_of_source
from language_figures import figures, sentences

PAGES = {path.relative_to(REPO).as_posix(): path for path in pages()}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_no_banned_word(name):
    assert list(page(PAGES[name]).hits()) == [], "words of tests/language.py, or of the style sheet that it holds"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("So many rows.", ["So many"]),
        ("A tool of\nyour own.", ["of your own"]),
        ("| a | A table once more |", ["once more"]),
        ("The GPU is in flight; flights are not.", ["flights"]),
        ("A [door](wall.md#room) opens.", ["door"]),
        ("Wall time, a wall-clock limit, and a wall.", ["wall"]),
        ("It holds the step up.", ["holds the step up"]),
        ("`so many` and ``a `door` ``, https://room.example/door", []),
        ("```text\nso many\n```\n<!-- so many -->", []),
        ("Intro:\n\n    python -m so many\n\nEnd.", []),
        ("---\ntitle: so many\n---\nText.", []),
        ("A string, a doorway, a classroom, forgiven.", []),
    ],
)
def test_banned_words_are_found_in_prose_alone(text, found):
    hits = list(Text(Path("x.md"), 1, text).hits())
    assert [hit.split("'")[1] for hit in hits] == found


def test_a_hit_names_file_and_line():
    (hit,) = Text(REPO / "docs" / "x.md", 5, "One\n\n`code\ncode` and so\nmany").hits()
    assert hit == "docs/x.md:8: 'so many': write the number, or the noun for it"


def test_texts_of_the_source_are_collected(tmp_path):
    file = tmp_path / "source.py"
    file.write_text(
        '"""A module."""\n'
        "class A:\n"
        '    """A class."""\n'
        "    x: int = option(1, 'How many rows.')\n"
        "    '''An attribute.'''\n"
        "    def f(self, key):\n"
        "        if key:\n"
        "            raise ValueError(f'{key} is wrong: ' 'set it') from None\n"
        "        yield Problem(f'{key} is missing')\n"
        "        print('no error text')\n"
    )
    found = sorted((text.line, text.kind, text.text) for text in texts_of_source(file))
    assert found == [
        (1, "docstring", "A module."),
        (3, "docstring", "A class."),
        (4, "option", "How many rows."),
        (5, "docstring", "An attribute."),
        (8, "error", "`x` is wrong: set it"),
        (9, "error", "`x` is missing"),
    ]


@pytest.mark.parametrize("kind", ["docstring", "option", "error"])
def test_no_text_of_the_library_has_a_banned_word(kind):
    texts = [text for text in texts_of_library() if text.kind == kind]
    assert [hit for text in texts for hit in text.hits()] == [], "words of tests/language.py"


def test_the_library_has_texts_of_each_kind():
    """`language_figures.py` counts them."""
    kinds = [text.kind for text in texts_of_library()]
    assert min(kinds.count(kind) for kind in ("docstring", "option", "error")) > 200


def test_figures_count_prose_by_sentence():
    text = (
        "# What is it?\n\nSet `a.b=1`; you may wait. The call fails, and what failed is counted.\n\n"
        "- Who asks?\n- Run it " + "now " * 30 + "\n\n| what | who |\n\n```bash\nwhat; you\n```\n"
    )
    assert len(list(sentences(text))) == 4
    assert figures(text) == {
        "words": 47,
        "clauses": 1,
        "semicolons": 1,
        "you": 1,
        "imperatives": 2,
        "over 30 words": 1,
    }
    assert "what" not in prose_of(text).replace("what failed", "").replace("| what", "")
