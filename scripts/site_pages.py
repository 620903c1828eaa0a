"""Brings the repository's own pages and its examples into the documentation site.

`DESIGN.md` and its like stand at the top of the repository, and the guides link to runnable files
in `examples/` and `benchmarks/`. This hook of mkdocs adds both as pages and points the links there.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
TOP = ("DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md")
FOLDERS = ("examples", "benchmarks")
LINK = re.compile(r"\]\((?:\.\./)?(?:docs/)?([\w./-]+\.(?:py|md|ipynb))(#[\w-]+)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds a page for every top-level document and for every example and benchmark."""
    for name in TOP:
        files.append(File.generated(config, name, content=(ROOT / name).read_text()))
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).glob("*.py")):
            source = path.read_text()
            text = f"# {folder}/{path.name}\n\n````python\n{source}\n````\n"
            page = File.generated(config, f"{folder}/{path.stem}.md", content=text)
            files.append(page)
        for path in sorted((ROOT / folder).glob("*.ipynb")):
            text = _as_markdown(json.loads(path.read_text())["cells"])
            files.append(File.generated(config, f"{folder}/{path.stem}.md", content=text))
    return files


def _as_markdown(cells: list[dict[str, Any]]) -> str:
    """A notebook as a page."""
    parts = []
    for cell in cells:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Points links at files of the repository to their pages."""

    def target(match: re.Match[str]) -> str:
        name, anchor = match[1], match[2] or ""
        if name.endswith((".py", ".ipynb")) and name.split("/")[0] in FOLDERS:
            name = name.rpartition(".")[0] + ".md"
        return f"]({name}{anchor})"

    if page.file.src_uri.split("/")[0] in FOLDERS:
        return markdown
    return LINK.sub(target, markdown)
