"""Public names of PyTorch's modules: all are here, and take the same arguments."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest
import torch.distributed.tensor.experimental as torch_experimental
import torch.distributed.tensor.experimental._attention as torch_attention
import torch.distributed.tensor.experimental._context_parallel as torch_cp
import torch.nn.attention.flex_attention as torch_flex
import torch.nn.attention.varlen as torch_varlen

from flexcp.compat import context_parallel, flex_attention, varlen

MODULES = [
    (torch_flex, flex_attention),
    (torch_varlen, varlen),
    (torch_experimental, context_parallel),
    (torch_cp, context_parallel),
    (torch_attention, context_parallel),
]
ABSENT = {"_templated_ring_attention": "how PyTorch computes, which code does not call"}
"""Names that are not here, and why."""
BEYOND = {
    ("varlen_attn", "plan"): "runs over ranks",
    ("_create_cp_block_mask", "given"): "the order of arguments of torch before 2.15, and since",
}
"""Arguments that torch does not have, and why."""
if not flex_attention.HAS_DQ_WRITE_ORDER:
    BEYOND |= {
        ("create_block_mask", argument): "torch has it from 2.13 on"
        for argument in ("separate_full_blocks", "compute_dq_write_order", "dq_kv_order")
    }
NAMES = [
    pytest.param(theirs, ours, name, id=f"{ours.__name__.split('.')[-1]}.{name}")
    for theirs, ours in MODULES
    for name in theirs.__all__
    if name not in ABSENT
]


def arguments(function: object) -> list[tuple[str, object]]:
    """Names and defaults, in order; which of them may be given by position only."""
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return [(f"{p.kind.name} {p.name}", p.default) for p in parameters]


@pytest.mark.parametrize(("theirs", "ours", "name"), NAMES)
def test_a_public_name_of_torch_is_here_and_takes_the_same_arguments(
    theirs: ModuleType, ours: ModuleType, name: str
) -> None:
    wanted, found = getattr(theirs, name), getattr(ours, name)
    if found is wanted or not callable(wanted):
        return
    extra = [f" {argument}" for of, argument in BEYOND if of == name]
    given = [x for x in arguments(found) if not any(x[0].endswith(e) for e in extra)]
    assert given == arguments(wanted)
    if inspect.isclass(wanted):
        missing = {x for x in dir(wanted) if not x.startswith("_")} - set(dir(found))
        assert not missing
