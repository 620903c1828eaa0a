"""TrainConfig: everything that a training run is told, checked before anything starts."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from flexcp.errors import FlexCPError, quote, require, whole_number

HARMLESS = (
    "data", "out", "layout", "schedule", "head_ranks", "device", "checkpoint_every", "eval_every",
    "eval_sequences", "stop_after", "compare", "restart", "timeout",
)  # fmt: skip
"""What may differ when a run is resumed. The data's content is compared, not its place."""

_AT_LEAST_ONE = (
    "steps", "tokens", "batch", "document_tokens", "dim", "layers", "heads", "kv_heads",
    "head_ranks", "checkpoint_every", "eval_every",
)  # fmt: skip
DTYPES = ("float32", "float64")
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class TrainConfig:
    """What to train, on what, for how long, and where the results go.

    >>> TrainConfig(dim=96, heads=6).head_dim
    16
    >>> TrainConfig(heads=3)
    Traceback (most recent call last):
    ...
    flexcp.errors.FlexCPError: expected query heads that are a multiple of the 2 key-value heads, \
got 3 heads; pass --kv-heads 1, or --heads 2
    """

    data: str | None = None
    """A file or folder of text; None for the sources of Python's standard library."""
    out: str = "out/train"
    """The folder of the checkpoint, the metrics and the loss curve."""
    steps: int = 100
    """Optimizer steps of the whole run; the learning rate falls until then."""
    tokens: int = 4096
    """Length of the sequence that the ranks share."""
    batch: int = 1
    """Sequences of a step."""
    document_tokens: int = 1536
    """Longer documents are cut into parts of this many tokens, each a document by itself."""
    seed: int = 0
    """Decides the initial weights, the order of documents and which are held out."""
    lr: float = 3e-3
    """Peak learning rate."""
    dim: int = 128
    """Width of the model."""
    layers: int = 4
    """Transformer layers."""
    heads: int = 4
    """Query heads."""
    kv_heads: int = 2
    """Key and value heads."""
    window: int | None = None
    """If given, every other layer sees only this many tokens back."""
    dtype: str = "float32"
    """Type of the weights: float32 or float64."""
    autocast: str | None = None
    """bfloat16, to compute the model and its attention in it while weights, gradients and the loss
    stay as they are."""
    layout: str = "auto"
    """Who owns which tokens, as for `flexcp.make_plan`."""
    schedule: str = "auto"
    """What moves when, as for `flexcp.make_plan`."""
    head_ranks: int = 1
    """Ranks that share the heads rather than the sequence, for the "hybrid" schedule."""
    device: str = "cpu"
    """cpu or cuda."""
    checkpoint_every: int = 25
    """Steps between checkpoints."""
    eval_every: int = 25
    """Steps between evaluations."""
    eval_sequences: int = 2
    """Held-out sequences of an evaluation; 0 for none."""
    stop_after: int | None = None
    """Save and stop after this step, as an interruption would."""
    compare: bool = False
    """Whether rank 0 also trains in one process, and compares losses and gradients."""
    restart: bool = False
    """Whether to begin anew where `out` has a checkpoint."""
    timeout: float = 600.0
    """Seconds after which a rank that waits for another gives up."""

    def __post_init__(self) -> None:
        for field in fields(self):
            _require_kind(field.name, str(field.type), getattr(self, field.name))
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                _refuse(name, "at least 1", getattr(self, name))
        for name in ("window", "stop_after"):
            value = getattr(self, name)
            if value is not None and value < 1:
                _refuse(name, "at least 1", value)
        if self.eval_sequences < 0:
            _refuse("eval_sequences", "at least 0", self.eval_sequences)
        if self.tokens < 2:
            _refuse("tokens", "at least 2: a token, and the one that it predicts", self.tokens)
        for name in ("lr", "timeout"):
            if not 0 < getattr(self, name) < math.inf:
                _refuse(name, "more than 0 and finite", getattr(self, name))
        for name, allowed in (("dtype", DTYPES), ("device", DEVICES)):
            if getattr(self, name) not in allowed:
                _refuse(name, " or ".join(allowed), getattr(self, name))
        if self.autocast not in (None, "bfloat16"):
            _refuse("autocast", "bfloat16", self.autocast)
        if (self.layout, self.schedule) != ("auto", "auto"):
            from flexcp.plan.make import require_names

            require_names(self.layout, self.schedule)
        if self.heads % self.kv_heads:
            raise FlexCPError(
                f"query heads that are a multiple of the {self.kv_heads} key-value heads",
                f"{self.heads} heads",
                f"pass --kv-heads 1, or --heads {self.kv_heads}",
            )
        if self.dim % (2 * self.heads):
            raise FlexCPError(
                f"a dim that {self.heads} heads divide into even parts",
                f"dim {self.dim}",
                f"pass --dim {2 * self.heads}, or a multiple of it",
            )

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.dim // self.heads

    def require_ranks(self, ranks: int) -> None:
        """Raises if the run can't be shared by so many ranks."""
        ranks = whole_number("ranks", ranks, at_least=1, at_most=4096, fix="pass --ranks 2")
        if self.tokens < ranks:
            raise FlexCPError(
                f"at least one token for each of {ranks} ranks",
                f"sequences of {self.tokens} tokens",
                f"pass --tokens {ranks} or more, or fewer --ranks",
            )
        if ranks % self.head_ranks:
            raise FlexCPError(
                f"a number of ranks that the {self.head_ranks} ranks sharing heads divide",
                f"{ranks}",
                "pass another number of ranks, or --ranks 2x2 for groups that share heads",
            )
        if ranks == 1 and self.compare:
            raise FlexCPError(
                "at least 2 ranks to compare with one process",
                "1",
                "pass --ranks 2, or leave --compare away",
            )

    def require_resumable(self, saved: dict[str, Any]) -> None:
        """Raises if a checkpoint was made with settings that lead to other losses."""
        for name, now in asdict(self).items():
            before = saved.get(name)
            if name not in HARMLESS and before != now:
                option = "--" + name.replace("_", "-")
                raise FlexCPError(
                    f"the settings of the run in {self.out}, which has {option} {before}",
                    f"{option} {now}",
                    "pass the same, choose another --out, or pass --restart to begin anew",
                )

    def to_json(self) -> str:
        """For the processes of the ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TrainConfig:
        """What `to_json` wrote."""
        known = {f.name for f in fields(cls)}
        fix = "pass what TrainConfig.to_json wrote"
        require("text", text, str, fix)
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            raise FlexCPError("settings as JSON", quote(text), fix) from None
        require("what the JSON has", content, dict, fix)
        return cls(**{k: v for k, v in content.items() if k in known})


_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "str": ((str,), "a text"),
    "bool": ((bool,), "true or false"),
}
"""What values of a field may be, and what to call that."""
_MOST = 10**9
"""Steps, tokens and the like, of a run that ends."""


def _require_kind(name: str, kind: str, value: object) -> None:
    if value is None and kind.endswith("| None"):
        return
    types, words = _KINDS[kind.split(" ")[0]]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        _refuse(name, words, quote(value))
    if isinstance(value, int) and abs(value) > (2**63 - 1 if name == "seed" else _MOST):
        _refuse(name, "of 64 bits" if name == "seed" else f"at most {_MOST:,}", quote(value))


def _refuse(name: str, wanted: str, value: object) -> None:
    option = "--" + name.replace("_", "-")
    told = str(value) if len(str(value)) < 100 else quote(value)
    raise FlexCPError(f"{option} to be {wanted}", told, f"change {option}")
