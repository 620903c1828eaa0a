"""Runs torchtitan's own trainer on CPU processes, and saves the losses and gradients of its steps.

    python titan_run.py ASSETS RESULTS CASE...

torchtitan is for accelerators: what it asks of one is answered here for CPUs, and one process alone
attends by dense masks, since torch's FlexAttention and varlen attention don't train on CPU.
"""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

os.environ["TORCH_COMPILE_DISABLE"] = "1"  # torchtitan compiles FlexAttention and its masks

import torch
import torch._utils
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from flexcp.integrations import torchtitan as cp_torchtitan

STEPS = 2
MOST_ELEMENTS = 50_000
"""Of a gradient that are compared: evenly spaced ones of larger tensors."""
WORDS = 300

CASES = {
    "flex headtail": ("llama3", "llama3_debugmodel", []),
    "flex ptrr": ("llama3", "llama3_debugmodel", ["ptrr"]),
    "flex balanced": ("llama3", "llama3_debugmodel", ["balanced"]),
    "flex auto, partial_dtensor": (
        "llama3", "llama3_debugmodel", ["auto", "--parallelism.spmd_backend", "partial_dtensor"],
    ),
    "varlen auto": ("llama3", "llama3_debugmodel_varlen_attn", ["auto"]),
    "varlen headtail, partial_dtensor": (
        "llama3", "llama3_debugmodel_varlen_attn",
        ["headtail", "--parallelism.spmd_backend", "partial_dtensor"],
    ),
    "windows and sinks, flex ptrr": (
        "gpt_oss", "gpt_oss_debugmodel_flex",
        ["ptrr", "--parallelism.context_parallel_ptrr_mask_key", "sliding_window_mask"],
    ),
    "windows and sinks, flex auto": ("gpt_oss", "gpt_oss_debugmodel_flex", ["auto"]),
    "windows and sinks, varlen auto": ("gpt_oss", "gpt_oss_debugmodel", ["auto"]),
}  # fmt: skip
"""Model, configuration, load balancer and further arguments."""


def alone(name: str) -> str:
    """The first case with the same model, whose run in one process others are compared with."""
    return next(other for other, case in CASES.items() if case[:2] == CASES[name][:2])


