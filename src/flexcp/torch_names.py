"""torch's private names that flexcp relies on, all of them, looked up here and nowhere else.

A name that a version of torch lacks says so when it is used, and by which name; what does not need
it goes on working.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import Tensor

from flexcp.errors import FlexCPError

F = TypeVar("F", bound=Callable[..., Any])


class Absent:
    """Stands for a name that this torch lacks: whatever is done with it raises."""

    def __init__(self, path: str) -> None:
        self._path = path

    def fail(self) -> NoReturn:
        """Raises the error that names what is missing."""
        if self._path in NEWER:
            raise FlexCPError(
                f"torch {NEWER[self._path]} or newer for {self._path}",
                f"torch {torch.__version__}",
                "update torch, or do without it",
            )
        raise FlexCPError(
            f"{self._path}, which the versions of torch that flexcp is tested with have",
            f"torch {torch.__version__} without it",
            "install a tested version (the page on versions lists them), and report this",
        )

    def __call__(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Fails."""
        self.fail()

    def __getattr__(self, _name: str) -> NoReturn:
        self.fail()


def find(path: str) -> Any:
    """What torch has under a full name, modules that are not loaded yet included.

    >>> find("torch.overrides._push_mode").__name__
    '_push_mode'
    >>> type(find("torch.no.such.name")).__name__
    'Absent'
    """
    first, *rest = path.split(".")
    found: Any = importlib.import_module(first)
    known = first
    for name in rest:
        known = f"{known}.{name}"
        if not hasattr(found, name):
            try:
                found = importlib.import_module(known)
            except ImportError:
                return Absent(path)
        else:
            found = getattr(found, name)
    return found


def require_present(name: Any) -> None:
    """Raises if a name that was looked up is one that this torch lacks."""
    if isinstance(name, Absent):
        name.fail()


# Dispatch: operators, and modes that see every one of them.
if TYPE_CHECKING:
    from torch._ops import OpOverload as OpOverload
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
else:
    OpOverload = find("torch._ops.OpOverload")
    TorchDispatchMode = find("torch.utils._python_dispatch.TorchDispatchMode")
make_wrapper_subclass: Any = find("torch.Tensor._make_wrapper_subclass")
without_function_subclasses: Callable[[], AbstractContextManager[Any]] = find(
    "torch._C.DisableTorchFunctionSubclass"
)
has_kernel_for: Callable[[str, str], bool] = find("torch._C._dispatch_has_kernel_for_dispatch_key")

# Function modes.
function_mode_is_on: Callable[[], bool] = find("torch._C._is_torch_function_mode_enabled")
function_modes_on: Callable[[], int] = find("torch._C._len_torch_function_stack")
push_function_mode: Callable[[Any], None] = find("torch.overrides._push_mode")
pop_function_mode: Callable[[], Any] = find("torch.overrides._pop_mode")

# Attention, and layers that torch fuses with it.
sdpa: Callable[..., Tensor] = find("torch._C._nn.scaled_dot_product_attention")
fused_layers: tuple[Any, ...] = (
    find("torch._transformer_encoder_layer_fwd"),
    find("torch._native_multi_head_attention"),
)


def current_flash_attention_impl() -> str | None:
    """Which FlashAttention torch calls; None for its own, the only one before 2.10."""
    found = find("torch.nn.attention.current_flash_attention_impl")
    name: str | None = None if isinstance(found, Absent) else found()
    return name


# torch.func.
transforms_are_on: Callable[[], bool] = find("torch._C._are_functorch_transforms_active")
innermost_transform: Callable[[], Any] = find("torch._C._functorch.peek_interpreter_stack")
is_transformed: Callable[[Tensor], bool] = find("torch._C._functorch.is_functorch_wrapped_tensor")

# Autograd: which backward pass runs, and what is checkpointed.
current_backward_pass: Callable[[], int] = find("torch._C._current_graph_task_id")
"""A number of its own for each; -1 outside of backward passes."""
current_node: Callable[[], Any] = find("torch._C._current_autograd_node")
next_node_number: Callable[[], int] = find("torch._C._autograd._get_sequence_nr")
innermost_saved_tensor_hooks: Callable[[bool], tuple[Any, Any] | None] = find(
    "torch._C._autograd._top_saved_tensors_default_hooks"
)


def is_in_backward_pass() -> bool:
    """Whether autograd is running a backward pass on this thread.

    >>> is_in_backward_pass()
    False
    """
    return current_backward_pass() != -1


def fake_mode_is_on() -> bool:
    """Whether tensors that are made now have shapes and no numbers.

    >>> fake_mode_is_on()
    False
    """
    return _dispatch_mode(_mode_keys.FAKE) is not None


def is_recorded() -> bool:
    """Whether `make_fx` writes down what operators do.

    >>> is_recorded()
    False
    """
    return _dispatch_mode(_mode_keys.PROXY) is not None


def recorded_tensors() -> Collection[Tensor]:
    """Those that `make_fx` knows: what it writes down takes others in their place."""
    mode = _dispatch_mode(_mode_keys.PROXY)
    found: Collection[Tensor] = () if mode is None else mode.tracer.tensor_tracker
    return found


_dispatch_mode: Callable[[Any], Any] = find("torch._C._get_dispatch_mode")
_mode_keys: Any = find("torch._C._TorchDispatchModeKey")


def without_fake_mode() -> AbstractContextManager[object]:
    """Tensors that are made in the body have numbers."""
    found: AbstractContextManager[object] = find(
        "torch._subclasses.fake_tensor.unset_fake_temporarily"
    )()
    return found


