"""Machine: what compute and transfers cost, as presets or measured here."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flexcp.errors import (
    FlexCPError,
    did_you_mean,
    finite_number,
    quote,
    require,
    require_function,
    whole_number,
)


@dataclass(frozen=True)
class Machine:
    """The few numbers that the price of a schedule depends on.

    >>> Machine.preset("h100-ib").ranks_per_node
    8
    """

    name: str
    """What it is called."""
    flops: float
    """Floating-point operations per second and rank that attention's matrix products reach."""
    ranks_per_node: int
    """Consecutive ranks with the fast link between each other."""
    intra_bandwidth: float
    """Bytes per second and rank and direction, within a node."""
    inter_bandwidth: float
    """Bytes per second and rank and direction, between nodes, if no other rank sends."""
    latency: float
    """Seconds until a message of no size has arrived."""
    message: float
    """Seconds that each message of a round costs, the first too; latency comes once, on top."""
    launch: float
    """Seconds that starting the work of a round costs."""
    hidden: float = 0.95
    """Share of a transfer that can hide behind compute; the rest slows compute down."""
    backward: float = 2.5
    """Work of the backward pass, relative to forward."""
    memory: float = 0.0
    """Bytes of a rank's device; 0 if that is not known."""
    node_bandwidth: float = 0.0
    """Bytes per second and direction between nodes that all ranks of a node have together; 0 where
    each rank has a link of its own."""

    def __post_init__(self) -> None:
        require("name", self.name, str, "pass what to call it")
        fix = "pass the figures of a data sheet, or Machine.measure()"
        whole_number("ranks_per_node", self.ranks_per_node, at_least=1, fix=fix)
        for name, (least, most) in _BOUNDS.items():
            finite_number(name, getattr(self, name), fix=fix, least=least, most=most)
        if self.node_bandwidth:
            finite_number("node_bandwidth", self.node_bandwidth, fix=fix, least=1.0, most=1e300)

    def share_of_link(self, ranks: int) -> float:
        """Bytes per second and rank between nodes, if of all ranks each sends as much at a time.

        >>> machine = Machine("x", 1e12, 4, 1e10, 2e9, 0.0, 0.0, 0.0, node_bandwidth=4e9)
        >>> machine.share_of_link(8), machine.share_of_link(4)
        (1000000000.0, 2000000000.0)
        """
        if not self.node_bandwidth or ranks <= self.ranks_per_node:  # nothing leaves a node
            return self.inter_bandwidth
        return min(self.inter_bandwidth, self.node_bandwidth / self.ranks_per_node)

    def wire(self, received: Tensor, between_nodes: Tensor) -> Tensor:
        """float64 [ranks] Seconds of links for some bytes, of which some come from other nodes.

        A link that a node's ranks share is busy with what all of them receive.
        """
        near = (received - between_nodes).double() / self.intra_bandwidth
        far = between_nodes.double() / self.inter_bandwidth
        if self.node_bandwidth:
            node = torch.arange(len(between_nodes)) // self.ranks_per_node
            of_node = torch.bincount(node, between_nodes.double()) / self.node_bandwidth
            far = torch.maximum(far, of_node[node])
        return near + far

    @classmethod
    def preset(cls, name: str) -> Machine:
        """One of the machines in `PRESETS`; the name of a GPU alone is that of nodes of 8.

        >>> Machine.preset("H100") == Machine.preset("h100-ib")
        True
        """
        asked = name.lower() if isinstance(name, str) else None
        for machine in PRESETS:
            if asked in (machine.name, machine.name.removesuffix("-ib")):
                return machine
        names = [m.name for m in PRESETS]
        raise FlexCPError(
            f"a machine among {', '.join(names)}",
            quote(name),
            did_you_mean(name, names)
            or "pass one of those, a Machine of your own numbers, or Machine.measure()",
        )

    @classmethod
    def measure(
        cls, *, seconds: float = 0.2, attention: Callable[..., object] | None = None
    ) -> Machine:
        """This computer: speed of attention on one thread, and of a local socket as gloo uses it.

        Results differ from run to run, so ranks must not measure each for itself: measure on one,
        and give the numbers to all.

        Args:
            seconds: How long each figure is measured.
            attention: What is timed as `attention(q, k, v)`, such as `flexcp.flex_attention`, whose
                kernel for this processor may be faster than PyTorch's op; that op by default.
        """
        seconds = finite_number(
            "seconds", seconds, fix="pass seconds=0.2 or more for each figure", least=1e-3, most=60
        )
        if attention is None:
            attention = torch.nn.functional.scaled_dot_product_attention
        fix = "pass flexcp.flex_attention, or leave it out"
        require_function("attention, a function of q, k and v", attention, 3, fix)
        flops = _attention_flops(attention, seconds)
        bandwidth, latency = _socket_speed(seconds)
        return cls("measured", flops, 1 << 30, bandwidth, bandwidth, latency, latency / 4, 50e-6)


