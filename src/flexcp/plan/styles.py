"""Parallel styles that were made and applied to no module: a model that would train wrongly.

`parallelize_module` passes over a pattern that matches nothing. The modules that were meant then
take this rank's rows for the whole sequence, and nothing fails. So a style leaves a mark where
tensors are sharded, and sharding asks whether it has been applied by then.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from flexcp.errors import FlexCPError

_MOST_MARKS = 64
"""Styles that are waited for at one place; a model has a few."""


@dataclass(eq=False)
class StyleMark:
    """What is known of one style, also once the style itself is gone."""

    name: str
    """How it was made, for messages."""
    is_applied: bool = False
    """Whether a module has it; or whether none needs to, as others were made of it."""
    is_reported: bool = False
    """Whether an error has named it."""


def require_applied(marks: list[StyleMark], when: str) -> None:
    """Raises if one of these styles has been applied to no module.

    Args:
        marks: Of the styles.
        when: What is about to happen, for the message.
    """
    waiting = [mark for mark in marks if not mark.is_applied]
    if not waiting:
        return
    for mark in waiting:
        mark.is_reported = True
    names = list(dict.fromkeys(mark.name for mark in waiting))
    raise FlexCPError(
        f"every style to be applied to a module before {when}",
        f"{', '.join(names)}, which no module has",
        "apply it first, with flexcp.parallelize(model, mesh, {pattern: style}): unlike "
        "parallelize_module, it names patterns that match no module",
    )


@dataclass(eq=False)
class UnappliedStyles:
    """The styles that have been made for one purpose and applied to nothing so far.

    >>> styles, mark = UnappliedStyles(), StyleMark("ContextParallel()")
    >>> styles.expect(mark)
    >>> mark.is_applied = True
    >>> styles.require_applied("plan.shard")
    """

    marks: deque[StyleMark] = field(default_factory=lambda: deque(maxlen=_MOST_MARKS))
    """Of styles that were not applied when this was last looked at."""

    def expect(self, mark: StyleMark) -> None:
        """Notes that a style was made."""
        self.marks.append(mark)

    def require_applied(self, when: str) -> None:
        """Raises if a style has been applied to nothing; `when` says what is about to happen."""
        if self.marks:
            waiting = [mark for mark in self.marks if not mark.is_applied]
            self.marks.clear()
            self.marks.extend(waiting)
            require_applied(waiting, when)

    def forget_reported(self) -> None:
        """Once a style is applied, those that an error has named are taken to be replaced by it."""
        waiting = [mark for mark in self.marks if not (mark.is_applied or mark.is_reported)]
        self.marks.clear()
        self.marks.extend(waiting)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a plan for another process has no styles."""
        return (UnappliedStyles, ())
