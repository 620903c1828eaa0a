"""Tracing: a mask_mod is called once with stand-ins for its indices; what it does becomes a graph.

The recorder works below Python, on ATen operations, so that every spelling of an operation
(`a >= b`, `torch.ge(a, b)`, `b <= a`) arrives as the same few names. Control flow on an index,
changing a tensor in place and drawing random numbers are caught where they happen.
"""

from __future__ import annotations

import inspect
import linecache
import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from flexcp import torch_names
from flexcp.errors import FlexCPError, quote, told
from flexcp.masks.graph import INPUTS, MaskGraph, Node, Ref, frozen, op_name, reads_of
from flexcp.torch_names import OpOverload, TorchDispatchMode

MaskMod = Callable[..., Tensor]
"""A FlexAttention mask function of (b, h, q_idx, kv_idx)."""

# The result has the shape of its operand, but none of its values.
_SHAPE_ONLY = frozenset(
    {"new_ones", "new_zeros", "new_full", "ones_like", "zeros_like", "full_like"}
)
_LIBRARY_DIRS = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))


def trace_mask(mask_mod: MaskMod) -> MaskGraph:
    """The graph of what `mask_mod` computes for one (b, h, q, kv).

    >>> graph = trace_mask(lambda b, h, q, kv: (q >= kv) & (q - kv < 4))
    >>> [node.name for node in graph.nodes[4:]]
    ['ge', 'sub', 'lt', 'bitwise_and']
    >>> sorted(graph.reads)
    ['kv', 'q']
    """
    _check_arity(mask_mod)
    recorder = _Recorder()
    inputs = [_Index(torch.zeros((), dtype=torch.int64), i) for i in range(len(INPUTS))]
    try:
        with recorder:
            result = mask_mod(*inputs)
    except _RefusedError as refused:
        raise FlexCPError(
            "a mask_mod that can be traced: tensor operations on its indices",
            f"{refused.what} at {_user_line(refused.__traceback__)}",
            refused.fix,
        ) from None
    except FlexCPError:
        raise
    except IndexError as error:
        raise FlexCPError(
            "captured tensors to be indexed by integers that lie inside of them",
            f"{error} at {_user_line(error.__traceback__)}",
            "make the tensor as long as the sequence, clamp the index, or convert it with .long()",
        ) from error
    except Exception as error:
        raise FlexCPError(
            "a mask_mod that runs on index tensors without dimensions",
            f"{type(error).__name__} at {_user_line(error.__traceback__)}: {error}",
            "use tensor operations only; the function is called once with b, h, q_idx and kv_idx "
            "as int64 tensors of shape ()",
        ) from error
    return _finish(mask_mod, recorder, result)


class _RefusedError(Exception):
    """Something that no graph can express; carries what it was and the way out."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix


class _Index(torch.Tensor):
    """A value that depends on the indices: a stand-in that carries its node in the graph."""

    concrete: Tensor
    node: int

    @staticmethod
    def __new__(cls, concrete: Tensor, node: int) -> _Index:
        self = torch_names.make_wrapper_subclass(
            cls, concrete.shape, dtype=concrete.dtype, device=concrete.device
        )
        assert isinstance(self, _Index)
        self.concrete, self.node = concrete, node
        return self

    def __init__(self, concrete: Tensor, node: int) -> None:
        pass

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch_names.without_function_subclasses():
            if func is torch.Tensor.__getitem__:
                return _getitem(*args)
            if func is torch.Tensor.__setitem__:
                raise _changes("assignment to an element")
            if func in (torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__):
                raise _reads_value(func.__name__)
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise _RefusedError(
            "an index used after the mask_mod returned", "keep the indices inside the function"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<index expression, node {self.node}>"


def _reads_value(how: str) -> _RefusedError:
    return _RefusedError(
        f"Python control flow on an index (its value was read by {how})",
        "replace `if`/`and`/`or`/`min`/`int()` by torch.where, &, |, torch.minimum and the like",
    )


def _changes(what: str) -> _RefusedError:
    return _RefusedError(
        f"an in-place operation ({what})",
        "write `x = x + 1` instead of `x += 1`: a mask_mod must not change tensors",
    )


def _address(tensor: Tensor) -> int:
    """Where a tensor's storage is; views of one storage share it."""
    return -1 if isinstance(tensor, _Index) else tensor.untyped_storage().data_ptr()


