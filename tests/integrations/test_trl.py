"""TRL's trainers on several processes: supervised fine-tuning as in one, others refused by name."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from flexcp import FlexCPError
from flexcp.integrations import transformers as hf
from flexcp.testing import spawn
from tests.integrations.test_trainer import assert_same, launched
from tests.integrations.tiny_models import VOCABULARY, make

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

pytestmark = pytest.mark.filterwarnings("ignore")

WITHOUT_TIMES = ("time", "second")


def words():
    known = WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t1")
    named = {"pad_token": "t0", "unk_token": "t1", "eos_token": "t2"}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(known), **named)


def samples(count):
    """Prompts with completions, of different lengths."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for _ in range(count):
        length = int(torch.randint(9, 38, (), generator=generator))
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        mask = [0] * (length // 3) + [1] * (length - length // 3)
        rows.append({"input_ids": ids, "completion_mask": mask})
    return datasets.Dataset.from_list(rows)


def run(folder, *, lora=False, **changes):
    """Evaluates, trains, and evaluates again; the last batch of an epoch is not full."""

    class Sharded(hf.TrainerMixin, trl.SFTTrainer):
        pass

    settings = {
        "output_dir": str(folder),
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.5,
        "optim": "sgd",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "max_length": 64,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    extra = {}
    if lora:
        peft = pytest.importorskip("peft")
        torch.manual_seed(4)
        extra["peft_config"] = peft.LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False
        )
    trainer = Sharded(
        model=make("qwen3"),
        args=trl.SFTConfig(**(settings | changes)),
        train_dataset=samples(7),
        eval_dataset=samples(3),
        processing_class=words(),
        **extra,
    )
    metrics = [trainer.evaluate()]
    trainer.train()
    metrics.append(trainer.evaluate())
    logged = [log for log in trainer.state.log_history if "grad_norm" in log]
    named = ("loss", "grad_norm", "num_tokens", "entropy", "mean_token_accuracy")
    found = {name: [log[name] for log in logged] for name in named}
    for name in metrics[0]:
        if name.startswith("eval_") and not any(part in name for part in WITHOUT_TIMES):
            found[name] = [m[name] for m in metrics]
    weights = [p.detach().reshape(-1) for p in trainer.model.parameters()]
    return found | {"parameters": torch.cat(weights)}


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (2, {"completion_only_loss": True}),
        (3, {"packing": True, "packing_strategy": "bfd"}),
        (2, {"lora": True, "gradient_checkpointing": True}),
    ],
    ids=["padded", "packed", "lora"],
)
def test_supervised_fine_tuning_logs_and_learns_as_in_one_process(tmp_path, ranks, changes):
    expected = run(tmp_path, **changes)

    def rank(mesh):
        launched(mesh.get_rank(), ranks)
        return run(tmp_path, **changes)

    for actual in spawn(rank, ranks):
        assert_same(actual, expected)


@pytest.mark.parametrize("name", ["DPOTrainer", "KTOTrainer", "GRPOTrainer", "RewardTrainer"])
def test_other_losses_are_refused_by_name_at_construction(name):
    if not hasattr(trl, name):
        pytest.skip(f"TRL has no {name}")
    sharded = type("Sharded", (hf.TrainerMixin, getattr(trl, name)), {})
    with pytest.raises(FlexCPError, match=f"got {name}, which computes a loss of its own"):
        sharded(model=make(), mesh=2)
