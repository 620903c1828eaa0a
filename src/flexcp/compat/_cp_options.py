"""The switches of PyTorch's context parallelism, scoped instead of global.

Outside of `context_parallel` a switch holds for what comes after, as in PyTorch. Every
`context_parallel` starts from those outer values, and what is switched in its body ends with it:
one mesh's choice never reaches another's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from enum import Enum, auto

from flexcp.errors import quote


class _CausalBehavior(Enum):
    """What a step of a causal ring does with the keys that it holds."""

    SKIP = None
    NOT_IS_CAUSAL = False
    IS_CAUSAL = True


class _RotateMethod(Enum):
    """How keys and values reach the other ranks."""

    ALL_TO_ALL = auto()
    ALL_GATHER = auto()


@dataclass(frozen=True)
class Switches:
    """The values of all switches."""

    convert_to_f32: bool = True
    """Accepted for compatibility; partial results are always merged in float32 or better."""
    enable_load_balance: bool = True
    """Whether sequences are laid out head-tail unless something else is said."""
    rotate_method: _RotateMethod = _RotateMethod.ALL_GATHER
    """How keys and values travel."""


_scopes: ContextVar[tuple[Switches, ...]] = ContextVar("flexcp_cp_options", default=(Switches(),))
"""The outer values, and those of every context that is open, innermost last."""


@contextmanager
def own_switches() -> Iterator[None]:
    """A scope that starts from the outer values; what is switched within ends with it."""
    scopes = _scopes.get()
    token = _scopes.set((*scopes, scopes[0]))
    try:
        yield
    finally:
        _scopes.reset(token)


class _ContextParallelOptions:
    """PyTorch's options object: reads and writes the innermost scope.

    >>> _cp_options.rotate_method
    <_RotateMethod.ALL_GATHER: 2>
    >>> with own_switches():
    ...     _cp_options.enable_load_balance = False
    >>> _cp_options.enable_load_balance
    True
    """

    @property
    def convert_to_f32(self) -> bool:
        """Accepted for compatibility; partial results are always merged in float32 or better."""
        return _scopes.get()[-1].convert_to_f32

    @convert_to_f32.setter
    def convert_to_f32(self, value: bool) -> None:
        _switch(convert_to_f32=value)

    @property
    def enable_load_balance(self) -> bool:
        """Whether sequences are laid out head-tail unless something else is said."""
        return _scopes.get()[-1].enable_load_balance

    @enable_load_balance.setter
    def enable_load_balance(self, value: bool) -> None:
        _switch(enable_load_balance=value)

    @property
    def rotate_method(self) -> _RotateMethod:
        """How keys and values travel."""
        return _scopes.get()[-1].rotate_method

    @rotate_method.setter
    def rotate_method(self, value: _RotateMethod) -> None:
        _switch(rotate_method=value)

    def __repr__(self) -> str:
        return repr(_scopes.get()[-1])


def _switch(**values: bool | _RotateMethod) -> None:
    *outer, current = _scopes.get()
    _scopes.set((*outer, replace(current, **values)))  # type: ignore[arg-type]


_cp_options = _ContextParallelOptions()


def set_rotate_method(rotate_method: str) -> None:
    """Chooses how keys and values reach the other ranks.

    Within `context_parallel` it holds until the context ends; outside, for what comes after.

    Args:
        rotate_method: "allgather": all at once; "alltoall": one neighbour at a time, in a ring.

    >>> with own_switches():
    ...     set_rotate_method("alltoall")
    ...     _cp_options.rotate_method
    <_RotateMethod.ALL_TO_ALL: 1>
    """
    methods = {"allgather": _RotateMethod.ALL_GATHER, "alltoall": _RotateMethod.ALL_TO_ALL}
    if not isinstance(rotate_method, str) or rotate_method not in methods:
        told = rotate_method if isinstance(rotate_method, str) else quote(rotate_method)
        raise NotImplementedError(
            f"Context Parallel does not support using {told} for kv shards "
            'rotation; pass "allgather" or "alltoall"'
        )
    _cp_options.rotate_method = methods[rotate_method]


def _is_causal_behavior(rank: int, world_size: int, i: int, is_causal: bool) -> _CausalBehavior:
    """What `rank` does in step i of a ring with the keys of the rank i places before it.

    >>> [_is_causal_behavior(0, 2, i, True).name for i in range(2)]
    ['IS_CAUSAL', 'NOT_IS_CAUSAL']
    """
    if not is_causal:
        return _CausalBehavior.NOT_IS_CAUSAL
    if i == 0:
        return _CausalBehavior.IS_CAUSAL
    earlier = (rank - i) % world_size < rank
    if earlier or _cp_options.enable_load_balance:
        return _CausalBehavior.NOT_IS_CAUSAL
    return _CausalBehavior.SKIP
