"""A corpus of a few short texts, and a model that trains on it in milliseconds."""

from __future__ import annotations

import pytest

from flexcp.tools.train import TrainConfig


def tiny_run(folder):
    texts = folder / "texts"
    (texts / "more").mkdir(parents=True)
    for n, size in enumerate((5, 230, 1, 90, 61, 400, 33, 128, 77, 12)):
        name = f"more/{n}.txt" if n % 3 == 0 else f"{n}.txt"
        (texts / name).write_bytes(bytes((7 * n + i * i) % 96 + 32 for i in range(size)))
    return TrainConfig(
        data=str(texts), out=str(folder / "out"), steps=6, tokens=150, document_tokens=70,
        dim=24, layers=2, heads=3, kv_heads=1, checkpoint_every=2, eval_every=3, eval_sequences=1,
    )  # fmt: skip


@pytest.fixture
def tiny(tmp_path):
    return tiny_run(tmp_path)


@pytest.fixture
def texts(tiny, tmp_path):
    return tmp_path / "texts"


@pytest.fixture(scope="session")
def make_tiny_run():
    return tiny_run
