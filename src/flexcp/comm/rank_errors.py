"""What is raised for a rank whose own code raised."""

from __future__ import annotations

from typing import Any

from flexcp.errors import FlexCPError


class RankError(RuntimeError):
    """A rank's own code raised; the cause is its exception.

    If that is a FlexCPError, so is this: callers may catch either.
    """

    rank: int
    """The rank that failed by itself, and not because another one had failed."""
    failures: dict[int, BaseException]
    """What is known to have been raised, by rank."""

    def __init__(self, rank: int, cause: BaseException) -> None:
        super().__init__(f"rank {rank} failed: {type(cause).__name__}: {cause}")
        self.rank = rank
        self.failures = {rank: cause}

    @classmethod
    def of(cls, rank: int, cause: BaseException) -> RankError:
        """The error to raise for what a rank raised.

        >>> error = RankError.of(2, FlexCPError("5 rows", "4", "pass all of them"))
        >>> isinstance(error, FlexCPError), error.fix
        (True, 'pass all of them')
        >>> error
        RankFlexCPError('rank 2 failed: FlexCPError: expected 5 rows, got 4; pass all of them')
        """
        return RankFlexCPError(rank, cause) if isinstance(cause, FlexCPError) else cls(rank, cause)

    def __str__(self) -> str:
        return str(self.args[0])  # which rank it was, also where a FlexCPError has its own text

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank, self.failures[self.rank]), {"failures": self.failures}


class RankFlexCPError(RankError, FlexCPError):
    """A rank's own code raised a FlexCPError, which this is as well: for the same reason."""

    def __init__(self, rank: int, cause: FlexCPError) -> None:
        RankError.__init__(self, rank, cause)
        self.expected, self.got, self.fix = cause.expected, cause.got, cause.fix
