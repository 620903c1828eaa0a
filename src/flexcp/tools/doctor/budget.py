"""Budget: how much the doctor may take, and what a check may take of what is left."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Budget:
    """Time and sizes of a run. Sizes of what is timed come from a first quick measurement."""

    seconds: float = 225.0
    """Of the whole run, the start of ranks and the writing of reports aside."""
    start: float = 0.0
    """Seconds that starting ranks will take, about; kept for them while kernels are checked."""
    repeats: int = 100
    """Calls that must give the same bits."""
    tokens: int = 197
    """Of a sequence that is compared with float64: ragged, and a few tiles long."""
    longest: int = 8192
    """Most tokens of a sequence that is timed."""
    heads: int = 4
    head_dim: int = 64
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    timed_dtype: str = "float32"
    compiles: bool = True
    """Whether compiled FlexAttention is timed: compiling takes most of a minute on a CPU."""
    largest_message: int = 256 << 20
    """Bytes of a message between ranks, however fast the link."""
    patience: float = 60.0
    """Seconds that a rank waits for another."""

    @classmethod
    def of_device(cls, device: torch.device) -> Budget:
        """For a CPU, or for a GPU, where more fits into the same time."""
        if device.type == "cpu":
            return cls()
        return cls(
            tokens=1333, longest=32768, heads=8, head_dim=128,
            dtypes=("float32", "bfloat16", "float16"), timed_dtype="bfloat16", patience=120.0,
        )  # fmt: skip


@dataclass(frozen=True)
class Deadline:
    """A moment by which something should be done."""

    until: float

    @classmethod
    def within(cls, seconds: float) -> Deadline:
        """So many seconds from now.

        >>> 0 < Deadline.within(5).left <= 5
        True
        """
        return cls(time.monotonic() + seconds)

    @property
    def left(self) -> float:
        """Seconds until then; 0 once it has passed."""
        return max(0.0, self.until - time.monotonic())

    def share(self, part: float) -> Deadline:
        """The moment by which a part of what is left is used up."""
        return Deadline.within(self.left * part)


class TimeIsUpError(BaseException):
    """Something took longer than it may. No `Exception`: compilers catch those."""


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises `TimeIsUpError` in what runs longer, as soon as Python runs; in the main thread only.

    >>> with at_most(60):
    ...     pass
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def raise_it(_: int, __: object) -> None:
        raise TimeIsUpError

    before = signal.signal(signal.SIGALRM, raise_it)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
