"""What torch's own flex_attention may ask of a plan, and errors that say so.

A mode sees no more of it than its last step, an operator, which torch compiles: what is refused
there is an error of the compiler's at first. Before that step torch checks for itself: it knows
this rank's rows only, and the limits of its own kernels on CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from torch.nn.attention.flex_attention import noop_mask

from flexcp.errors import FlexCPError
from flexcp.torch_names import constant_in_graphs

_FILLED_IN = {
    "BACKEND": "AUTO",
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
}
"""The options that torch's flex_attention passes on for a caller who gives none."""

_OUTPUTS = ("OUTPUT_LOGSUMEXP", "OUTPUT_MAX")
"""Options of its own, which it takes from no caller: what the operator has to return."""

_NO_MASK = [1, 1, 1 << 30, 1 << 30]
"""Lengths and block sizes of the mask that it makes for a call without one."""


def require_plain_call(
    block_mask: tuple[Any, ...], kernel_options: Mapping[str, Any], captured: tuple[Any, ...]
) -> None:
    """Raises unless the operator's arguments are those of a call that a plan can answer."""
    if captured or any(name not in kernel_options for name in _OUTPUTS):
        refuse_operator()
    if kernel_options["OUTPUT_MAX"]:
        refuse_max_scores()
    own = {
        name: value
        for name, value in kernel_options.items()
        if name not in _OUTPUTS and (name not in _FILLED_IN or value != _FILLED_IN[name])
    }
    if own:
        refuse_options(str(own))
    *sizes, mask_mod = (*block_mask[:2], *block_mask[-3:])
    if mask_mod is not noop_mask or sizes != _NO_MASK:
        refuse_block_mask()


def refuse_options(given: str) -> NoReturn:
    """Refuses tuning options."""
    raise FlexCPError(
        "no kernel_options, since a plan runs on kernels of its own",
        f"kernel_options={given}",
        "leave them out under ContextParallel",
    )


def refuse_max_scores() -> NoReturn:
    """Refuses the largest score of each row."""
    raise FlexCPError(
        "no max_scores, which a plan does not compute",
        "AuxRequest(max_scores=True)",
        "ask for lse alone",
    )


def refuse_block_mask() -> NoReturn:
    """Refuses a mask that torch compares with this rank's rows."""
    raise FlexCPError(
        "no block_mask in a call of torch's flex_attention, which knows this rank's rows only",
        "a block_mask",
        "leave it out, since the plan has the mask; or call flexcp.flex_attention or "
        "flexcp.compat.flex_attention.flex_attention, which take one of the whole sequence",
    )


def refuse_operator() -> NoReturn:
    """Refuses what has gone around flex_attention."""
    raise FlexCPError(
        "attention by flex_attention",
        "a call of torch.ops.higher_order.flex_attention itself",
        "call flexcp.flex_attention",
    )


def refuse_gradients() -> NoReturn:
    """Refuses gradients where nothing keeps torch from it, as in a compiled function."""
    raise FlexCPError(
        "no gradients on CPU here, where torch's own flex_attention refuses them",
        "tensors that need them",
        "call flexcp.flex_attention or flexcp.compat.flex_attention.flex_attention",
    )


# Run while dynamo traces: it can't trace errors.
for _refuse in (refuse_options, refuse_max_scores, refuse_block_mask, refuse_operator):
    constant_in_graphs(_refuse)

_TORCH_SAYS = {
    "block_mask was created for": refuse_block_mask,
    "Returning max scores is not supported": refuse_max_scores,
    "FlexAttention does not support backward on": refuse_gradients,
}
"""How torch begins to say what a plan says better."""


@contextmanager
def refusing_by_name() -> Iterator[None]:
    """What torch's flex_attention raises in the body comes out as what it means, where known."""
    try:
        yield
    except Exception as error:
        refusal = refusal_behind(error)
        if refusal is None:
            raise
        raise refusal from error


def refusal_behind(error: Exception) -> FlexCPError | None:
    """What an error of torch's means to someone whose attention is over a plan, if anything.

    >>> print(refusal_behind(NotImplementedError("Returning max scores is not supported on CPU.")))
    expected no max_scores, which a plan does not compute, got AuxRequest(max_scores=True); ask for
    lse alone
    >>> refusal_behind(KeyError("x"))
    """
    if isinstance(error, FlexCPError):
        return None
    cause = error.__context__
    if type(error).__module__.startswith("torch._dynamo.") and isinstance(cause, FlexCPError):
        return FlexCPError(cause.expected, cause.got, cause.fix)  # dynamo has added to its text
    for phrase, refuse in _TORCH_SAYS.items():
        if phrase in str(error):
            try:
                refuse()
            except FlexCPError as refusal:
                return refusal
    return None
