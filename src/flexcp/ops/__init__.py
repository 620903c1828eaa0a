"""A tensor's way through attention: on one device, and over a plan.

In the order in which a tensor meets them: `api` (or `varlen` with `packed_masks` before it) and
`arguments`; `local` (with `mask_cache`), or `sharded` (with `agreement` and `swap`), each an
`AttentionOp` as `interface` has it; `autograd` around either; then `executor`, with `program` and
`rows`. Inside torch.compile it is `compiled`, or `traced` (with `fetch` and `positions`) where
there is a score_mod.
"""

from flexcp.ops.api import attention, flex_attention
from flexcp.ops.varlen import varlen_attention

__all__ = ["attention", "flex_attention", "varlen_attention"]
