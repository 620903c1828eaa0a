"""Shows the doctests of a docstring as code: a bare `>>>` in Markdown would be a quotation."""

from __future__ import annotations

import textwrap
from typing import Any

import griffe


class DoctestBlocks(griffe.Extension):
    """Fences every paragraph that begins with `>>>`."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for everything that can have a docstring."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """The text with its doctests in fences."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(
        f"```pycon\n{textwrap.dedent(p)}\n```" if p.lstrip().startswith(">>>") else p
        for p in paragraphs
    )
