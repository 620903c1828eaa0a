"""Hosts with slow links on one machine: Linux network namespaces on a bridge, limited by tbf.

Every host is a namespace with one interface, `eth0`, on a bridge that has a namespace of its own,
so that nothing of the machine's own network is touched. What leaves a host and what reaches it are
limited to the same rate; within a host, ranks talk through the kernel at full speed. It takes root
and iproute2, and is gone when the context ends, however that happens.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from flexcp.errors import FlexCPError

_BURST = "128kb"
"""What may pass at once: some packets as the kernel cuts them, far less than a message."""
_QUEUE = "100ms"
"""How long a packet may wait in the queue before it is dropped."""


def require_tools() -> None:
    """Raises if namespaces can't be made here."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise FlexCPError(
            "ip and tc, of iproute2", f"no {' and no '.join(missing)}", "install iproute2"
        )
    if os.geteuid() != 0:
        raise FlexCPError(
            "root, to make network namespaces",
            f"user {os.geteuid()}",
            "run it as root, in a container if you like",
        )


@contextmanager
def hosts(count: int, megabits: float) -> Iterator[list[str]]:
    """The names of so many namespaces, each behind a link of that speed in both directions."""
    require_tools()
    prefix = f"flexcp-{os.getpid()}"
    switch, names = f"{prefix}-switch", [f"{prefix}-{i}" for i in range(count)]
    limit = f"root tbf rate {megabits}mbit burst {_BURST} latency {_QUEUE}"
    with _ending_on_signals(), ExitStack() as stack:
        for name in (switch, *names):
            _run(f"ip netns add {name}")
            stack.callback(_quietly, f"ip netns del {name}")  # and all interfaces in it
            _run(f"ip -n {name} link set lo up")
        _run(f"ip -n {switch} link add bridge type bridge")
        _run(f"ip -n {switch} link set bridge up")
        for i, name in enumerate(names):
            port = f"port{i}"
            _run(f"ip -n {switch} link add {port} type veth peer name eth0 netns {name}")
            _run(f"ip -n {switch} link set {port} master bridge up")
            _run(f"ip -n {name} address add 10.77.0.{i + 1}/24 dev eth0")
            _run(f"ip -n {name} link set eth0 up")
            _run(f"tc -n {switch} qdisc add dev {port} {limit}")
            _run(f"tc -n {name} qdisc add dev eth0 {limit}")
        yield names


def run_on(
    places: Sequence[str], script: Path, arguments: Sequence[Sequence[str]], folder: Path
) -> None:
    """Runs a script once in each of the places, at the same time; raises if one fails."""
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    running: list[subprocess.Popen[Any]] = []
    logs = [folder / f"rank{i}.log" for i in range(len(places))]
    try:
        for place, log, own in zip(places, logs, arguments, strict=True):
            command = ["ip", "netns", "exec", place, sys.executable, str(script), *own]
            with log.open("w") as file:
                running.append(subprocess.Popen(command, env=environment, stdout=file, stderr=file))
        waiting = list(running)
        while waiting:
            for process in list(waiting):
                try:
                    code = process.wait(0.1)
                except subprocess.TimeoutExpired:
                    continue
                waiting.remove(process)
                if code:
                    rank = running.index(process)
                    raise RuntimeError(f"rank {rank} ended with {code}:\n{logs[rank].read_text()}")
    finally:
        for process in running:
            process.kill()
            process.wait()


@contextmanager
def _ending_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the context as Ctrl-C does."""

    def end(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before = {s: signal.signal(s, end) for s in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise FlexCPError(
            f"`{command}` to work",
            done.stderr.strip() or f"exit code {done.returncode}",
            "run it where namespaces, veth, bridges and tbf are allowed: not in every container",
        )


def _quietly(command: str) -> None:
    subprocess.run(command.split(), capture_output=True)
