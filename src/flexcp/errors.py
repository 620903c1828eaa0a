"""The one error that flexcp raises: what was expected, what came, and what to do about it."""

from __future__ import annotations


class FlexCPError(ValueError):
    """A request that flexcp can't honour.

    >>> raise FlexCPError("a block size of at least 1", "0", "pass block_size=128")
    Traceback (most recent call last):
    ...
    flexcp.errors.FlexCPError: expected a block size of at least 1, got 0; pass block_size=128
    """

    def __init__(self, expected: str, got: str, fix: str) -> None:
        super().__init__(f"expected {expected}, got {got}; {fix}")
        self.expected = expected
        self.got = got
        self.fix = fix

    def __reduce__(self) -> tuple[type[FlexCPError], tuple[str, str, str]]:
        return type(self), (self.expected, self.got, self.fix)
