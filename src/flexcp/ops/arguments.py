"""What a call of attention is given: who may answer it, in which types, and what fits together."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from flexcp.errors import FlexCPError, as_number, as_whole, check_flags, quote, require, told
from flexcp.grid import BlockGrid
from flexcp.torch_names import function_mode_is_on

P = ParamSpec("P")
R = TypeVar("R")

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

Seed = int | Tensor
"""64 bits: a number, or an integer tensor of one element in the host's memory."""


def overridable(function: Callable[P, R]) -> Callable[P, R]:
    """Lets `__torch_function__` of a mode that is on, or of an argument, answer in its place.

    >>> class Answer(torch.overrides.TorchFunctionMode):
    ...     def __torch_function__(self, func, types, args=(), kwargs=None):
    ...         return 42 if func is question else func(*args, **(kwargs or {}))
    >>> @overridable
    ... def question() -> int:
    ...     return 0
    >>> with Answer():
    ...     question()
    42
    >>> question()
    0
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        # Inside torch.compile, has_torch_function does not know of modes. The modes of torch.export
        # have nothing to say of it, and would not see what it does.
        is_asked = function_mode_is_on() or has_torch_function(args)
        if is_asked and not torch.compiler.is_exporting():
            return handle_torch_function(run, args, *args, **kwargs)
        return function(*args, **kwargs)

    return run


def autocast(*tensors: Tensor) -> list[Tensor]:
    """The tensors in the type of the autocast region, if there is one.

    float64 stays, and so does what is no tensor of floats: that is for checks to refuse.

    >>> with torch.autocast("cpu", dtype=torch.bfloat16):
    ...     [x.dtype for x in autocast(torch.ones(2), torch.ones(2, dtype=torch.float64))]
    [torch.bfloat16, torch.float64]
    """
    return [_cast(x) for x in tensors]


def _cast(x: Tensor) -> Tensor:
    if not isinstance(x, Tensor) or x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return x
    if not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def as_scale(scale: float | Tensor | None) -> float | None:
    """The factor on the scores as a number, whatever it was given as.

    >>> as_scale(torch.tensor(0.5)), as_scale(None)
    (0.5, None)
    """
    if isinstance(scale, Tensor) and scale.requires_grad:
        raise FlexCPError(
            "scale to be a number",
            "a tensor that requires a gradient, which a scale does not get",
            "multiply the query by it, and pass scale=1.0",
        )
    if scale is None:
        return None
    factor = scale if isinstance(scale, float) else as_number(scale)  # a compiler's symbols too
    if factor is None or not (factor == 0 or _SMALLEST_SCALE < abs(factor) < _LARGEST_SCALE):
        raise FlexCPError(
            "scale to be a finite number that float32 can hold",
            told(scale),
            "leave it out for 1 / sqrt(head dim), or pass a number",
        )
    return factor


_SMALLEST_SCALE, _LARGEST_SCALE = 1e-30, 1e30
"""What kernels multiply it with in float32 leaves neither 0 nor infinity."""


def check_return_lse(flag: object) -> None:
    """Raises unless it is True or False; a warm call opens no other file to find that out."""
    if not isinstance(flag, bool):
        check_flags(return_lse=flag)


def needs_gradients(*inputs: Tensor | None) -> bool:
    """Whether a backward pass will follow; all ranks of a plan have to answer the same."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def shape_text(x: object) -> str:
    """What to say of something that should have been a tensor of another shape."""
    if not isinstance(x, Tensor):
        return type(x).__name__
    return "a nested tensor" if x.is_nested else str(tuple(x.shape))


def check_gradients(gradients: str) -> None:
    """Raises unless it is known what is done with the gradients of the ranks."""
    if not isinstance(gradients, str) or gradients not in ("summed", "averaged"):
        raise FlexCPError(
            'gradients to be "summed" or "averaged"',
            quote(gradients),
            "say what your trainer does with the gradients of the ranks",
        )


