"""Documents that are packed into a sequence: where they begin, and positions within them."""

from __future__ import annotations

import torch
from torch import Tensor


def begins(documents: Tensor) -> Tensor:
    """Bool [B, S] Whether a token is the first of its document, given document ids [B, S].

    >>> begins(torch.tensor([[7, 7, 3]]))
    tensor([[ True, False,  True]])
    """
    first = torch.ones_like(documents[:, :1], dtype=torch.bool)
    return torch.cat([first, documents[:, 1:] != documents[:, :-1]], dim=1)


def positions_within(documents: Tensor) -> Tensor:
    """int64 [B, S] Positions that begin at 0 in every document, given document ids [B, S].

    >>> positions_within(torch.tensor([[7, 7, 7, 3, 3]]))
    tensor([[0, 1, 2, 0, 1]])
    """
    every = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    return every - torch.where(begins(documents), every, 0).cummax(1).values
