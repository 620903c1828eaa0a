"""Names that code imports from PyTorch's modules, and what they do here."""

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.distributed.tensor import Shard

from flexcp import FlexCPError
from flexcp.compat import context_parallel as cp
from flexcp.compat import flex_attention as flex
from flexcp.testing import spawn
from flexcp.torch_names import NEWER


def test_definitions_are_torchs_own() -> None:
    import torch.distributed.tensor.experimental as torch_experimental
    import torch.nn.attention.flex_attention as torch_flex

    for name in (
        "_mask_mod_signature", "_score_mod_signature", "_DEFAULT_SPARSE_BLOCK_SIZE",
        "_round_up_to_multiple", "_vmap_for_bhqkv", "_identity", "_create_empty_block_mask",
        "_convert_block_mask_to_mask", "_convert_mask_to_block_mask", "_dense_to_ordered",
        "_create_sparse_block_from_block_mask", "_apply_kernel_options", "_WARNINGS_SHOWN",
        "flex_attention_hop", "_compute_dq_write_order_from_block_mask",
    ):  # fmt: skip
        if f"{torch_flex.__name__}.{name}" not in NEWER or hasattr(torch_flex, name):
            assert getattr(flex, name) is getattr(torch_flex, name)
    for name in ("implicit_replication", "local_map", "register_sharding"):
        assert getattr(cp, name) is getattr(torch_experimental, name)


def test_a_block_mask_from_a_dense_mask_is_attended_by() -> None:
    allowed = flex.create_mask(lambda b, h, q, kv: (q - kv) % 3 != 1, 1, 1, 128, 96, device="cpu")
    blocks = flex._convert_mask_to_block_mask(
        allowed, Q_BLOCK_SIZE=32, KV_BLOCK_SIZE=32, separate_full_blocks=True
    )
    mask = flex._create_sparse_block_from_block_mask(
        blocks, lambda b, h, q, kv: allowed[b, h, q, kv], (128, 96), 32, 32
    )
    q, k = torch.randn(1, 2, 128, 8), torch.randn(1, 2, 96, 8)
    wanted = functional.scaled_dot_product_attention(q[:, :1], k[:, :1], k[:, :1], allowed)
    found = flex.flex_attention(q[:, :1], k[:, :1], k[:, :1], block_mask=mask)
    torch.testing.assert_close(found, wanted)
    # As with torch, the function is asked for every head, also for those that its table has not.
    with pytest.raises(IndexError, match="index 1 is out of bounds for dimension 1 with size 1"):
        flex.flex_attention(q, k, k, block_mask=mask)


def test_the_default_balancer_is_head_tail_unless_it_is_switched_off() -> None:
    found = cp._create_default_load_balancer(7, 2, "cpu")
    assert isinstance(found, cp._HeadTailLoadBalancer)
    cp._cp_options.enable_load_balance = False
    try:
        assert cp._create_default_load_balancer(8, 2, "cpu") is None
    finally:
        cp._cp_options.enable_load_balance = True


def _causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def test_what_ranks_do_with_the_names_is_what_one_process_computes() -> None:
    q, k, v = (torch.randn(1, 2, 300, 8, dtype=torch.float64) for _ in range(3))

    def rank(mesh):
        style = cp._ContextParallel(2, cp._ContextParallel.AttentionType.FLEX)
        balancer = cp._HeadTailLoadBalancer(300, 2, "cpu")
        style._apply(torch.nn.Identity(), mesh)
        local = cp._context_parallel_shard(mesh, [q, k, v], [2, 2, 2], balancer)
        mask = cp._create_cp_block_mask(_causal, 1, 2, 300, 300, mesh)
        plain = cp._ContextParallel(2, cp._ContextParallel.AttentionType.SDPA)
        plain._apply(torch.nn.Identity(), mesh)
        given, named = plain.sdpa_input_fn(None, tuple(local[:2]), {"value": local[2]}, mesh)
        assert [x.placements for x in (*given, named["value"])] == [(Shard(2),)] * 3
        answer = functional.scaled_dot_product_attention(*given, named["value"], is_causal=True)
        same = plain.sdpa_output_fn(None, None, answer, mesh)
        newer = cp._create_cp_block_mask(_causal, 1, 2, 300, 300, (64, 32), mesh, balancer)
        assert (newer.BLOCK_SIZE, newer.shape) == ((64, 32), mask.shape)
        name = mesh.get_group().group_name
        keys = cp.flex_cp_allgather(local[1], local[2], 2, name)
        out = flex.flex_attention(local[0], *keys, block_mask=mask)
        torch.testing.assert_close(same, out)
        back = cp.flex_cp_allgather_backward(
            torch.ones(1, 2, 6, 8), torch.ones(1, 2, 4, 8), 2, name
        )
        uneven = torch.ones(1, 2, 5, 8)
        with pytest.raises(FlexCPError, match="2 ranks share evenly"):
            cp.flex_cp_allgather_backward(uneven, uneven, 2, name)
        # Shards of another layout that are still alive say nothing of what attention returned.
        other = cp._context_parallel_shard(mesh, [torch.zeros(300)], [0], None)
        kept = cp._context_parallel_shard(mesh, [q], [2], balancer)
        whole = cp.context_parallel_unshard(mesh, [out * 1.0], [2])[0]
        return whole, [x.shape[2] for x in back], float(back[0].sum()), len(other) + len(kept)

    wanted = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    for whole, rows, total, _ in spawn(rank, 2):
        torch.testing.assert_close(whole, wanted)
        assert rows == [3, 2]
        assert total == 2.0 * 2 * 3 * 8


def test_emulated_ranks_are_refused_since_all_would_get_the_rows_of_the_first() -> None:
    local_tensor = pytest.importorskip("torch.distributed._local_tensor")

    def rank(mesh):
        with (
            local_tensor.LocalTensorMode(2),
            pytest.raises(FlexCPError, match=r"got torch's LocalTensorMode.*testing\.simulate"),
        ):
            cp._context_parallel_shard(mesh, [torch.arange(8)], [0])
        return True

    assert spawn(rank, 2) == [True, True]
