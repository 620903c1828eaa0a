"""Test-wide settings: what a computation never wrote must not be read."""

import gc
import os

# Before torch loads: some CPUs advertise bfloat16 matrix units that trap.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
# Before Triton loads: its kernels run on CPU tensors, in its interpreter.
os.environ.setdefault("TRITON_INTERPRET", "1")
# Before a kernel is chosen: what its user has measured on this machine is no part of the tests.
os.environ["FLEXCP_DOCTOR"] = ""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

# The same examples in every run; `pytest --hypothesis-profile=default` draws new ones.
# A busy machine is slow to draw and to run them, which is no failure.
settings.register_profile(
    "same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores


def pytest_collection_finish() -> None:
    """Nobody looks through all that is imported for garbage: every collection did, in ranks too."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)  # nor, for what a compiler makes, all the time


def pytest_unconfigure() -> None:
    """What is imported may go when the process ends."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan() -> Iterator[None]:
    """Fills what torch.empty returns with NaN (or the largest integer) in every test."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = filled


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Every test starts from the same seed."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def loaded_compiler() -> None:
    """Compiles something in this process: each rank that is forked would load all of it anew."""
    x = torch.ones(2, requires_grad=True)
    torch.compile(lambda x: x.sin(), backend="aot_eager")(x).sum().backward()