def without_recording() -> AbstractContextManager[object]:
    """`make_fx` writes down nothing of what the body does."""
    found: AbstractContextManager[object] = find(
        "torch.fx.experimental.proxy_tensor.disable_proxy_modes_tracing"
    )()
    return found


def without_transforms() -> AbstractContextManager[object]:
    """No transform of `torch.func` is on in the body."""
    found: AbstractContextManager[object] = find(
        "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack"
    )()
    return found


# torch.compile.
def constant_in_graphs(function: F) -> F:
    """A function whose result a graph keeps; as `torch.compiler.assume_constant_result`.

    That one imports dynamo, which takes a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_in_graphs
def compiles_for_many() -> bool:
    """Whether the graph being made is for more than the call at hand.

    Asked while dynamo traces a function: for dynamic shapes, or not for the first time. Or it is
    what torch's flex_attention compiles when it is called by itself: of all its graphs, any may run
    a call again in a backward pass, and has to keep for it what the first one kept.
    """
    compilation = find("torch._guards.CompileContext").current_compile_id()
    again = compilation is not None and bool(compilation.frame_compile_id)
    frames = find("torch._guards.TracingContext").extract_stack()
    by_itself = any(frame.name == "_flex_attention_hop_wrapper" for frame in frames)
    return again or by_itself or not find("torch._dynamo.config").assume_static_by_default


def compiled_frame() -> str:
    """Which function dynamo is tracing, as it numbers them; empty if it is not."""
    compilation = find("torch._guards.CompileContext").current_compile_id()
    return "" if compilation is None else str(compilation.frame_id)


def mark_varying(x: Tensor, dim: int) -> None:
    """Graphs are made for any size of a dimension, as after `torch._dynamo.maybe_mark_dynamic`.

    That one imports dynamo, which takes a second.
    """
    x._dynamo_weak_dynamic_indices = {dim}  # type: ignore[attr-defined]
    x._has_dynamo_dim_marking = True  # type: ignore[attr-defined]


def never_compiled_by_itself(function: Callable[..., Any]) -> None:
    """Dynamo inlines a function into what it compiles, but does not begin to compile at it."""
    frames = find("torch._C._dynamo.eval_frame")
    skip = frames._FrameAction.SKIP
    code = function.__code__
    frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))


def break_graph() -> None:
    """Ends the graph that dynamo is making; what comes next runs, and then another one begins."""
    torch._dynamo.graph_break()


def look_while_traced(look: Callable[[Any], None]) -> None:
    """Calls a function of some module while dynamo traces, with what dynamo knows; not later.

    Its argument is a `torch._dynamo.comptime.ComptimeContext`; the caller's variables are those of
    stacklevel 1.
    """
    torch._dynamo.comptime.comptime(look)


def variable_of(seen: Any) -> Any:
    """What dynamo has for a variable that a `ComptimeContext` has found."""
    return seen._i_will_not_complain_if_bc_breaks_VariableTracker()


def cell_loader_of(seen: Any) -> Callable[[Any], Any]:
    """What finds the variable in a cell of a closure, by dynamo's variable for the cell."""
    translator = seen._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    loader: Callable[[Any], Any] = translator.output.side_effects.load_cell
    return loader


def is_made_while_traced(seen: Any, name: str) -> bool:
    """Whether code that dynamo traces has made what a variable holds, or assigned to its fields.

    What it assigns is in the object only after the graph has run.
    """
    translator = seen._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    variable = variable_of(seen.get_local(name, stacklevel=1)).realize()
    effects = translator.output.side_effects
    return variable.source is None or bool(effects.has_pending_mutation(variable))


def local_tensor_mode_is_on() -> bool:
    """Whether torch emulates ranks in this process; before 2.10 it can't.

    >>> local_tensor_mode_is_on()
    False
    """
    emulation = sys.modules.get("torch.distributed._local_tensor")
    return emulation is not None and emulation.enabled_local_tensor_mode() is not None


def all_gather(x: Tensor, group: Any) -> Tensor:
    """The rows of all ranks, not waited for; `all_gather_tensor` before torch 2.13."""
    collectives = find("torch.distributed._functional_collectives")
    gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor
    found: Tensor = gather(x, 0, group)
    return found


def __getattr__(name: str) -> Any:
    """Names of modules that `import torch` does not load, looked up when they are imported."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return find(_LATER[name])


_FLEX = "torch.nn.attention.flex_attention"
NEWER = {f"{_FLEX}._compute_dq_write_order_from_block_mask": "2.13"}
"""Names that the oldest torch that flexcp takes lacks, by the version that brought them."""
_LATER = {
    "checkpoint_frame": "torch.utils.checkpoint._CheckpointFrame",
    "functional_collectives": "torch.distributed._functional_collectives",
    "process_group_store": "torch.distributed.distributed_c10d._get_process_group_store",
    "process_group_of": "torch._C._distributed_c10d._resolve_process_group",
    "tree_map_only": "torch.utils._pytree.tree_map_only",
    "unmodified_score": f"{_FLEX}._identity",
    **{
        name: f"{_FLEX}.{name}"
        for name in (
            "_DEFAULT_SPARSE_BLOCK_SIZE",
            "_WARNINGS_SHOWN",
            "_apply_kernel_options",
            "_compute_dq_write_order_from_block_mask",
            "_convert_block_mask_to_mask",
            "_convert_mask_to_block_mask",
            "_create_empty_block_mask",
            "_create_sparse_block_from_block_mask",
            "_dense_to_ordered",
            "_identity",
            "_mask_mod_signature",
            "_round_up_to_multiple",
            "_score_mod_signature",
            "_vmap_for_bhqkv",
            "flex_attention_hop",
        )
    },
}