def check_tensors(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> None:
    """Raises unless q, k and v fit each other."""
    tensors = {"query": q, "key": k, "value": v}
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise FlexCPError(f"{name} to be a tensor", type(x).__name__, "pass a torch.Tensor")
        if x.is_nested:
            raise FlexCPError(
                f"{name} to be a dense tensor", "a nested tensor", "pad it, or pack it as documents"
            )
        if x.dim() != 4:
            raise FlexCPError(
                f"{name} of shape [batch, heads, length, head dim]",
                f"shape {tuple(x.shape)}",
                "add the missing dimensions with unsqueeze",
            )
        if x.dtype not in FLOATS:
            raise FlexCPError(
                f"{name} of dtype float64, float32, bfloat16 or float16",
                f"{x.dtype}",
                f"convert it: {name}.to(torch.float32)",
            )
    for name, x in (("key", k), ("value", v)):
        if x.dtype != q.dtype:
            raise FlexCPError(
                f"{name} of the query's dtype {q.dtype}", f"{x.dtype}", "convert one of them"
            )
        if x.device != q.device:
            raise FlexCPError(
                f"{name} on the query's device {q.device}", f"{x.device}", "move one of them"
            )
    _check_shapes(q, k, v, enable_gqa)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> None:
    if k.shape[-1] != q.shape[-1]:
        raise FlexCPError(
            f"key of the query's head dim {q.shape[-1]}",
            f"{k.shape[-1]}",
            "only the value may have another head dim",
        )
    if k.shape[:3] != v.shape[:3]:
        raise FlexCPError(
            "key and value of the same batch size, heads and length",
            f"shapes {tuple(k.shape)} and {tuple(v.shape)}",
            "every key needs a value",
        )
    if k.shape[0] != 1 and k.shape[0] != q.shape[0]:  # dynamo gets `not in` of dynamic shapes wrong
        raise FlexCPError(
            f"key and value of batch size {q.shape[0]}, as the query, or 1",
            f"{k.shape[0]}",
            "expand them to the query's batch size",
        )
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads != kv_heads and not enable_gqa:
        raise FlexCPError(
            f"key and value of {heads} heads, as the query",
            f"{kv_heads}",
            "pass enable_gqa=True if query heads share key heads",
        )
    if kv_heads == 0 or heads % kv_heads:
        raise FlexCPError(
            f"a number of key heads that divides the {heads} query heads",
            f"{kv_heads}",
            "query head h reads key head h // (query heads / key heads)",
        )
    for name, x in (("query", q), ("value", v)):
        if x.shape[-1] == 0:
            raise FlexCPError(f"{name} of head dim 1 or more", "0", "drop the call")


def check_sinks(sinks: Tensor, q: Tensor) -> None:
    """Raises unless there is one floating-point sink per query head, where the query is."""
    if type(sinks) is not Tensor:
        require("sinks", sinks, Tensor, "pass one logit per query head")
    if sinks.is_nested:
        raise FlexCPError("sinks as a dense tensor", "a nested tensor", "pass one logit per head")
    if sinks.shape != (q.shape[1],):
        raise FlexCPError(
            f"sinks of shape ({q.shape[1]},): one logit per query head",
            f"shape {tuple(sinks.shape)}",
            "sinks are per query head, also with shared key heads",
        )
    if sinks.dtype not in FLOATS:
        raise FlexCPError("sinks of a floating-point dtype", f"{sinks.dtype}", "convert them")
    if sinks.device != q.device:
        raise FlexCPError(f"sinks on the query's device {q.device}", f"{sinks.device}", "move them")


def check_mask_size(q: Tensor, k: Tensor, grid: BlockGrid) -> None:
    """Raises unless a block mask was made for tensors like these."""
    check_mask_lengths(q, k, grid.q_len, grid.kv_len)
    grid.require_planes(*q.shape[:2])


def check_mask_lengths(q: Tensor, k: Tensor, q_len: int, kv_len: int) -> None:
    """Raises unless a block mask has the lengths of the tensors."""
    if (q_len, kv_len) != (q.shape[2], k.shape[2]):
        raise FlexCPError(
            f"a block_mask for q_len={q.shape[2]} and kv_len={k.shape[2]}, as the tensors are",
            f"one made for q_len={q_len} and kv_len={kv_len}",
            "build it for these lengths; it is not cropped or padded",
        )


def as_dropout_p(p: float) -> float:
    """The share of weights that are dropped, if it is one.

    >>> as_dropout_p(0)
    0.0
    """
    is_number = isinstance(p, (int, float)) and not isinstance(p, bool)
    if not is_number or not 0 <= p < 1:  # neither is NaN
        raise FlexCPError(
            "dropout_p to be a number of at least 0 and below 1",
            quote(p),
            "pass the share of attention weights that are to be dropped",
        )
    return float(p) if p > 0 else 0.0  # a constant, where a compiler takes numbers for symbols


def as_dropout_seed(seed: object) -> Seed | None:
    """The seed that was given, if it is one; None for one that is to be drawn."""
    if seed is None:
        return None
    if isinstance(seed, Tensor) and not seed.is_nested:
        is_integer = not (seed.is_floating_point() or seed.is_complex()) and seed.numel() == 1
        if not is_integer or seed.dtype == torch.bool or seed.device.type != "cpu":
            raise _no_seed(
                f"a tensor of shape {tuple(seed.shape)} and {seed.dtype} on {seed.device}"
            )
        return seed
    if isinstance(seed, int) and not isinstance(seed, bool):
        if torch.compiler.is_compiling():
            return seed
        if not -(1 << 63) <= seed < 1 << 64:
            raise _no_seed(quote(seed))
        return seed if seed < 1 << 63 else seed - (1 << 64)  # as torch.seed() gives them
    number = None if isinstance(seed, Tensor) else as_whole(seed)
    if number is not None:  # numpy's integers
        return as_dropout_seed(number)
    raise _no_seed(told(seed))


def _no_seed(got: str) -> FlexCPError:
    return FlexCPError(
        "dropout_seed to be an integer of 64 bits, or a CPU tensor of one",
        got,
        "pass another integer in every step, or None to draw it from torch's default generator",
    )
