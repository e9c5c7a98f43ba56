"""The Trainer of transformers and those of TRL under a Booster on two ranks: DDP, ZeRO and FSDP.

Slow, and with the real packages: `make integrations` installs them.
"""

import functools
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


@pytest.fixture(autouse=True, scope="module")
def packages():
    """The packages, or a skip that says how to get them."""
    for package in ("transformers", "accelerate", "datasets", "trl", "peft"):
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            pytest.skip(f"needs {package}: pip install {package}")


def on_two_ranks(jobs):
    """By job, the losses by step that both ranks logged. All run in one launch, which has ended with 0.

    jobs: (folder, plugin, precision, kind, and the checkpoint to go on from, if any).
    """
    from trainers import llama

    words = []
    for folder, *job in jobs:
        folder.mkdir(exist_ok=True)
        llama().save_pretrained(folder / "start")
        words += [str(folder), *map(str, job), "--"]
    paths = os.pathsep.join([str(ROOT), str(SCRIPT.parent)])
    done = subprocess.run(
        [sys.executable, "-m", "booster", "run", "--nproc_per_node", "2", str(SCRIPT), *words[:-1]],
        env={**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = []
    for folder, *_ in jobs:
        first, second = (json.loads((folder / f"rank_{rank}.json").read_text()) for rank in (0, 1))
        assert [entry["loss"] for entry in first] == [entry["loss"] for entry in second]
        found.append({entry["step"]: entry["loss"] for entry in first})
    return found


def weights(checkpoint):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    assert model.config.num_hidden_layers == 2
    return model.state_dict()


def test_in_float32_every_plugin_logs_what_the_plain_trainer_does(tmp_path):
    plugins = ("plain", "none", "fsdp", "zero")
    plain, *others = on_two_ranks([(tmp_path / plugin, plugin, "fp32", "trainer") for plugin in plugins])
    assert len(plain) == 6
    exact = weights(tmp_path / "plain" / "checkpoint-6")
    for plugin, losses in zip(plugins[1:], others, strict=True):
        assert losses == pytest.approx(plain, rel=1e-5)
        ours = weights(tmp_path / plugin / "checkpoint-6")
        assert ours.keys() == exact.keys()
        for name, value in exact.items():  # Adam divides by small second moments: a few learning rates' thousandths
            assert torch.allclose(ours[name], value, atol=1e-4), name


PLUGINS, PRECISIONS = ("ddp", "fsdp", "zero"), ("fp16", "bf16_naive")


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """`resumed(plugin, precision)`: the folder and losses of a whole run, and of one that another launch went on with."""

    @functools.cache
    def runs():
        root, cases = tmp_path_factory.mktemp("resumed"), [(a, b) for a in PLUGINS for b in PRECISIONS]
        folders = {case: (root / f"whole_{'_'.join(case)}", root / f"resumed_{'_'.join(case)}") for case in cases}
        whole = on_two_ranks([(folders[case][0], *case, "trainer") for case in cases])
        others = on_two_ranks(
            [(folders[case][1], *case, "trainer", folders[case][0] / "checkpoint-4") for case in cases]
        )
        return {case: (*folders[case], a, b) for case, a, b in zip(cases, whole, others, strict=True)}

    return lambda plugin, precision: runs()[plugin, precision]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_run_resumes_to_the_bit(resumed, plugin, precision):
    whole, other, losses, losses_after = resumed(plugin, precision)
    # What ranks hold of a divided weight under fully_shard is its master, in float32.
    wanted = torch.bfloat16 if precision == "bf16_naive" and plugin != "fsdp" else torch.float32
    assert weights(whole / "checkpoint-4")["model.layers.0.mlp.up_proj.weight"].dtype == wanted
    assert losses_after == losses
    before, after = (weights(folder / "checkpoint-6") for folder in (whole, other))
    assert all(torch.equal(after[name], value) for name, value in before.items())


KINDS = ("sft", "dpo", "grpo", "sft+lora", "dpo+lora", "grpo+lora")


@pytest.fixture(scope="module")
def of_trl(tmp_path_factory):
    """`of_trl(kind)`: losses of a trainer of TRL on parts of weights, and of TRL's own on whole ones."""

    @functools.cache
    def runs():
        root = tmp_path_factory.mktemp("trl")
        found = iter(
            on_two_ranks(
                [(root / f"{kind}_{plugin}", plugin, "fp32", kind) for kind in KINDS for plugin in ("fsdp", "plain")]
            )
        )
        return dict(zip(KINDS, zip(found, found, strict=True), strict=True))

    return lambda kind: runs()[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_trainers_of_trl_train_on_parts_of_weights_as_on_whole_ones(of_trl, kind):
    divided, whole = of_trl(kind)
    assert divided == pytest.approx(whole, rel=1e-4, abs=1e-5)
