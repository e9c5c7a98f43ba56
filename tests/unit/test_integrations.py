"""The examples with other libraries run as they stand, and learn; each is one file of at most 80 lines.

Slow, but for the checks of the files themselves. An example without its package is skipped, with the line that installs it.
"""

import gc
import os
import re
import runpy
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "integrations"
# By example: what must be installed, and what is compared of what it prints.
NEEDS = {
    "averaged_weights": [],
    "compile_model_and_step": [],
    "fsdp_tp_float16": [],
    "hf_datasets": ["datasets"],
    "iterable_dataset": ["webdataset"],
    "jsonargparse_config": ["jsonargparse"],
    "optuna_search": ["optuna"],
    "peft_lora": ["peft", "transformers"],
    "rl_float16": ["transformers"],
    "third_party_optimizers": ["schedulefree", "lion-pytorch", "timm"],
    "timm_recipe": ["timm"],
    "torchmetrics_accuracy": ["torchmetrics"],
    "transformers_models": ["transformers"],
}


def test_every_example_has_a_test_and_a_row_in_the_table():
    examples = {path.stem for path in FOLDER.glob("*.py")}
    assert examples == set(NEEDS)
    page = (ROOT / "docs" / "examples.md").read_text()
    assert examples <= set(re.findall(r"examples/integrations/(\w+)\.py", page))


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short_and_says_how_to_run_it(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 80
    assert f"examples/integrations/{path.name}" in text


@pytest.fixture
def example(import_package, capsys, monkeypatch):
    """`example(name, *arguments)`: what the example prints."""
    for package in ("torchvision", "timm", "transformers"):
        import_package(package)  # other libraries import these, and they may need help
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")

    def run(name, *arguments):
        for package in NEEDS[name]:
            try:
                metadata.version(package)
            except metadata.PackageNotFoundError:
                pytest.skip(f"needs {package}: pip install {package}")
        monkeypatch.setattr(sys, "argv", [str(FOLDER / f"{name}.py"), *arguments])
        runpy.run_path(sys.argv[0], run_name="__main__")
        return capsys.readouterr().out

    yield run
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()
    torch.compiler.reset()


def losses(text):
    """By name, the first and the last loss of lines such as `lora: loss 4.1 -> 0.2`."""
    found = re.findall(r"^(.+): (?:\d+ \w+, )?loss ([\d.]+) -> ([\d.]+)", text, re.M)
    return {name: (float(first), float(last)) for name, first, last in found}


def fell(text, names, by=0.6):
    """Every loss fell below `by` of the first."""
    seen = losses(text)
    assert set(seen) == set(names), text
    for name, (first, last) in seen.items():
        assert last < by * first, f"{name}: {first} -> {last}"


slow = pytest.mark.slow
quiet = pytest.mark.filterwarnings("ignore")  # of others, on their own code


@slow
@quiet
@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16_naive"])
def test_models_of_transformers_train_checkpointed_and_generate(example, precision):
    out = example("transformers_models", precision)
    fell(out, ["llama", "bert", "vit", "whisper", "t5"], by=0.9)
    assert re.search(r"generated: \[1, 2, 3, 4, \d+, \d+, \d+, \d+\]", out)


@slow
@quiet
@pytest.mark.parametrize("precision", ["bf16_naive", "fp16"])
def test_adapters_of_peft_train_alone_and_merge(example, precision):
    out = example("peft_lora", precision)
    fell(out, ["lora"], by=0.8)
    assert "frozen weights unchanged: True" in out
    assert abs(float(re.search(r"merged: loss ([\d.]+)", out)[1]) - losses(out)["lora"][1]) < 0.5


@slow
@quiet
def test_float16_trains_the_policy_that_was_sampled_nearer_than_bfloat16(example):
    out = example("rl_float16", "1")
    rows = {line[:20].strip(): [float(word.rstrip("%")) for word in line[20:].split()] for line in out.splitlines()[1:]}
    difference = {name: numbers[0] for name, numbers in rows.items()}
    kl = {name: numbers[1] for name, numbers in rows.items()}
    # Three bits more of significand: an eighth of the difference and its square of the divergence, with room for chance.
    assert difference["fp16"] < difference["bf16"] / 5
    assert difference["fp16, head in fp32"] < difference["bf16_naive"] / 5
    assert kl["fp16"] < kl["bf16"] / 25


@slow
@pytest.mark.parametrize("precision", ["fp32", "fp16", "fp16_naive"])
def test_fsdp_and_tensor_parallelism_learn_under_a_loss_scale_what_one_device_does(precision):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    found = []
    for launcher in ([], ["-m", "booster", "run", "--nproc_per_node", "4"]):
        words = [sys.executable, *launcher, str(FOLDER / "fsdp_tp_float16.py"), precision]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("step 10 skipped on all ranks") == (precision != "fp32")
        fell(done.stdout, [precision], by=0.2)
        found.append(losses(done.stdout)[precision])
    unit = 1e-4 if precision == "fp32" else 2**-9  # the last digit printed; roundings to 11 bits of thirty steps
    assert found[0] == pytest.approx(found[1], rel=4 * unit)
    head = "float16" if precision == "fp16" else "float32"
    layers = "float32" if precision == "fp32" else "float16"
    assert f"a sampler gets layers in torch.{layers}, a head in torch.{head}" in done.stdout


@slow
@quiet
def test_the_recipe_of_timm_trains_and_its_average_knows_the_classes(example):
    out = example("timm_recipe", "bf16")
    fell(out, ["timm"], by=0.9)
    assert float(re.search(r"accuracy of the average: ([\d.]+)", out)[1]) > 0.9


@slow
@quiet
def test_averages_of_torch_follow_the_weights(example):
    out = example("averaged_weights")
    found = {name: float(loss) for name, loss in re.findall(r"^(\w+): loss ([\d.]+)", out, re.M)}
    assert set(found) == {"trained", "EMA", "SWA"}
    assert max(found["EMA"], found["SWA"]) < 2 * found["trained"]


@slow
@quiet
@pytest.mark.parametrize("kind", ["torch", "webdataset"])
def test_streams_train(example, kind):
    out = example("iterable_dataset", kind)
    fell(out, [kind], by=0.8)
    assert "14 batches" in out


@slow
@quiet
def test_rows_of_datasets_train(example):
    fell(example("hf_datasets"), ["datasets"])


@slow
@quiet
def test_metrics_of_torchmetrics_count(example):
    accuracies = [float(value) for value in re.findall(r"accuracy ([\d.]+)", example("torchmetrics_accuracy"))]
    assert len(accuracies) == 5
    assert accuracies[-1] > max(0.8, accuracies[0])


@slow
@quiet
def test_options_of_jsonargparse_reach_precision_and_optimizer(example):
    out = example("jsonargparse_config", "--precision.scale", "1024", "--optimizer.lr", "0.1")
    fell(out, ["jsonargparse"])
    assert "scale 1024" in out
    with pytest.raises(SystemExit):
        example("jsonargparse_config", "--precision.no_such_option", "3")


@slow
@quiet
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_optimizers_of_others_train_under_autocast(example, precision):
    out = example("third_party_optimizers", precision)
    fell(out, ["schedule-free AdamW", "Lion", "timm LAMB", "timm AdamP", "Muon"], by=0.85)


@slow
@quiet
def test_split_masters_refuse_optimizers_that_look_at_whole_tensors_and_say_what_to_do(example):
    out = example("third_party_optimizers", "bf16_naive")
    refused = re.findall(r"^(.+): refused under bf16_naive: (.+)$", out, re.M)
    fell(
        out, {"schedule-free AdamW", "Lion", "timm LAMB", "timm AdamP", "Muon"} - {name for name, _ in refused}, by=0.85
    )
    assert "Lion" not in {name for name, _ in refused}
    assert all("register_elementwise" in reason for _, reason in refused)


@slow
@quiet
@pytest.mark.parametrize("precision", ["bf16", "fp16_naive"])
def test_a_compiled_model_and_step_train_to_the_losses_of_eager_ones(example, precision):
    out = example("compile_model_and_step", precision)
    fell(out, ["eager", "compiled"], by=0.9)
    assert float(re.search(r"at most ([\d.]+) apart", out)[1]) < 0.02


@slow
@quiet
def test_trials_of_optuna_search_rate_and_precision(example):
    out = example("optuna_search")
    assert float(re.search(r"best loss ([\d.]+)", out)[1]) < 0.7
