import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest

import flexcp
from flexcp import FlexCPError, masks
from flexcp.ops import flex_attention

Q = torch.zeros(2, 4, 8, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": Q[..., :8]}, r"key of the query's head dim 16, got 8"),
        ({"key": Q[:, :2], "value": Q[:, :2]}, r"key and value of 4 heads.*enable_gqa=True"),
        (
            {"key": Q[:, :3], "value": Q[:, :3], "enable_gqa": True},
            r"divides the 4 query heads, got 3",
        ),
        ({"value": Q[:, :, :5]}, r"key and value of the same batch size, heads and length"),
        ({"key": Q.double()}, r"key of the query's dtype torch.float32, got torch.float64"),
        ({"value": Q.to("meta")}, r"value on the query's device cpu, got meta"),
        ({"query": Q.long()}, r"query of dtype float64.*got torch.int64"),
        ({"query": Q[0]}, r"query of shape \[batch, heads, length, head dim\], got shape"),
        (
            {"key": Q[:, :, :, :].repeat(2, 1, 1, 1), "value": Q.repeat(2, 1, 1, 1)},
            r"batch size 2, as the query, or 1, got 4",
        ),
        ({"sinks": torch.zeros(3)}, r"sinks of shape \(4,\).*got shape \(3,\)"),
        ({"sinks": torch.zeros(4, dtype=torch.int64)}, r"sinks of a floating-point dtype"),
        (
            {"block_mask": flexcp.build_block_grid(masks.causal(), 9)},
            r"a block_mask for q_len=8 and kv_len=8.*got one made for q_len=9",
        ),
        (
            {"block_mask": flexcp.build_block_grid(masks.causal(), 8, batch=3)},
            r"a block_mask for batch=2, or batch=1, got batch=3",
        ),
        ({"block_mask": 3}, r"block_mask to be a torch BlockMask.*got int"),
        (
            {"return_lse": True, "return_aux": AuxRequest(lse=True)},
            r"return_lse or return_aux, got both",
        ),
        ({"kernel_options": {"kernel": "fast"}}, r"kernel to be one of 'flash'.*got 'fast'"),
        ({"kernel_options": {"kernel": "flex"}}, r"CUDA tensors for the kernel 'flex'"),
        ({"kernel_options": {"BLOCK_X": 1}}, r"kernel_options to have the key 'kernel'"),
        (
            {"kernel_options": {"kernel": "flash"}, "score_mod": lambda s, b, h, q, k: s},
            r"a kernel that takes a score_mod, got kernel 'flash'",
        ),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"query": Q, "key": Q, "value": Q, **change}
    with pytest.raises(FlexCPError, match=message):
        flex_attention(**arguments)  # type: ignore[arg-type]


def test_a_second_derivative_is_refused() -> None:
    q = torch.randn(1, 1, 5, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(flex_attention(q, q, q).sum(), q, create_graph=True)
    with pytest.raises(FlexCPError, match=r"first derivatives.*'?\"reference\""):
        grad.sum().backward()
