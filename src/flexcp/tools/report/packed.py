"""Numbers packed into short texts, which a page unpacks again."""

from __future__ import annotations

import base64

import torch
from torch import Tensor


def pack_whole(numbers: Tensor) -> str:
    """Whole numbers >= 0, seven bits to a byte (the last byte of each is below 128), as base64.

    >>> pack_whole(torch.tensor([1, 127, 128]))
    'AX+AAQ=='
    """
    numbers = numbers.reshape(-1).to(torch.int64)
    if numbers.numel() == 0:
        return ""
    sizes = torch.ones_like(numbers)
    for bits in range(7, 63, 7):
        sizes += (numbers >> bits) > 0
    ends = sizes.cumsum(0)
    data = torch.zeros(int(ends[-1]), dtype=torch.uint8)
    for byte in range(int(sizes.max())):
        there = sizes > byte
        more = (sizes[there] > byte + 1) * 128
        value = ((numbers[there] >> (7 * byte)) & 127) + more
        data[(ends - sizes)[there] + byte] = value.to(torch.uint8)
    return base64.b64encode(bytes(data.tolist())).decode("ascii")


def pack_shares(shares: Tensor) -> str:
    """Numbers between 0 and 1 as 16 bits each, little endian, as base64.

    >>> pack_shares(torch.tensor([0.0, 1.0]))
    'AAD//w=='
    """
    whole = (shares.reshape(-1).double().clamp(0, 1) * 65535).round().to(torch.int64)
    both = torch.stack([whole & 255, whole >> 8], dim=1).reshape(-1)
    return base64.b64encode(bytes(both.tolist())).decode("ascii")