def _getitem(table: Tensor, index: Any) -> Tensor:
    """`table[index]` for scalar index tensors, which Python would otherwise read the value of."""
    entries = list(index) if isinstance(index, tuple) else [index]
    if any(entry is None or isinstance(entry, bool) for entry in entries):
        return torch.Tensor.__getitem__(table, index)
    if Ellipsis in [entry for entry in entries if not isinstance(entry, Tensor)]:
        at = next(i for i, entry in enumerate(entries) if entry is Ellipsis)
        missing = table.dim() - (len(entries) - 1)
        entries[at : at + 1] = [slice(None)] * missing
    slices = tuple(e if isinstance(e, slice) else slice(None) for e in entries)
    if any(s != slice(None) for s in slices):
        table = torch.Tensor.__getitem__(table, slices)
    indices = [
        None
        if isinstance(entry, slice)
        else entry
        if isinstance(entry, Tensor)
        else torch.tensor(entry)
        for entry in entries
    ]
    while indices and indices[-1] is None:
        indices.pop()
    found: Tensor = torch.ops.aten.index.Tensor(table, indices)
    return found


class _Recorder(TorchDispatchMode):
    """Writes down every operation that touches an index; lets all others run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        long = torch.int64
        self.nodes = [
            Node(None, (), {}, None, frozenset({name}), long, long, ()) for name in INPUTS
        ]
        self._constants: dict[int, int] = {}
        self._known: dict[Any, int] = {}
        self._made_here: dict[int, Tensor] = {}  # by storage: what this call allocated itself
        self._keep: list[Tensor] = []  # so that no id or address is used twice

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The default wraps every call for torch.compile's sake, at the price of a second spent
        # importing it; a recorder is never compiled.
        return False

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch_names.has_kernel_for(func.name(), "CompositeImplicitAutograd"):
            # In inference mode and inside of custom ops, `a & b` arrives as `__and__`.
            with self:
                return func.decompose(*args, **kwargs)
        touched = [x for x in _tensors((args, list(kwargs.values()))) if isinstance(x, _Index)]
        self._refuse_untraceable(func, args, bool(touched))
        if not touched:
            result = func(*args, **kwargs)
            given = {_address(x) for x in _tensors((args, list(kwargs.values())))}
            for made in _tensors([result]):
                if _address(made) not in given:
                    self._made_here[_address(made)] = made
            return result
        real_args = _map_tensors(args, _real)
        real_kwargs = {k: _cpu(_map_tensors(v, _real)) for k, v in kwargs.items()}
        result = func(*real_args, **real_kwargs)
        references = _map_tensors(args, self._reference)
        keywords = {k: _map_tensors(_cpu(v), self._reference) for k, v in kwargs.items()}
        promoted = _promoted(real_args)
        if isinstance(result, Tensor):
            return self._record(func, references, keywords, result, promoted)
        whole = self._record(func, references, keywords, real_args[0], promoted).node
        return tuple(
            self._record(_pick, (Ref(whole), i), {}, part, part.dtype)
            for i, part in enumerate(result)
        )

    def _refuse_untraceable(self, func: OpOverload, args: Any, touched: bool) -> None:
        if touched and func is torch.ops.aten._local_scalar_dense.default:
            raise _reads_value("bool(), int(), float() or item()")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _RefusedError(
                f"a random number ({op_name(func)})",
                "draw it once outside and capture the tensor: the mask must be a function of "
                "its indices",
            )
        if func._schema.is_mutable:
            changed = _tensors(args)[:1] or [torch.empty(0)]
            if touched or _address(changed[0]) not in self._made_here:
                raise _changes(op_name(func))

    def _record(
        self,
        op: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        result: Tensor,
        promoted: torch.dtype,
    ) -> _Index:
        name = op_name(op)
        if name == "index":
            args = self._join_lookups(args)
        node = Node(
            op,
            tuple(args),
            kwargs,
            None,
            frozenset()
            if name in _SHAPE_ONLY
            else reads_of((args, list(kwargs.values())), self.nodes),
            result.dtype,
            promoted,
            tuple(result.shape),
        )
        key = (op, frozen(node.args, lambda ref: ref), frozen([*kwargs.items()], lambda ref: ref))
        if key not in self._known:
            self.nodes.append(node)
            self._known[key] = len(self.nodes) - 1
        return _Index(result, self._known[key])

    def _join_lookups(self, args: Any) -> Any:
        """`table[b][q]` is `table[b, q]`, of which both indices can be seen at once."""
        inner = self.nodes[args[0].node]
        if inner.name != "index" or None in inner.args[1]:
            return args
        if any(self.nodes[ref.node].shape for ref in inner.args[1]):
            return args
        return (inner.args[0], [*inner.args[1], *args[1]])

    def _reference(self, tensor: Tensor) -> Ref:
        if isinstance(tensor, _Index):
            return Ref(tensor.node)
        if id(tensor) not in self._constants:
            self.nodes.append(constant(tensor))
            self._constants[id(tensor)] = len(self.nodes) - 1
            self._keep.append(tensor)
            # From here on the graph reads it: changing it would change what was recorded.
            if (own := self._made_here.pop(_address(tensor), None)) is not None:
                self._keep.append(own)
        return Ref(self._constants[id(tensor)])


def constant(tensor: Tensor) -> Node:
    """The node of a captured tensor. Masks are analysed on the CPU, wherever they are used."""
    value = tensor.detach().cpu()
    return Node(None, (), {}, value, frozenset(), value.dtype, value.dtype, tuple(value.shape))


def _pick(results: Sequence[Tensor], position: int) -> Tensor:
    return results[position]


def _finish(mask_mod: MaskMod, recorder: _Recorder, result: object) -> MaskGraph:
    if not isinstance(result, Tensor):
        raise FlexCPError(
            "a mask_mod that returns a bool tensor",
            f"{told(result)} from {describe(mask_mod)}",
            "return a comparison of the indices, or use flexcp.masks.full()",
        )
    if result.dtype != torch.bool:
        raise FlexCPError(
            "a mask_mod that returns dtype torch.bool",
            f"{result.dtype} from {describe(mask_mod)}",
            "compare the result with something, or call .bool() on it "
            "(a function that changes scores is a score_mod, not a mask_mod)",
        )
    if result.dim() != 0:
        raise FlexCPError(
            "a mask_mod that returns one value (shape ()) for one (b, h, q_idx, kv_idx)",
            f"shape {tuple(result.shape)} from {describe(mask_mod)}",
            "index captured tensors in all of their dimensions, as in doc[b, q_idx]",
        )
    if isinstance(result, _Index):
        return MaskGraph(tuple(recorder.nodes), result.node)
    return MaskGraph((*recorder.nodes, constant(result)), len(recorder.nodes))


def _check_arity(mask_mod: object) -> None:
    if not callable(mask_mod):
        raise FlexCPError(
            "a mask_mod: a function of (b, h, q_idx, kv_idx)",
            told(mask_mod),
            "pass a function, or a mask from flexcp.masks",
        )
    try:
        signature = inspect.signature(mask_mod)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*INPUTS)
    except TypeError:
        raise FlexCPError(
            "a mask_mod of four arguments (b, h, q_idx, kv_idx)",
            f"{describe(mask_mod)} with signature {signature}",
            "a function with a `score` argument in front is a score_mod"
            if len(signature.parameters) == 5
            else "take all four, also those that you don't use",
        ) from None


def describe(function: object) -> str:
    """A function's name and where it was written, for error messages."""
    name = getattr(function, "__qualname__", None) or quote(function)
    code = getattr(function, "__code__", None)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name


def _user_line(traceback: TracebackType | None) -> str:
    """The innermost line of code that belongs to neither torch nor flexcp."""
    found = "an unknown line"
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if not filename.startswith(_LIBRARY_DIRS):
            source = linecache.getline(filename, traceback.tb_lineno).strip()
            found = f"{filename}:{traceback.tb_lineno}: `{source}`"
        traceback = traceback.tb_next
    return found


def _promoted(args: Sequence[Any]) -> torch.dtype:
    operands = [a for a in args if isinstance(a, (Tensor, bool, int, float))]
    if len(operands) >= 2 and any(isinstance(a, Tensor) for a in operands[:2]):
        return torch.result_type(operands[0], operands[1])
    first = next((a for a in _tensors(list(args))), None)
    return torch.int64 if first is None else first.dtype


def _real(tensor: Tensor) -> Tensor:
    return tensor.concrete if isinstance(tensor, _Index) else tensor.detach().cpu()


def _cpu(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [t for item in value for t in _tensors(item)]
    return []


def _map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_map_tensors(item, function) for item in value)
    return value
