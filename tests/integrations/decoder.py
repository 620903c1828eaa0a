"""A small decoder over packed documents, and its training by one process: what ranks must equal."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import flexcp
from flexcp import masks
from flexcp.testing.tolerance import relative_error

WORDS, WIDTH, HEADS, KV_HEADS, LENGTH = 29, 16, 4, 2, 45
DOCUMENTS = ([20, 7, 18], [45], [3, 30, 1, 11])
"""Lengths of the documents of each step's batch."""
GENERATOR = torch.Generator().manual_seed(5)
BATCHES = [torch.randint(0, WORDS, (2, LENGTH), generator=GENERATOR) for _ in DOCUMENTS]
STEPS = len(DOCUMENTS)


class Attention(nn.Module):
    """Calls SDPA with as many heads as its weights have, under a dense mask if it is given one."""

    def __init__(self) -> None:
        super().__init__()
        head = WIDTH // HEADS
        self.wq = nn.Linear(WIDTH, HEADS * head, bias=False)
        self.wk = nn.Linear(WIDTH, KV_HEADS * head, bias=False)
        self.wv = nn.Linear(WIDTH, KV_HEADS * head, bias=False)
        self.wo = nn.Linear(HEADS * head, WIDTH, bias=False)

    def forward(self, x: Tensor, dense: Tensor | None) -> Tensor:
        q, k, v = (
            w(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=dense, is_causal=dense is None, enable_gqa=True
        )
        return self.wo(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.RMSNorm(WIDTH), Attention(), nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor, dense: Tensor | None) -> Tensor:
        x = x + self.attn(self.norm1(x), dense)
        return x + self.down(functional.silu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.recompute: dict[str, object] | None = None

    def forward(self, tokens: Tensor, positions: Tensor, dense: Tensor | None = None) -> Tensor:
        x = self.words(tokens) + self.places(positions)
        for layer in self.layers:
            if self.recompute is None:
                x = layer(x, dense)
            else:
                x = checkpoint(layer, x, dense, **self.recompute)
        return self.head(self.norm(x))


def new_decoder() -> Decoder:
    torch.manual_seed(7)
    return Decoder()


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """One that shows how large gradients are, which Adam would hide."""
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def mask_of(step: int) -> flexcp.Mask:
    return masks.causal() & masks.document(lengths=DOCUMENTS[step])


Record = list[tuple[float, dict[str, Tensor]]]
"""Loss, and all parameters after the step, of every step."""


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, whole, by the names that they have in a plain model."""
    found = {}
    for name, p in model.named_parameters():
        whole = p.full_tensor() if hasattr(p, "full_tensor") else p
        plain = name.replace("_orig_mod.", "").replace("module.", "")
        found[plain] = whole.detach().clone()
    return found


def train_in_one_process(clip: float | None = None) -> Record:
    """With torch alone: dense masks, labels shifted document by document."""
    model = new_decoder()
    optimizer = new_optimizer(model)
    record: Record = []
    for tokens, lengths in zip(BATCHES, DOCUMENTS, strict=True):
        ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        at = torch.arange(LENGTH)
        dense = (ids[:, None] == ids) & (at[:, None] >= at)
        positions = torch.cat([torch.arange(n) for n in lengths]).expand(2, -1)
        logits = model(tokens, positions, dense)
        last = torch.cat([ids[1:] != ids[:-1], torch.tensor([True])])
        labels = tokens.roll(-1, 1).masked_fill(last, -100)
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        record.append((loss.item(), snapshot(model)))
    return record


def assert_same_training(found: Record, expected: Record, *, first: int = 0) -> None:
    """Losses to 1e-6, parameters to 1e-5 relative to their largest entry."""
    assert len(found) == len(expected) - first
    for step, ((loss, params), (want, wanted)) in enumerate(
        zip(found, expected[first:], strict=True), start=first
    ):
        assert abs(loss - want) < 1e-6 * want, f"step {step}: loss {loss}, not {want}"
        assert params.keys() == wanted.keys()
        for name, p in params.items():
            error = relative_error(p, wanted[name])
            assert error < 1e-5, f"step {step}: {name} is off by {error:.1e}"
