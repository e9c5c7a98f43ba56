"""TRL's own scripts, as its package brings them: two lines boost them, and in float32 they log what they logged before.

Slow, and with the real packages: `make integrations` installs them.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from language_models import rows, tokenizer
from trainers import changed_lines, llama, needed, run_script

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(3600)]
ROOT = Path(__file__).resolve().parents[2]
MORE = {
    "grpo": ["--reward_funcs", "trainer_ranks.even_words", "--num_generations", "2", "--max_completion_length", "8"]
}


packages = needed("transformers", "accelerate", "datasets", "trl")


def boosted(text, kind):
    """The script with a boosted trainer."""
    name = f"{kind.upper()}Trainer"
    lines = []
    for line in text.splitlines(keepends=True):
        lines.append(line.replace(f"trainer = {name}(", f"trainer = boosted_trainer({name})("))
        if line.startswith(f"    from trl import {name}"):
            lines.append("    from booster.integrations.trainer import boosted_trainer\n")
    return "".join(lines)


def losses(folder, script, kind, *flags):
    """By step, what a run of the script logged."""
    folder.mkdir()
    start, data, out = folder / "start", folder / "data", folder / "out"
    llama().save_pretrained(start)
    tokenizer().save_pretrained(start)
    data.mkdir()
    rows(kind).to_json(data / "train.jsonl")
    words = [
        "--model_name_or_path",
        start,
        "--dataset_name",
        data,
        "--output_dir",
        out,
        "--max_steps",
        "4",
        "--use_cpu",
    ]
    words += ["--logging_steps", "1", "--save_steps", "4", "--per_device_train_batch_size", "2", "--report_to", "none"]
    words += ["--learning_rate", "1e-2", "--bf16", "False", "--disable_tqdm", "True", "--dtype", "float32", *flags]
    run_script(script, [*words, *MORE.get(kind, [])], folder)
    state = json.loads((out / "checkpoint-4" / "trainer_state.json").read_text())
    assert (out / "config.json").exists()
    return {entry["step"]: entry["loss"] for entry in state["log_history"] if "loss" in entry}


@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_two_lines_boost_a_script_of_trl(tmp_path, kind):
    spec = find_spec("trl")
    script = Path(next(iter(spec.submodule_search_locations))) / "scripts" / f"{kind}.py"
    text = script.read_text()
    port = tmp_path / f"{kind}_boosted.py"
    port.write_text(boosted(text, kind))
    changed = changed_lines(text, port.read_text())
    assert len(changed) == 3  # a line that comes, and one that is another
    plain = losses(tmp_path / "plain", script, kind)
    ours = losses(tmp_path / "ours", port, kind)
    assert ours == pytest.approx(plain, rel=1e-5, abs=1e-6)
    half = losses(tmp_path / "half", port, kind, "--fp16", "True")
    assert half == pytest.approx(plain, abs=0.05)
    print(f"{kind}: plain {plain}, boosted {ours}, boosted with --fp16 {half}")
