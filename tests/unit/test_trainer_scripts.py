"""Scripts that go as transformers' own examples of language models and of classification: two lines boost them.

In float32 they log what they logged before. Slow, and with the real packages: `make integrations` installs them.
"""

import json
from pathlib import Path

import pytest
from language_models import texts, tokenizer
from trainers import changed_lines, llama, needed, run_script

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(3600)]
ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = {"language model": "train_clm.py", "classifier": "train_classifier.py"}


packages = needed("transformers", "accelerate", "datasets")


def boosted(text):
    """The script with the boosted Trainer under the name that it uses."""
    lines = []
    for line in text.splitlines(keepends=True):
        if line.startswith("from datasets"):
            lines.append("from booster.integrations.trainer import BoosterTrainer as Trainer\n")
        if line != "    Trainer,\n":
            lines.append(line)
    return "".join(lines)


def prepare(folder, kind):
    """Write a configuration, a tokenizer and texts into `folder`."""
    from transformers import BertConfig

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    of_bert = BertConfig(vocab_size=64, max_position_embeddings=32, hidden_dropout_prob=0.0, **sizes)
    (llama().config if kind == "language model" else of_bert).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    for name, start in (("train", 0), ("validation", 5)):
        rows = [{"text": text} for text in texts(48, start)]
        if kind == "classifier":
            rows = [{**row, "label": "high" if number % 60 >= 30 else "low"} for number, row in enumerate(rows, start)]
        (folder / f"{name}.json").write_text("\n".join(map(json.dumps, rows)) + "\n")


def run(folder, script, out, *flags):
    """By step, the losses that a run of the script logged, and what it evaluated at its end."""
    words = ["--config", folder, "--train_file", folder / "train.json", "--validation_file", folder / "validation.json"]
    words += ["--output_dir", out, "--max_steps", "6", "--logging_steps", "1", "--save_steps", "6", "--use_cpu"]
    words += ["--per_device_train_batch_size", "4", "--learning_rate", "1e-2", "--report_to", "none"]
    words += ["--disable_tqdm", "True", "--gradient_accumulation_steps", "2", *flags]
    run_script(script, words, folder)
    history = json.loads((out / "checkpoint-6" / "trainer_state.json").read_text())["log_history"]
    assert (out / "config.json").exists()
    assert (out / "README.md").exists()
    evaluated = json.loads((out / "eval_results.json").read_text())
    losses = {entry["step"]: entry["loss"] for entry in history if "loss" in entry}
    return losses, {name: evaluated[name] for name in ("eval_loss", "eval_accuracy")}


@pytest.mark.parametrize("kind", SCRIPTS)
def test_two_lines_boost_a_script_of_the_trainer(tmp_path, kind):
    script = ROOT / "tests" / "support" / SCRIPTS[kind]
    text, port = script.read_text(), tmp_path / "boosted.py"
    port.write_text(boosted(text))
    changed = changed_lines(text, port.read_text())
    assert len(changed) == 2  # a line that comes, and one that goes
    prepare(tmp_path, kind)
    plain, evaluated = run(tmp_path, script, tmp_path / "plain")
    ours, its = run(tmp_path, port, tmp_path / "ours")
    half, halves = run(tmp_path, port, tmp_path / "half", "--fp16", "True")
    assert len(plain) == 6
    assert ours == pytest.approx(plain, rel=1e-5, abs=1e-6)
    assert its == pytest.approx(evaluated, rel=1e-5)
    assert half == pytest.approx(plain, abs=0.02)
    assert half != ours  # it does compute in float16
    print(f"{kind}: plain {plain}, {evaluated}; boosted {ours}, {its}; boosted with --fp16 {half}, {halves}")
