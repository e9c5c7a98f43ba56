"""A small causal language model, its rows and arguments, for the Trainer of transformers; nothing is downloaded."""

import difflib
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

VOCABULARY = 64


class Rows(Dataset):
    """Rows of tokens of several lengths; the labels of the first few tokens do not count."""

    def __init__(self, count=36, lengths=(12,)):
        chance = torch.Generator().manual_seed(1)
        self.rows = [torch.randint(1, VOCABULARY, (lengths[i % len(lengths)],), generator=chance) for i in range(count)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        labels = self.rows[index].clone()
        labels[: index % 5] = -100  # so that batches differ in what counts
        return {"input_ids": self.rows[index], "labels": labels}


def llama(seed=0, width=32, *, tied=False):
    import transformers

    torch.manual_seed(seed)
    sizes = {
        "hidden_size": width,
        "intermediate_size": max(64, width),
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    sizes |= {"tie_word_embeddings": tied}
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, pad_token_id=0, **sizes)
    return transformers.LlamaForCausalLM(config)


def arguments(folder, **options):
    """TrainingArguments on a CPU, twelve steps of two micro-batches of two rows, with every step logged."""
    import transformers

    usual = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 12, "logging_steps": 1}
    usual |= {"save_strategy": "no", "report_to": [], "learning_rate": 1e-2, "use_cpu": True, "disable_tqdm": True}
    usual |= {"max_grad_norm": 0.5, "lr_scheduler_type": "cosine", "output_dir": str(folder)}
    return transformers.TrainingArguments(**{**usual, **options})


def logged(trainer, key="loss"):
    """By step, what was logged under `key`."""
    return {entry["step"]: entry[key] for entry in trainer.state.log_history if key in entry}


def needed(*names):
    """A fixture for every test of a module: it imports these packages, or skips and says how to get them."""

    @pytest.fixture(autouse=True)
    def packages(import_package, monkeypatch):
        for name in names:
            try:
                metadata.version(name)
            except metadata.PackageNotFoundError:
                pytest.skip(f"needs {name}: pip install {name}")
            import_package(name)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)  # left by arguments of an older transformers
        if "accelerate" in names:
            from accelerate.state import AcceleratorState

            AcceleratorState._reset_state()

    return packages


def run_script(script, words, folder):
    """Run a script of a trainer by itself, with this library and tests/support to import, and nothing from the hub."""
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "tests" / "support")])
    environment["HF_DATASETS_CACHE"] = str(folder / "cache")
    command = [sys.executable, script, *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def changed_lines(before, after):
    """Lines that come and go between two texts, which are printed with their places."""
    diff = [*difflib.unified_diff(before.splitlines(), after.splitlines(), "before", "after", lineterm="", n=0)]
    print("\n".join(diff))
    return [line for line in diff if line[0] in "+-" and not line.startswith(("+++", "---"))]
