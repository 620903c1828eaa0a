"""Every Python block of the README and of the docs runs."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTED = (
    "flexcp", "flexcp.testing", "flexcp.tools.verify", "flexcp.tools.train", "flexcp.tools.report",
    "flexcp.integrations.transformers", "flexcp.integrations.diffusers",
    "flexcp.integrations.torchtitan",
)  # fmt: skip
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


NEEDED = {"diffusers.md": "diffusers"}
"""What a page is about, if not everybody has it."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    if page.name in NEEDED:
        pytest.importorskip(NEEDED[page.name])
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


def test_every_page_begins_with_what_the_reader_gets():
    begins = {page.name: page.read_text().split("\n\n")[1] for page in PAGES[1:]}
    assert [name for name, text in begins.items() if not text.startswith("*You get: ")] == []


def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "examples" / "first_plan.ipynb").read_text())
    code = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    assert all(c.get("outputs", []) == [] for c in notebook["cells"])
    namespace: dict[str, object] = {"__name__": "notebook"}
    for cell in code:
        exec(compile(cell, "first_plan.ipynb", "exec"), namespace)


def test_the_glossary_has_the_words_of_the_tools():
    from flexcp.plan.problem import LAYOUTS
    from flexcp.schedule import SCHEDULES

    page = (ROOT / "docs" / "glossary.md").read_text().replace("-", "_")
    words = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")]
    known = {part.strip().split(" ")[0].lower() for word in words for part in word.split(",")}
    names = [name.replace("allgather", "all_gather") for name in (*LAYOUTS[1:], *SCHEDULES)]
    printed = ("predicted", "busiest", "exposed", "far", "received", "kept", "layout", "schedule")
    assert [name for name in (*names, *printed) if name not in known] == []


@pytest.mark.parametrize("module", DOCUMENTED)
def test_every_public_name_is_in_the_reference(module):
    page = (ROOT / "docs" / "reference.md").read_text()
    listed = set(re.findall(r"^::: (\S+)$", page, re.MULTILINE))
    for members in re.findall(r"members: \[(.*)\]", page):
        listed |= {name.strip() for name in members.split(",")}
    names = {path.rpartition(".")[2] for path in listed}
    home = importlib.import_module(module)
    public = [name for name in home.__all__ if not name.isupper()]  # constants explain nothing
    things = [name for name in public if not isinstance(getattr(home, name), ModuleType)]
    assert [name for name in things if name not in names] == []


def test_every_entry_of_the_reference_is_where_it_says():
    page = (ROOT / "docs" / "reference.md").read_text()
    entries = re.findall(r"^::: (\S+)$", page, re.MULTILINE)
    assert len(entries) > 40
    for path in entries:
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(module), name), path


def test_the_page_of_the_command_line_names_every_command_and_exit_code():
    from flexcp.tools.cli.app import app

    page = (ROOT / "docs" / "cli.md").read_text()
    for command in app.registered_commands:
        assert f"| `flexcp {command.name}` |" in page
        assert f"## `flexcp {command.name}`" in page
    assert all(f"| {code} |" in page for code in (0, 1, 2, 130))
