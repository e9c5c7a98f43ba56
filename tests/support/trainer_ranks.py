"""A script for several ranks: boosted Trainers with a plugin, one after another, what each logged as JSON.

    booster run --nproc_per_node 2 trainer_ranks.py FOLDER PLUGIN PRECISION KIND [CHECKPOINT] [-- FOLDER PLUGIN ...]

PLUGIN: "ddp", "fsdp" or "zero"; "none" gives no plugin, and "plain" is a run without a booster. KIND: "trainer", or a
trainer of TRL: "sft", "dpo", "grpo"; with "+lora", adapters alone train. It writes FOLDER/rank_N.json.
"""

import json
import sys
import warnings
from itertools import groupby
from pathlib import Path

import torch.distributed as dist
from accelerate.state import AcceleratorState
from language_models import rows, tokenizer
from trainers import Rows, arguments, llama

warnings.simplefilter("ignore")


def plugin_named(name):
    from booster import plugin

    kinds = {"ddp": "TorchDDPPlugin", "fsdp": "TorchFSDPPlugin", "zero": "LowLevelZeroPlugin"}
    return None if name == "none" else getattr(plugin, kinds[name])()


def even_words(completion_ids, **kwargs):
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]


def adapters(kind):
    from peft import LoraConfig

    if "+lora" not in kind:
        return None
    return LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def make(folder, plugin, precision, kind):
    import transformers

    from booster.integrations.trainer import BoosterTrainer, boosted_trainer

    usual = {"save_strategy": "steps", "save_steps": 4, "max_steps": 6, "per_device_train_batch_size": 2}
    if kind == "trainer":
        args = arguments(folder, **usual)
        given = {"model": llama(), "train_dataset": Rows(32)}
        if plugin == "plain":
            return transformers.Trainer(args=args, **given)
        return BoosterTrainer(args=args, **given, mixed_precision=precision, plugin=plugin_named(plugin))
    import trl

    name = kind.partition("+")[0]
    usual |= {"logging_steps": 1, "report_to": [], "learning_rate": 1e-2, "use_cpu": True, "disable_tqdm": True}
    usual |= {"output_dir": str(folder), "bf16": False, "gradient_accumulation_steps": 2}
    if name == "grpo":
        usual |= {"num_generations": 2, "max_completion_length": 24, "beta": 0.1}
    args = getattr(trl, f"{name.upper()}Config")(**usual)
    given = {"model": transformers.AutoModelForCausalLM.from_pretrained(folder / "start"), "args": args}
    given |= {"train_dataset": rows(name), "processing_class": tokenizer(), "peft_config": adapters(kind)}
    given |= {"reward_funcs": even_words} if name == "grpo" else {}
    trainer = getattr(trl, f"{name.upper()}Trainer")
    if plugin == "plain":
        return trainer(**given)
    return boosted_trainer(trainer)(**given, mixed_precision=precision, plugin=plugin_named(plugin))


def main(folder, plugin, precision, kind, checkpoint=None):
    AcceleratorState._reset_state()  # what a Trainer finds of the one before
    folder = Path(folder)
    trainer = make(folder, plugin, precision, kind)
    trainer.train(resume_from_checkpoint=checkpoint)
    found = [entry for entry in trainer.state.log_history if "loss" in entry]
    (folder / f"rank_{dist.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    for _, job in groupby(sys.argv[1:], "--".__ne__):
        if (words := list(job)) != ["--"]:
            main(*words)
