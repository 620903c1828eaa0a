"""Every Python block of the README and of the docs runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    namespace: dict[str, object] = {"__name__": "documentation"}
    for block in blocks:
        exec(compile(block, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_somewhere(page):
    for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_no_page_is_empty():
    assert all(len(page.read_text()) > 200 for page in PAGES)


def test_every_page_is_in_the_menu_of_the_site():
    menu = (ROOT / "mkdocs.yml").read_text().split("nav:")[1]
    assert [page.name for page in PAGES[1:] if f": {page.name}" not in menu] == []
