"""Masks of packed documents, which Transformers makes of positions within them from 5.23 on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import masking_utils as hf

from flexcp.integrations.transformers.global_masks import _of_rows, mask_kind, separates_documents
from flexcp.kernels.reference import dense_mask

POSITIONS = torch.cat([torch.arange(3, 10), torch.arange(11), torch.arange(5)])[None]
DOCUMENTS = hf.find_packed_sequence_indices(POSITIONS)
NOTHING = torch.zeros(1, dtype=torch.long)


def remap_positions_for_packed_sequence(
    mask_function: Callable[..., Tensor], position_ids: Tensor
) -> Callable[..., Tensor]:
    """As Transformers has it, of which older versions are tested too."""

    def inner_mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return mask_function(b, h, position_ids[b, q], position_ids[b, k])

    return inner_mask


@pytest.mark.parametrize(
    ("rule", "asks_for_positions"),
    [
        (hf.causal_mask_function, False),
        (hf.sliding_window_causal_mask_function(3), False),
        (hf.chunked_causal_mask_function(4, NOTHING), True),
    ],
    ids=["causal", "window", "chunks"],
)
def test_rows_stand_for_positions_where_both_say_the_same(
    rule: Callable[..., Tensor], asks_for_positions: bool
) -> None:
    packed = hf.packed_sequence_mask_function(DOCUMENTS)
    given = hf.and_masks(packed, remap_positions_for_packed_sequence(rule, POSITIONS))
    found = _of_rows(given)
    at = torch.arange(POSITIONS.shape[1])
    wanted = dense_mask(given, at, at, batch=1, heads=1)
    assert torch.equal(dense_mask(found, at, at, batch=1, heads=1), wanted)
    assert (found is given or "remap" in _parts(found)) == asks_for_positions
    assert mask_kind(given) == mask_kind(rule)
    assert separates_documents(given)


def _parts(function: Callable[..., Tensor]) -> str:
    (functions,) = (cell.cell_contents for cell in function.__closure__ or ())
    return " ".join(f.__qualname__ for f in functions)
