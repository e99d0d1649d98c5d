"""What PyPI shows: the description without dead links, the version, and the addresses of the project."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

import verl_mt

REPO = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)|\b(?:src|href)=\"([^\"]+)\"")


@pytest.fixture(scope="module")
def metadata():
    return ProjectMetadata(str(REPO), PluginManager()).core


def links(text: str) -> list[str]:
    """Where the links of a page lead, those in code left out."""
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)
    return [a or b for a, b in LINK.findall(text)]


def test_every_link_of_the_description_is_absolute_and_leads_to_a_file(metadata):
    home = metadata.urls["Repository"]
    pages = f"{home}/blob/HEAD/"
    pictures = f"{home.replace('//github.com', '//raw.githubusercontent.com')}/HEAD/"
    shown, written = links(metadata.readme), links((REPO / "README.md").read_text())
    assert metadata.readme_content_type == "text/markdown" and len(shown) == len(written) > 50
    for link, original in zip(shown, written):
        assert link in (pages + original, pictures + original), link
        assert link.startswith(pictures) == original.endswith(".svg")
        assert (REPO / original.partition("#")[0]).exists()


def test_code_of_the_description_is_that_of_the_page(metadata):
    blocks = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
    assert blocks.findall(metadata.readme) == blocks.findall((REPO / "README.md").read_text())


def test_the_version_is_the_module_s_and_the_changelog_has_a_part_for_what_comes_after_it(metadata):
    assert metadata.version == verl_mt.__version__
    parts = re.findall(r"^## (.+)$", (REPO / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert parts[0] == "Unreleased"
    assert [re.fullmatch(r"\d+\.\d+\.\d+ \(\d{4}-\d\d-\d\d\)", part) for part in parts[1:]].count(None) == 0


def test_the_project_s_addresses_are_of_one_repository(metadata):
    assert set(metadata.urls) == {"Repository", "Documentation", "Changelog", "Issues"}
    for address in metadata.urls.values():
        assert address.startswith(metadata.urls["Repository"])
        _, is_file, path = address.partition("/blob/HEAD/")
        assert not is_file or (REPO / path).is_file()
