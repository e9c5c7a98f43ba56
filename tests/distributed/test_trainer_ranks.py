"""The Trainer of transformers and those of TRL under a Booster on two ranks: DDP, ZeRO and FSDP.

Slow, and with the real packages: `make integrations` installs them.
"""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(3600)]
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "support" / "trainer_ranks.py"


@pytest.fixture(autouse=True)
def packages():
    """The packages, or a skip that says how to get them."""
    for package in ("transformers", "accelerate", "datasets", "trl", "peft"):
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            pytest.skip(f"needs {package}: pip install {package}")


def on_two_ranks(folder, plugin, precision, kind="trainer", checkpoint=None):
    """Losses by step, which both ranks logged; the job has ended with 0."""
    from trainers import llama

    folder.mkdir(exist_ok=True)
    llama().save_pretrained(folder / "start")
    words = [str(folder), plugin, precision, kind] + ([] if checkpoint is None else [str(checkpoint)])
    paths = os.pathsep.join([str(ROOT), str(SCRIPT.parent)])
    done = subprocess.run(
        [sys.executable, "-m", "booster", "run", "--nproc_per_node", "2", str(SCRIPT), *words],
        env={**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((folder / f"rank_{rank}.json").read_text()) for rank in (0, 1))
    assert [entry["loss"] for entry in first] == [entry["loss"] for entry in second]
    return {entry["step"]: entry["loss"] for entry in first}


def weights(checkpoint):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    assert model.config.num_hidden_layers == 2
    return model.state_dict()


def test_in_float32_every_plugin_logs_what_the_plain_trainer_does(tmp_path):
    plain = on_two_ranks(tmp_path / "plain", "plain", "fp32")
    assert len(plain) == 6
    exact = weights(tmp_path / "plain" / "checkpoint-6")
    for plugin in ("none", "fsdp", "zero"):
        assert on_two_ranks(tmp_path / plugin, plugin, "fp32") == pytest.approx(plain, rel=1e-5)
        ours = weights(tmp_path / plugin / "checkpoint-6")
        assert ours.keys() == exact.keys()
        for name, value in exact.items():  # Adam divides by small second moments: a few learning rates' thousandths
            assert torch.allclose(ours[name], value, atol=1e-4), name


@pytest.mark.parametrize("precision", ["fp16", "bf16_naive"])
@pytest.mark.parametrize("plugin", ["ddp", "fsdp", "zero"])
def test_a_run_resumes_to_the_bit(tmp_path, plugin, precision):
    whole = on_two_ranks(tmp_path / "whole", plugin, precision)
    checkpoint = tmp_path / "whole" / "checkpoint-4"
    # What ranks hold of a divided weight under fully_shard is its master, in float32.
    wanted = torch.bfloat16 if precision == "bf16_naive" and plugin != "fsdp" else torch.float32
    assert weights(checkpoint)["model.layers.0.mlp.up_proj.weight"].dtype == wanted
    assert on_two_ranks(tmp_path / "resumed", plugin, precision, "trainer", checkpoint) == whole
    before, after = (weights(tmp_path / name / "checkpoint-6") for name in ("whole", "resumed"))
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo", "sft+lora", "dpo+lora", "grpo+lora"])
def test_trainers_of_trl_train_on_parts_of_weights_as_on_whole_ones(tmp_path, kind):
    divided = on_two_ranks(tmp_path / "fsdp", "fsdp", "fp32", kind)
    whole = on_two_ranks(tmp_path / "plain", "plain", "fp32", kind)
    assert divided == pytest.approx(whole, rel=1e-4, abs=1e-5)
