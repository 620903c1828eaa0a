"""flex_cp_allgather: keys and values of all ranks, as a custom op with gradients.

Annotations here are read by torch when the ops are defined, so they are not postponed.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from flexcp.comm.faults import answered
from flexcp.errors import FlexCPError
from flexcp.torch_names import all_gather, process_group_of
from flexcp.torch_names import functional_collectives as funcol


@torch.library.custom_op("flexcp::flex_cp_allgather", mutates_args=())
def flex_cp_allgather(k: Tensor, v: Tensor, seq_dim: int, pg_name: str) -> tuple[Tensor, Tensor]:
    """K and V of all ranks, one rank after the other along `seq_dim`; ranks may differ in length.

    The gradient of a rank's rows is the sum over all ranks of what they say of them. Under
    torch.compile shapes are fixed beforehand, so ranks must then have as many rows each.

    Args:
        k: This rank's keys.
        v: This rank's values.
        seq_dim: The sequence dimension.
        pg_name: Name of the process group.
    """
    group = _group(pg_name)
    sizes = _sizes(k.shape[seq_dim], v.shape[seq_dim], k.device, group)
    return _gathered(k, seq_dim, sizes[0], group), _gathered(v, seq_dim, sizes[1], group)


@flex_cp_allgather.register_fake
def _gathered_shapes(k: Tensor, v: Tensor, seq_dim: int, pg_name: str) -> tuple[Tensor, Tensor]:
    ranks = _group(pg_name).size()
    return _longer(k, seq_dim, ranks), _longer(v, seq_dim, ranks)


@torch.library.custom_op("flexcp::flex_cp_allgather_backward", mutates_args=())
def _scatter_sum(
    grad_k: Tensor, grad_v: Tensor, rows_k: int, rows_v: int, seq_dim: int, pg_name: str
) -> tuple[Tensor, Tensor]:
    group = _group(pg_name)
    sizes = _sizes(rows_k, rows_v, grad_k.device, group)
    return _summed(grad_k, seq_dim, sizes[0], group), _summed(grad_v, seq_dim, sizes[1], group)


@_scatter_sum.register_fake
def _own_shapes(
    grad_k: Tensor, grad_v: Tensor, rows_k: int, rows_v: int, seq_dim: int, pg_name: str
) -> tuple[Tensor, Tensor]:
    del pg_name
    shapes = []
    for grad, rows in ((grad_k, rows_k), (grad_v, rows_v)):
        shape = list(grad.shape)
        shape[seq_dim] = rows
        shapes.append(grad.new_empty(shape))
    return shapes[0], shapes[1]


def flex_cp_allgather_backward(
    grad_full_k: Tensor, grad_full_v: Tensor, seq_dim: int, pg_name: str
) -> tuple[Tensor, Tensor]:
    """This rank's rows of gradients for all rows, summed over ranks that have as many rows each.

    Args:
        grad_full_k: What this rank says of the keys of all ranks.
        grad_full_v: What it says of their values.
        seq_dim: The sequence dimension.
        pg_name: Name of the process group.
    """
    ranks = _group(pg_name).size()
    rows = [x.shape[seq_dim] for x in (grad_full_k, grad_full_v)]
    if any(n % ranks for n in rows):
        raise FlexCPError(
            f"lengths that {ranks} ranks share evenly",
            f"{rows[0]} keys and {rows[1]} values",
            "let autograd call it: flex_cp_allgather knows how many rows each rank has",
        )
    each = [n // ranks for n in rows]
    summed: tuple[Tensor, Tensor] = _scatter_sum(grad_full_k, grad_full_v, *each, seq_dim, pg_name)
    return summed


def _setup(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
    del output
    k, v, ctx.seq_dim, ctx.pg_name = inputs
    ctx.rows = (k.shape[ctx.seq_dim], v.shape[ctx.seq_dim])


def _backward(
    ctx: Any, grad_k: Tensor, grad_v: Tensor
) -> tuple[Tensor | None, Tensor | None, None, None]:
    own = _scatter_sum(grad_k, grad_v, *ctx.rows, ctx.seq_dim, ctx.pg_name)
    return own[0], own[1], None, None


flex_cp_allgather.register_autograd(_backward, setup_context=_setup)


def _group(name: str) -> ProcessGroup:
    found: ProcessGroup = process_group_of(name)
    return found


def _sizes(k_rows: int, v_rows: int, device: torch.device, group: ProcessGroup) -> list[list[int]]:
    """Rows of K and of V, by rank."""
    own = torch.tensor([k_rows, v_rows], device=device)
    every = _all_gather(own, group)
    table: list[list[int]] = every.view(-1, 2).t().tolist()
    return table


def _gathered(x: Tensor, dim: int, sizes: list[int], group: ProcessGroup) -> Tensor:
    rows, most = x.movedim(dim, 0), max(sizes)
    padded = rows.new_zeros(most, *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    every = _all_gather(padded, group)
    parts = [part[:n] for part, n in zip(every.split(most), sizes, strict=True)] if most else [rows]
    return torch.cat(parts).movedim(0, dim).contiguous()


def _summed(grad: Tensor, dim: int, sizes: list[int], group: ProcessGroup) -> Tensor:
    rows, own = grad.movedim(dim, 0).contiguous(), sizes[group.rank()]
    with answered(group, "the gradient of flex_cp_allgather"):
        came = funcol.all_to_all_single(rows, [own] * group.size(), sizes, group)
        parts = funcol.wait_tensor(came).view(group.size(), own, *rows.shape[1:])
    total: Tensor = parts.sum(0)
    return total.movedim(0, dim).contiguous()


def _all_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    with answered(group, "flex_cp_allgather"):
        every: Tensor = funcol.wait_tensor(all_gather(x, group))
    return every


def _longer(x: Tensor, dim: int, times: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] *= times
    return x.new_empty(shape)
