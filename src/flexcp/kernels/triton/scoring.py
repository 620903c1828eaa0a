"""A score function as the arguments of a launch: generated Triton functions, and what they read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexcp.kernels.triton.emit import EmittedScore, emitted
from flexcp.kernels.triton.generated import functions_of

if TYPE_CHECKING:
    from flexcp.kernels.compiled_shapes import CompiledShapes
    from flexcp.kernels.score import ScoreMod


@dataclass(frozen=True, eq=False)
class ScoreArguments:
    """A score function for one pass over the pairs of some shapes."""

    emitted: EmittedScore
    given: tuple[Any, ...]
    """What the functions get: global positions of queries and keys, the numbers of the first batch
    element and head, the scale, and of each captured tensor its address, how many elements, and the
    stride and size of each dimension."""

    @property
    def functions(self) -> Mapping[str, Any]:
        """The generated functions, by name."""
        return functions_of(self.emitted.source)

    @classmethod
    def of(
        cls, mod: ScoreMod | None, compiled: CompiledShapes, device: torch.device, scale: float
    ) -> ScoreArguments | None:
        """Those of a function that the emitter knows; None without one."""
        if mod is None:
            return None
        found = emitted(mod)
        assert isinstance(found, EmittedScore), f"the registry lets no {found} through"
        positions = (compiled.positions("q", device), compiled.positions("kv", device))
        numbers = (packed(mod.first_batch), packed(mod.first_head), float(scale))
        operands = (part for x in found.operands for part in _described(x, device))
        return cls(found, (*positions, *numbers, *operands))


def _described(x: Tensor, device: torch.device) -> Iterator[Any]:
    x = x.detach().to(device).resolve_neg()
    yield x.view(torch.uint8) if x.dtype == torch.bool else x
    yield packed(x.numel())
    for stride, size in zip(x.stride(), x.shape, strict=True):
        yield packed(stride)
        yield packed(size)


def packed(number: int) -> int:
    """A number as it is passed inside of a tuple: 64 bits wide, never 1 nor a multiple of 16.

    Triton compiles a kernel anew for numbers that are, and can't be told not to for a tuple's.

    >>> packed(0) == 1099511627793, packed(16) % 16
    (True, 1)
    """
    return (1 << 40) + (number << 5) + 17


def score_constants(score: ScoreArguments | None, *names: str) -> dict[str, Any]:
    """The arguments of a kernel that say what is done to the scores: "SCORE", "PULL_BACK"."""
    if score is None:
        return {"given": (), **dict.fromkeys(names)}
    return {"given": score.given, **{name: score.functions[name.lower()] for name in names}}
