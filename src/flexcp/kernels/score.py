"""Score functions: what a score_mod does, found out by watching it once, and its use on tiles.

A score_mod is written for one score. If all it does acts on each score alone (arithmetic, and
lookups in captured tensors), it may be called on a whole tile with indices that broadcast, which
is as fast as the arithmetic; otherwise it is mapped over the tile by `torch.func.vmap`.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any

import torch
from torch import Tensor

from flexcp.errors import FlexCPError, quote, told
from flexcp.kernels.captured_content import content_of
from flexcp.kernels.captured_gradients import gradients_apart
from flexcp.kernels.chained_lookups import joined_lookups
from flexcp.kernels.merge import accumulation_dtype
from flexcp.kernels.score_chain import ScoreChain, chain_of
from flexcp.kernels.score_graph import ScoreGraph, ScoreRecorder
from flexcp.kernels.wide_sums import WideSums
from flexcp.masks.graph import op_name
from flexcp.masks.trace import describe
from flexcp.torch_names import (
    OpOverload,
    TorchDispatchMode,
    has_kernel_for,
    transforms_are_on,
)

ScoreFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""A FlexAttention score_mod of (score, b, h, q_idx, kv_idx)."""

# Without the `pointwise` tag, but acting on each element alone all the same.
_ALSO_POINTWISE = frozenset(
    {
        "_to_copy", "alias", "clone", "detach", "empty_like", "floor_divide", "full_like",
        "lift_fresh", "lift_fresh_copy", "new_full", "new_ones", "new_zeros", "ones_like",
        "zeros_like",
    }
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class ScoreMod:
    """A score_mod together with what has been found out about it."""

    function: ScoreFunction
    captured: tuple[Tensor, ...]
    """Tensors that it uses and that need a gradient."""
    on_tiles: bool
    """Whether it may be called on a whole tile at once."""
    changes_score: bool
    """Whether it changes its score argument in place."""
    digest: str
    """Of what it does: its steps, their numbers, and the captured tensors, as far as those are on
    the CPU and need no gradient."""
    graph: ScoreGraph | None = None
    """What it does to a tile, step by step; None if it can't be called on one."""
    unlike: str | None = None
    """Why what it does can't be told from its steps: the first one that does not act on each score
    alone, or that has a derivative of its own; None if there is none."""
    first_batch: int = 0
    """The number, to the function, of the first batch element that a kernel gets."""
    first_head: int = 0
    """The number, to the function, of the first query head that a kernel gets."""

    @cached_property
    def constants(self) -> tuple[Tensor, ...]:
        """Tensors that it reads and that need no gradient, as far as its steps are known."""
        nodes = () if self.graph is None else self.graph.nodes
        read = {id(n.value): n.value for n in nodes if n.value is not None and n.op is None}
        return tuple(x for x in read.values() if not x.requires_grad)

    @cached_property
    def chain(self) -> ScoreChain | None:
        """How the forward pass does it in place; None if the function has to be called."""
        return None if self.graph is None or self.changes_score else chain_of(self.graph)

    def numbered(self, b_N: Tensor, h_NR: Tensor) -> tuple[Tensor, Tensor]:  # noqa: N803
        """The numbers of batch elements and heads, counted from 0, as the function knows them."""
        return (
            b_N + self.first_batch if self.first_batch else b_N,
            h_NR + self.first_head if self.first_head else h_NR,
        )

    def apply(self, tile: Tensor, b_N: Tensor, h_NR: Tensor, q: Tensor, kv: Tensor) -> Tensor:  # noqa: N803
        """The scores of a tile [N, R, T, U], modified, in a tensor of their own or in `tile`."""
        score = tile.clone() if self.changes_score else tile
        b_N, h_NR = self.numbered(b_N, h_NR)  # noqa: N806
        if self.on_tiles:
            result = self.function(
                score, b_N[:, None, None, None], h_NR[:, :, None, None], q[:, None], kv
            )
        else:
            result = _mapped(self.function)(score, b_N, h_NR, q, kv)
        if result.dtype != tile.dtype:
            raise changes_dtype(tile.dtype, f"{result.dtype} from {describe(self.function)}")
        if result.shape != tile.shape or 0 in result.stride():
            result = result.expand(tile.shape).clone()
        return result

    def new_sums(self) -> list[Tensor]:
        """Zeros for the gradient of each captured tensor, in the type in which they are summed."""
        return [torch.zeros_like(x, dtype=accumulation_dtype(x.dtype)) for x in self.captured]

    def in_type(self, sums: Sequence[Tensor]) -> list[Tensor]:
        """Sums of gradients, in the types of the captured tensors."""
        return [total.to(x.dtype) for total, x in zip(sums, self.captured, strict=True)]

    def differentiable(self, tile: Tensor, wide: WideSums, *indices: Tensor) -> Tensor:
        """What `apply` returns, for `pull_back`; `wide` stands for captured tensors in it."""
        with torch.enable_grad(), wide if wide.copies else contextlib.nullcontext():
            return self.apply(tile, *indices)

    def pull_back(
        self, tile: Tensor, modified: Tensor, wide: WideSums, gradient: Tensor, sums: list[Tensor]
    ) -> Tensor:
        """The gradient of the tile; those of captured tensors are added to `sums`."""
        if not modified.requires_grad:
            return torch.zeros_like(gradient)
        totals = [*sums, *wide.of_copies(self.captured, sums)]
        leaves = (tile, *wide.copies)
        grads = gradients_apart((modified,), self.captured, (gradient,), leaves)
        own = grads.pop(len(self.captured))
        for total, grad in zip(totals, grads, strict=True):
            if grad is not None:
                total += grad
        return torch.zeros_like(gradient) if own is None else own


ScoreLike = ScoreMod | ScoreFunction | bool | None
"""A function on the scores, examined or not; or whether there is one, of which nothing is known."""


def check_score_mod(score_mod: object) -> None:
    """Raises unless it is a function that can be called with a score and its four indices."""
    if score_mod is None or torch.compiler.is_compiling():
        return
    expected = "score_mod to be a function of (score, b, h, q_idx, kv_idx)"
    fix = "a mask is passed as block_mask, or is part of the plan"
    if not callable(score_mod) or isinstance(score_mod, type):
        raise FlexCPError(expected, told(score_mod), fix)
    try:
        inspect.signature(score_mod).bind(*range(5))
    except TypeError:
        raise FlexCPError(
            expected, f"{quote(score_mod)}, which takes other arguments", fix
        ) from None
    except ValueError:
        pass  # it has no signature that Python knows


def examine(function: ScoreFunction, dtype: torch.dtype, device: torch.device) -> ScoreMod:
    """Calls a score_mod once, on one score, and looks at what it does.

    >>> slope = torch.tensor([0.5], requires_grad=True)
    >>> mod = examine(lambda s, b, h, q, kv: s - slope[h] * (q - kv),
    ...               torch.float32, torch.device("cpu"))
    >>> mod.on_tiles, len(mod.captured)
    (True, 1)
    """
    if not callable(function):
        raise FlexCPError(
            "score_mod to be a function of (score, b, h, q_idx, kv_idx)",
            told(function),
            "pass a function, or None",
        )
    on_tiles, unlike, called = False, None, function
    for on_tile in (function, joined_lookups(function)):
        watcher = _Watcher()
        try:
            result = watcher.watch(on_tile, _inputs(dtype, device, dims=4))
        except FlexCPError:
            raise
        except Exception as error:  # not written for tiles; if it fails on scores too, that counts
            unlike = unlike or watcher.unlike or f"a step that fails on tiles ({error})"
            continue
        if watcher.acts_alone:
            on_tiles, unlike, called = True, watcher.unlike, on_tile
            break
        unlike = unlike or watcher.unlike
    if not on_tiles:
        watcher = _Watcher()
        try:
            result = watcher.watch(_mapped(function), _inputs(dtype, device, dims=0))
        except FlexCPError:
            raise
        except Exception as error:
            raise FlexCPError(
                "score_mod to be a function of (score, b, h, q_idx, kv_idx)",
                f"{type(error).__name__} from {describe(function)}: {str(error)[:200]}",
                "call it on tensors without dimensions to see where it comes from",
            ) from error
    if not isinstance(result, Tensor):
        raise FlexCPError(
            "score_mod to return a tensor",
            f"{told(result)} from {describe(function)}",
            "return the modified score",
        )
    if result.dtype != dtype:
        if not result.is_floating_point():
            raise changes_dtype(dtype, f"{result.dtype} from {describe(function)}")
        return examine(_in_type_of_the_score(function), dtype, device)
    if result.numel() != 1 or result.dim() > 4:
        raise FlexCPError(
            "score_mod to return one score (shape ()) for one score",
            f"shape {tuple(result.shape[4:])} from {describe(function)}",
            "index captured tensors in all of their dimensions, as in bias[h, q_idx, kv_idx]",
        )
    return ScoreMod(
        called, tuple(watcher.captured), on_tiles, watcher.changes_score, watcher.digest(),
        watcher.graph if on_tiles else None, unlike,
    )  # fmt: skip


def _in_type_of_the_score(function: ScoreFunction) -> ScoreFunction:
    """A function whose result is wider or narrower, such as by a captured float64 tensor."""
    return wraps(function)(lambda score, *at: function(score, *at).to(score.dtype))


def changes_dtype(expected: torch.dtype, got: str) -> FlexCPError:
    """The error for scores of another type that a score_mod returns."""
    return FlexCPError(
        f"score_mod to return dtype {expected}, the type of the scores, or another of floats",
        got,
        "return the modified score, or end with .to(score.dtype)",
    )


def _inputs(dtype: torch.dtype, device: torch.device, dims: int) -> list[Tensor]:
    """One score and its indices: as a tile [1, 1, 1, 1], or as what `_mapped` takes."""
    score = torch.zeros(1, 1, 1, 1, dtype=dtype, device=device)
    index = torch.zeros(1, dtype=torch.int64, device=device)
    if dims == 4:
        four = index.view(1, 1, 1, 1)
        return [score, four, four.clone(), four.clone(), four.clone()]
    return [score, index, index.view(1, 1), index.clone(), index.clone()]


def _mapped(function: ScoreFunction) -> Callable[..., Tensor]:
    """The function on scores [N, R, T, U] with b [N], h [N, R], q [T], kv [U]."""
    mapped: Callable[..., Tensor] = function
    for dims in (
        (0, None, None, None, 0),
        (0, None, None, 0, None),
        (0, None, 0, None, None),
        (0, 0, 0, None, None),
    ):
        mapped = torch.func.vmap(mapped, in_dims=dims)
    return mapped


class _Watcher(TorchDispatchMode):
    """Notes which tensors a function captures, and whether it treats each score alone."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.captured: list[Tensor] = []
        self.acts_alone = True
        self.unlike: str | None = None
        self.changes_score = False
        self._touched: dict[int, Tensor] = {}
        self._made_here: dict[int, Tensor] = {}
        self._numbers: dict[int, int] = {}
        self._steps: list[str] = []
        self._recorder: ScoreRecorder | None = None
        self.graph: ScoreGraph | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def watch(self, function: Callable[..., Any], inputs: list[Tensor]) -> object:
        """Calls `function` on `inputs`."""
        self._touched = {id(x): x for x in inputs}
        self._numbers = {id(x): i for i, x in enumerate(inputs)}
        self._recorder = ScoreRecorder(inputs)
        with torch.enable_grad(), _unhooked(), self:
            result = function(*inputs)
        if isinstance(result, Tensor) and not self._is_of_steps(result):
            self._note(result)
        self._steps.append(f"returns {self._told(result)}")
        self.graph = self._recorder.finish(result)
        return result.detach() if isinstance(result, Tensor) else result

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if has_kernel_for(func.name(), "CompositeImplicitAutograd"):
            # In inference mode, `a & b` arrives as `__and__`.
            with self:
                return func.decompose(*args, **kwargs)
        operands = _tensors((args, tuple(kwargs.values())))
        touched = any(id(x) in self._touched for x in operands)
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise FlexCPError(
                "score_mod to be a function of its arguments",
                f"a random number ({func}) in it",
                "draw it once outside and capture the tensor: the backward pass calls it again",
            )
        for x in operands:
            if not self._is_of_steps(x):
                self._note(x)
        self._steps.append(f"{func} {self._told(args)} {self._told(sorted(kwargs.items()))}")
        result = func(*args, **kwargs)
        for made in _tensors(result):
            self._numbers[id(made)] = len(self._numbers)
            (self._touched if touched else self._made_here)[id(made)] = made
        assert self._recorder is not None
        if touched:
            self._recorder.add(func, args, kwargs, result)
            if not self._alone(func, args):
                self.acts_alone = False
                self._say(
                    f"the operation {op_name(func)!r}, which does not act on each score alone"
                )
            if not torch.is_grad_enabled():
                self._say(f"the operation {op_name(func)!r} in torch.no_grad or autograd.Function")
            if func._schema.is_mutable:
                self.changes_score = True
        else:
            self._recorder.add_constant(func, args, result)
        return result

    def digest(self) -> str:
        """Equal for functions that do the same."""
        return hashlib.sha256("\n".join(self._steps).encode()).hexdigest()[:12]

    def _told(self, value: Any) -> Any:
        """Operands without their identity: tensors made on the way are told by their number."""
        if isinstance(value, Tensor):
            number = self._numbers.get(id(value))
            return content_of(value) if number is None else f"#{number}"
        if isinstance(value, (tuple, list)):
            return [self._told(item) for item in value]
        return value

    def _say(self, what: str) -> None:
        self.unlike = self.unlike or what

    def _is_of_steps(self, x: Tensor) -> bool:
        """Whether a step made it: its gradient is for the tensors that it was made of."""
        return id(x) in self._touched or id(x) in self._made_here

    def _note(self, x: Tensor) -> None:
        if x.requires_grad and all(x is not known for known in self.captured):
            self.captured.append(x)

    def _alone(self, func: OpOverload, args: Any) -> bool:
        name = func._schema.name.split("::")[1]
        if name == "index":
            table, indices = args
            every = len(indices) == table.dim() and all(i is not None for i in indices)
            integers = every and all(i.dtype != torch.bool for i in indices)
            return integers and id(table) not in self._touched
        return torch.Tag.pointwise in func.tags or name in _ALSO_POINTWISE


def _unhooked() -> contextlib.AbstractContextManager[object]:
    """Without a checkpoint's hooks, which would be steps of the function; `torch.func` has none."""
    if transforms_are_on():
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [t for item in value for t in _tensors(item)]
    return []
