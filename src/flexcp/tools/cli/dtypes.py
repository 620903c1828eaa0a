"""Types of tensors by their names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexcp.errors import FlexCPError, quote

if TYPE_CHECKING:
    import torch

_NAMES = {
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
    "float32": "float32",
    "fp32": "float32",
    "float64": "float64",
    "fp64": "float64",
}


def dtype_of(name: str) -> torch.dtype:
    """A floating-point type by the name that PyTorch or people give it.

    >>> dtype_of("bf16")
    torch.bfloat16
    """
    import torch

    full = _NAMES.get(name.removeprefix("torch.").lower())
    if full is None:
        raise FlexCPError(
            "a floating-point type",
            quote(name),
            f"pass one of {', '.join(sorted(set(_NAMES.values())))}",
        )
    found: torch.dtype = getattr(torch, full)
    return found
