"""FlexAttention over a sequence sharded across ranks, compared with one process.

torchrun --standalone --nproc-per-node 2 examples/flex_attention_cp.py [--schedule ring]

--schedule pytorch is PyTorch's own way, by its names: every rank makes its part of the block mask,
and keys and values are gathered. The others are flexcp's: a plan decides what moves when.
"""

from __future__ import annotations

import argparse
import math
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import flexcp
from flexcp.compat.context_parallel import (
    _context_parallel_shard,
    _ContextParallel,
    _PTRRLoadBalancer,
    context_parallel_unshard,
)
from flexcp.compat.flex_attention import create_block_mask, flex_attention

SCHEDULES = ("pytorch", "auto", "exchange", "ring", "allgather", "ulysses", "hybrid")
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


class Attention(nn.Module):
    def forward(self, query, key, value, score_mod=None, block_mask=None):
        return flex_attention(query, key, value, score_mod, block_mask=block_mask, enable_gqa=True)


def packed_documents(tokens: int, device: torch.device):
    """A causal mask within each of four documents."""
    ends = torch.tensor([tokens // 10, tokens // 3, tokens // 2, tokens])
    ids = torch.bucketize(torch.arange(tokens), ends, right=True).to(device)

    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (ids[q_idx] == ids[kv_idx])

    return mask_mod


def alibi(score, b, h, q_idx, kv_idx):
    """Scores fall with distance: right only if positions are those of the whole sequence."""
    return score - 0.05 * (h + 1) * (q_idx - kv_idx)


def by_pytorchs_names(mesh: DeviceMesh, tensors: list[Tensor], mask_mod, block_size: int):
    tokens = tensors[0].shape[2]
    device = tensors[0].device
    block_mask = create_block_mask(
        mask_mod, None, None, tokens, tokens, device=device, BLOCK_SIZE=block_size
    )
    balancer = _PTRRLoadBalancer(block_mask, mesh.size())
    *local, grad, local_mask = _context_parallel_shard(
        mesh, [*tensors, block_mask], [2] * 5, balancer
    )
    style = _ContextParallel(seq_dim=2, attention_type=_ContextParallel.AttentionType.FLEX)
    attention = parallelize_module(Attention(), mesh, style)
    local = [x.requires_grad_() for x in local]
    out = attention(*local, score_mod=alibi, block_mask=local_mask)
    out.backward(grad)
    parts = [out.detach(), *(x.grad for x in local)]
    return context_parallel_unshard(mesh, parts, [2] * 4, balancer)


def by_plan(mesh: DeviceMesh, tensors: list[Tensor], mask_mod, block_size: int, schedule: str):
    q, k, _, _ = tensors
    plan = flexcp.make_plan(
        mask_mod,
        q.shape[2],
        mesh,
        schedule=schedule,
        block_size=block_size,
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim=q.shape[3],
        dtype=q.dtype,
        batch=q.shape[0],
    )
    *local, grad = (plan.shard(x, 2) for x in tensors)
    local = [x.requires_grad_() for x in local]
    out = flexcp.attention(*local, plan, score_mod=alibi)
    out.backward(grad)
    return [plan.unshard(x, 2) for x in (out.detach(), *(x.grad for x in local))]


def by_one_process(tensors: list[Tensor], mask_mod):
    q, k, v, grad = tensors
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    out = flexcp.flex_attention(*whole, alibi, flexcp.Mask(mask_mod), enable_gqa=True)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in whole)]


def compare(mesh: DeviceMesh, options: argparse.Namespace, device: torch.device) -> bool:
    """Whether output and gradients are those of one process; rank 0 prints by how much."""
    torch.manual_seed(0)
    dtype = DTYPES[options.dtype]
    shapes = [(options.batch, heads, options.tokens, 32) for heads in (4, 2, 2, 4)]
    tensors = [torch.randn(shape, dtype=dtype).to(device) for shape in shapes]
    mask_mod = packed_documents(options.tokens, device)
    if options.schedule == "pytorch":
        found = by_pytorchs_names(mesh, tensors, mask_mod, options.block_size)
    else:
        found = by_plan(mesh, tensors, mask_mod, options.block_size, options.schedule)
    wanted = by_one_process(tensors, mask_mod)
    # Sums in another order differ by rounding, which adds up with the number of keys.
    allowed = 4 * torch.finfo(dtype).eps * math.sqrt(options.tokens)
    close = True
    for name, a, b in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
        difference, largest = float((a - b).abs().max()), float(b.abs().max())
        close &= difference <= allowed * largest
        if dist.get_rank() == 0:
            print(f"  {name:3} differs by at most {difference:.1e} of {largest:.1f}")
    return close


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedule", choices=SCHEDULES, default="pytorch")
    parser.add_argument("--tokens", type=int, default=1003)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    options = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    kind = "cuda" if has_gpu else "cpu"
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    # Ranks compare what they are about to do in CPU memory, so gloo is there as well.
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo")
    ranks = dist.get_world_size()
    shape = (2, ranks // 2) if options.schedule == "hybrid" else (ranks,)
    try:
        mesh = init_device_mesh(kind, shape)
        if dist.get_rank() == 0:
            print(f"{options.tokens} tokens on {ranks} ranks ({kind}), {options.schedule}:")
        close = compare(mesh, options, device)
    finally:
        dist.destroy_process_group()
    if not close:
        raise SystemExit("the ranks' result is not that of one process")


if __name__ == "__main__":
    main()