_BOUNDS = {
    "flops": (1.0, 1e300), "intra_bandwidth": (1.0, 1e300), "inter_bandwidth": (1.0, 1e300),
    "latency": (0.0, 1e300), "message": (0.0, 1e300), "launch": (0.0, 1e300),
    "hidden": (0.0, 1.0), "backward": (0.0, 1e300), "memory": (0.0, 1e300),
    "node_bandwidth": (0.0, 1e300),
}  # fmt: skip
"""What the figures of a machine may be: a price divides by the first three, and by `node_bandwidth`
if it is not 0."""


def _gpu(
    name: str, tflops: float, intra: float, inter: float, memory: float
) -> tuple[Machine, Machine]:
    """A GPU in one NVLink (or xGMI) domain, and in nodes of 8: GB/s per direction, GB of memory."""
    rate, near, far, size = tflops * 1e12, intra * 1e9, inter * 1e9, memory * 1e9
    fabric = "xgmi" if name == "mi300x" else "nvlink"
    one = (rate, 1 << 30, near, near, 8e-6, 1e-6, 10e-6)
    many = (rate, 8, near, far, 12e-6, 1e-6, 10e-6)
    return (
        Machine(f"{name}-{fabric}", *one, memory=size),
        Machine(f"{name}-ib", *many, memory=size),
    )


PRESETS = (
    Machine("cpu-gloo", 4e10, 1 << 30, 1.5e9, 1.5e9, 100e-6, 20e-6, 100e-6),
    *_gpu("h100", tflops=450, intra=350, inter=45, memory=80),
    *_gpu("a100", tflops=180, intra=230, inter=22, memory=80),
    *_gpu("h200", tflops=450, intra=350, inter=45, memory=141),
    *_gpu("b200", tflops=1000, intra=700, inter=45, memory=180),
    *_gpu("mi300x", tflops=400, intra=310, inter=45, memory=192),
    Machine("pcie", 1.5e14, 1 << 30, 2.0e10, 2.0e10, 15e-6, 1e-6, 10e-6),
)
"""One CPU box with gloo; GPUs in one NVLink (xGMI) domain, or in nodes of 8 with a network card
each (InfiniBand or RoCE: 200 Gb/s for A100, else 400 Gb/s); a box of PCIe cards. Nothing here was
measured: about 45 % of the data sheet's dense bfloat16 rate (57 % of A100's, 31 % of MI300X's, as
attention kernels are said to reach), and 70 to 90 % of the links' rate. The counts are no limit:
any number of ranks can be priced."""


def _attention_flops(attention: Callable[..., object], seconds: float) -> float:
    """Per second of one thread's own time: what else the computer does meanwhile is not counted.

    With one thread alone: several wait for each other in loops, which counts as their time.
    """
    q = torch.randn(1, 4, 1024, 64)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        attention(q, q, q)
        done, begin = 0, time.process_time()
        while time.process_time() - begin < seconds or done == 0:
            attention(q, q, q)
            done += 1
        return 4.0 * 4 * 1024 * 1024 * 64 * done / (time.process_time() - begin)
    finally:
        torch.set_num_threads(threads)


def _socket_speed(seconds: float) -> tuple[float, float]:
    """Bytes per second, and seconds per message, between two threads over a local socket."""
    left, right = socket.socketpair()
    chunk = bytes(1 << 20)

    def echo_then_drain() -> None:
        for _ in range(100):
            right.sendall(right.recv(1))
        while right.recv(1 << 20):
            pass

    other = threading.Thread(target=echo_then_drain)
    other.start()
    begin = time.perf_counter()
    for _ in range(100):
        left.sendall(b"x")
        left.recv(1)
    latency = (time.perf_counter() - begin) / 200
    sent, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        left.sendall(chunk)
        sent += len(chunk)
    left.shutdown(socket.SHUT_WR)
    other.join()
    elapsed = time.perf_counter() - begin
    left.close()
    right.close()
    return sent / elapsed, latency