def write_assets(folder: Path) -> None:
    """A tokenizer of few words, and documents of few words each."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ["<bos>", "<eos>", "<unk>"]
    words = {word: n for n, word in enumerate([*names, *(f"w{i}" for i in range(WORDS))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(names)
    (folder / "tokenizer").mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "tokenizer" / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"})
    )
    (folder / "texts").mkdir()
    numbers = torch.Generator().manual_seed(0)
    with (folder / "texts" / "data.json").open("w") as file:
        for _ in range(60):
            length = int(torch.randint(1, 60, (), generator=numbers))
            text = torch.randint(0, WORDS, (length,), generator=numbers).tolist()
            file.write(json.dumps({"text": " ".join(f"w{i}" for i in text)}) + "\n")


def answer_for_cpus() -> None:
    """What torchtitan asks of its accelerator."""
    device = types.ModuleType("cpu_as_accelerator")
    device.__dict__.update(vars(torch.cpu))
    size = types.SimpleNamespace(total_memory=1 << 30)
    device.__dict__.update(
        get_device_name=lambda _: "CPU", get_device_properties=lambda _: size,
        current_device=lambda: 0, memory_stats=lambda _: {}, reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
    )  # fmt: skip
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda _: device


def attend_densely() -> None:
    """Stands for FlexAttention and varlen attention in one process."""
    from torch.nn.attention.flex_attention import AuxOutput, create_mask
    from torchtitan.models.common import attention

    def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        scores = scores.masked_fill(~mask, -torch.inf)
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    def flex(q, k, v, *, block_mask, scale, return_aux, **rest):
        shape = (q.shape[0], 1, q.shape[2], k.shape[2])
        mask = create_mask(block_mask.mask_mod, *shape, device="cpu")
        out, lse = dense(q, k, v, mask, scale)
        return out, AuxOutput(lse, None)

    def varlen(
        self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks, scale=None, out_transform=None, **rest
    ):
        q, k, v = q_BLNH, k_BLNH, v_BLNH
        starts, (left, right) = attention_masks.cu_seq_q, self.window_size
        at = torch.arange(q.shape[0] * q.shape[1])
        document = torch.searchsorted(starts, at.to(starts.dtype), right=True)
        ahead = at - at[:, None]
        mask = (document == document[:, None]) & (ahead <= right)
        if left >= 0:
            mask &= ahead >= -left
        flat = (x.flatten(0, 1).transpose(0, 1)[None] for x in (q, k, v))
        out, lse = dense(*flat, mask, scale)
        out, lse = out[0].transpose(0, 1).view_as(q), lse[0].T.view(q.shape[:3])
        return out if out_transform is None else out_transform(out, lse)

    attention.FlexAttention.compiled_flex_attn = staticmethod(flex)
    attention.VarlenAttention.forward = varlen


def compute_experts_in_float32() -> None:
    """GPT-OSS computes its experts in bfloat16, in which nothing could be compared."""
    from torchtitan.models.gpt_oss import moe

    def experts(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        names = ("mlp1_weight_EGD", "mlp1_bias_EG", "mlp2_weight_EDF", "mlp2_bias_ED")
        own = (getattr(self, name) for name in names)
        w1, b1, w2, b2 = (p.to_local() if isinstance(p, DTensor) else p for p in own)
        counts = num_tokens_per_expert_E.long().tolist()
        parts = x_RD.split([*counts, len(x_RD) - sum(counts)])
        done = [
            moe.swiglu(x @ w1[e].T + b1[e], limit=self.swiglu_limit) @ w2[e].T + b2[e]
            for e, x in enumerate(parts[:-1])
        ]
        return torch.cat([*done, torch.zeros_like(parts[-1])])

    moe.GptOssGroupedExperts.forward = experts


def compared(x: Tensor) -> Tensor:
    flat = (x.full_tensor() if isinstance(x, DTensor) else x).detach().reshape(-1)
    return flat[:: -(-flat.numel() // MOST_ELEMENTS)].clone()


def set_weights(model: torch.nn.Module) -> None:
    """The same on any number of ranks, which draw numbers of their own."""
    for number, (_, p) in enumerate(sorted(model.named_parameters())):
        made = torch.randn(p.shape, generator=torch.Generator().manual_seed(number)) * 0.05
        with torch.no_grad():
            if isinstance(p, DTensor):
                made = distribute_tensor(made, p.device_mesh, p.placements)
            p.copy_(made)


def run(folder: Path, name: str, ranks: int) -> dict[str, Any]:
    from torchtitan.config import ConfigManager

    module, config, balancer = CASES[name]
    arguments = [
        "--module", module, "--config", config,
        "--hf_assets_path", str(folder / "tokenizer"),
        "--dataloader.dataset_path", str(folder / "texts"),
        "--dump_folder", str(folder / "out"),
        "--training.seq_len", "64", "--training.local_batch_size", "2",
        "--training.steps", str(STEPS), "--training.max_norm", "1e9",
        "--training.mixed_precision_param", "float32", "--training.disable_cuda_graphs",
        "--validator.no-enable", "--checkpoint.no-enable", "--metrics.log_freq", "1",
        "--parallelism.context_parallel_degree", str(ranks),
    ]  # fmt: skip
    if balancer:
        arguments += ["--parallelism.context_parallel_load_balancer", *balancer]
    parsed = ConfigManager().parse_args(arguments)
    trainer = parsed.build()
    model = trainer.model_parts[0]
    set_weights(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
    losses, gradients = [], []
    log = trainer.metrics_processor.log

    def keep_loss(step, loss, *args, **kwargs):
        losses.append(loss)
        return log(step, loss, *args, **kwargs)

    trainer.metrics_processor.log = keep_loss
    step = trainer.optimizers.step

    def keep_gradients():
        named = model.named_parameters()
        gradients.append({name: compared(p.grad) for name, p in named if p.grad is not None})
        step()

    trainer.optimizers.step = keep_gradients
    batches = trainer.batch_generator(trainer.dataloader)
    for trainer.step in range(1, STEPS + 1):
        trainer.train_step(batches)
    trainer.close()
    return {"losses": losses, "gradients": gradients}


def main() -> None:
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    ranks, port = int(os.environ["WORLD_SIZE"]), int(os.environ["MASTER_PORT"])
    answer_for_cpus()
    compute_experts_in_float32()
    if ranks == 1:
        attend_densely()
    else:
        cp_torchtitan.enable()
    for number, name in enumerate(sys.argv[3:]):
        child = os.fork()  # torchtitan remembers the mesh of its first trainer
        if child == 0:
            os.environ["MASTER_PORT"] = str(port + number)
            found = run(folder, name, ranks)
            if os.environ["RANK"] == "0":
                torch.save(found, out / f"{ranks} {name}.pt")
            torch.distributed.destroy_process_group()
            os._exit(0)
        if os.waitpid(child, 0)[1] != 0:
            sys.exit(f"{name} failed")


if __name__ == "__main__":
    main()
