"""The parts of the GPT example: its text is what the README claims, its model is causal, its batches do not depend on ranks."""

import argparse
import json
import signal
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from programs import run

from booster.data import prepare_dataloader

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CORPUS = EXAMPLES / "data" / "jargon_file"
MODULES = {path.stem for path in (EXAMPLES / "gpt").glob("*.py")}


@pytest.fixture
def gpt(monkeypatch):
    """Import a module of the GPT example by name; the names are forgotten afterwards."""
    monkeypatch.setattr(sys, "path", [str(EXAMPLES / "gpt"), *sys.path])
    yield import_module
    for name in MODULES:
        sys.modules.pop(name, None)


# ---- the text


def test_the_embedded_text_is_small_and_says_where_it_is_from():
    readme = (CORPUS / "README.md").read_text()
    text = (CORPUS / "jargon_h_to_o.txt").read_bytes()
    assert "in the public domain" in readme
    assert f"{len(text):,} bytes" in readme
    assert f"{text.decode().count(chr(10) + ':') + 1} entries" in readme
    assert len(text) < 400_000


def test_the_excerpt_drops_margins_tables_coarse_words_and_the_lists_of_each_letter(
    monkeypatch,
):
    monkeypatch.setattr(sys, "path", [str(CORPUS), *sys.path])
    excerpt = import_module("make_excerpt").excerpt
    sys.modules.pop("make_excerpt")
    entries = {
        "g": "before",
        "h": "one\N{NO-BREAK SPACE}two\n\n   three",
        "hell": "a rape of grammar",
        "i": "│ cell │\n\n  J\n\n   jack in\n",
        "jack in": "last\n\n  P\n\n   P.O.D.\n",
        "P.O.D.": "after",
    }
    text = "".join(f"\n   :{name}:\n\n   {body}\n" for name, body in entries.items())
    assert excerpt(text) == ":h:\n\none two\n\nthree\n\n:jack in:\n\nlast\n"


def test_a_target_is_the_input_one_byte_later(gpt):
    splits = gpt("data").load_text(16)
    for split in (splits.train, splits.validation):
        inputs, target = split[len(split) - 1]
        assert inputs.shape == target.shape == (16,)
        assert torch.equal(inputs[1:], target[:-1])


def test_validation_reads_text_that_training_does_not(gpt):
    text = (CORPUS / "jargon_h_to_o.txt").read_bytes()
    splits = gpt("data").load_text(64)
    last, after = splits.train[len(splits.train) - 1][1], splits.validation[0][0]
    assert bytes(last[-4:].tolist()) + bytes(after[:4].tolist()) in text
    assert len(splits.train) + 64 == round(0.9 * len(text))
    assert len(splits.validation) == (len(text) - round(0.9 * len(text)) - 1) // 64


def test_windows_of_validation_do_not_overlap_and_a_text_shorter_than_one_is_refused(gpt):
    windows = gpt("data").Windows(torch.arange(9, dtype=torch.uint8), length=3, stride=3)
    assert [windows[index][0].tolist() for index in range(len(windows))] == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ValueError, match="a text of 16 bytes has no window of 16 and one more"):
        gpt("data").Windows(torch.zeros(16, dtype=torch.uint8), length=16, stride=1)


def test_the_images_are_normalised_and_labelled(gpt):
    images = gpt("data").load_images()
    assert (len(images.train), len(images.validation)) == (10_000, 4_000)
    pixels, labels = images.train.tensors
    assert pixels.shape == (10_000, 1, 28, 28)
    assert abs(pixels.mean()) < 0.05
    assert abs(pixels.std() - 1) < 0.05
    assert labels.bincount().tolist() == [1000] * 10


# ---- batches


def test_every_sample_is_drawn_once_before_any_comes_again(gpt):
    samples = gpt("data").drawn(range(10), 25, seed=3)
    order = [samples[index] for index in range(25)]
    assert sorted(order[:10]) == sorted(order[10:20]) == list(range(10))
    assert order[:10] != order[10:20]
    assert order != [gpt("data").drawn(range(10), 25, seed=4)[index] for index in range(25)]


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_ranks_together_see_the_batch_that_one_process_sees(gpt, world_size):
    samples = gpt("data").drawn(range(100), 24, seed=3)

    def batches(rank, of):
        loader = prepare_dataloader(samples, 8 // of, rank=rank, world_size=of)
        return [batch.tolist() for batch in loader]

    shares = zip(*(batches(rank, world_size) for rank in range(world_size)), strict=True)
    assert [sorted(sum(share, [])) for share in shares] == [sorted(batch) for batch in batches(0, 1)]


@pytest.mark.parametrize(("number", "chosen"), [(3, [0, 3, 6]), (10, list(range(10))), (99, list(range(10)))])
def test_validation_samples_come_from_all_over_the_split(gpt, number, chosen):
    assert list(gpt("data").spread(range(10), number)) == chosen


# ---- the model


def test_the_default_model_has_four_blocks_and_0_9_million_parameters(gpt):
    model = gpt("model").GPT()
    assert len(model.blocks) == 4
    assert sum(param.numel() for param in model.parameters()) == 867_072
    assert model(torch.zeros(2, 5, dtype=torch.long)).shape == (2, 5, 256)


def test_a_prediction_depends_on_what_came_before_alone(gpt):
    torch.manual_seed(0)
    model = gpt("model").GPT(width=16, num_blocks=2, num_heads=2, context=8)
    tokens = torch.randint(256, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    before, after = model(tokens)[0], model(changed)[0]

    torch.testing.assert_close(before[:5], after[:5], rtol=0, atol=0)
    assert (before[5:] != after[5:]).any(dim=-1).all()


def test_a_process_with_half_of_the_projections_computes_half_of_the_heads(gpt):
    torch.manual_seed(0)
    attention = gpt("model").CausalAttention(width=8, num_heads=4)
    x = torch.randn(2, 3, 8)
    whole = attention(x) - attention.out_proj.bias
    halves = []
    for part in (slice(0, 4), slice(4, 8)):
        half = gpt("model").CausalAttention(width=8, num_heads=4)
        for name in ("q_proj", "k_proj", "v_proj"):
            projection, full = getattr(half, name), getattr(attention, name)
            projection.weight, projection.bias = (
                torch.nn.Parameter(full.weight[part].detach()),
                torch.nn.Parameter(full.bias[part].detach()),
            )
        half.out_proj.weight = torch.nn.Parameter(attention.out_proj.weight[:, part].detach())
        torch.nn.init.zeros_(half.out_proj.bias)
        halves.append(half(x))
    torch.testing.assert_close(sum(halves), whole)


def test_a_tied_head_predicts_with_the_embedding_and_a_width_that_heads_do_not_divide_is_refused(gpt):
    model = gpt("model").GPT(width=16, num_blocks=1, num_heads=2, tied_head=True)
    assert model.head.weight is model.embed.token.weight
    assert "head.weight" not in dict(model.named_parameters())
    with pytest.raises(ValueError, match="width=10 does not divide by num_heads=4"):
        gpt("model").GPT(width=10, num_heads=4)


def test_every_linear_layer_of_a_block_is_in_the_plan_of_six_lines(gpt):
    module = gpt("model")
    block = module.GPT(width=16, num_blocks=1, num_heads=2).blocks[0]
    linear = {f"blocks.*.{name}" for name, child in block.named_modules() if isinstance(child, torch.nn.Linear)}
    assert set(module.GPT_PLAN) == linear
    assert len(linear) == 6


def test_the_loss_is_the_mean_over_all_predictions_of_text_and_of_images(gpt):
    cross_entropy = gpt("model").cross_entropy
    logits = torch.randn(2, 3, 5)
    target = torch.randint(5, (2, 3))
    rows = [cross_entropy(logits[b, t][None], target[b, t][None]) for b in range(2) for t in range(3)]
    torch.testing.assert_close(cross_entropy(logits, target), torch.stack(rows).mean())


# ---- flags, history, picture


def flags(**given):
    names = ("tp", "pp", "zero_stage", "pp_style", "microbatches")
    return argparse.Namespace(**{"model": "gpt", "plugin": "hybrid", **dict.fromkeys(names), **given})


@pytest.mark.parametrize(
    ("option", "value"), [("tp", 2), ("pp", 2), ("zero_stage", 1), ("pp_style", "gpipe"), ("microbatches", 2)]
)
def test_an_option_of_the_hybrid_is_refused_with_another_plugin(gpt, option, value):
    with pytest.raises(ValueError, match=f"--{option.replace('_', '-')} has no effect with --plugin ddp"):
        gpt("plugins").check_arguments(flags(plugin="ddp", **{option: value}))


def test_runs_that_differ_have_different_names(gpt):
    chosen = [{}, {"tp": 2}, {"pp": 2}, {"pp": 2, "pp_style": "zbv"}, {"zero_stage": 2}, {"plugin": "ddp"}]
    names = []
    for given in chosen:
        args = flags(**given)
        gpt("plugins").check_arguments(args)
        names.append(gpt("plugins").describe(args))
    assert len(set(names)) == len(chosen)


@pytest.mark.slow
def test_two_runs_are_drawn_over_one_another_and_their_distance_is_printed(gpt, tmp_path):
    pytest.importorskip("matplotlib")
    for name, loss in (("a", [3.0, 2.0, 1.5]), ("b", [3.0, 2.25, 1.5])):
        gpt("history").History(name, {}, loss=loss, validation_loss=1.4).save(tmp_path / f"{name}.json")
    done = run(EXAMPLES / "gpt" / "plot.py", "a.json", "b.json", "--output", "new/c.png", folder=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "b: 3 steps, loss 1.5000, at most 0.25 from a (mean 0.083)" in done.stdout
    assert (tmp_path / "new" / "c.png").stat().st_size > 10_000


def test_a_file_that_is_no_history_is_refused(gpt, tmp_path):
    (tmp_path / "other.json").write_text(json.dumps({"loss": []}))
    with pytest.raises(ValueError, match=r"other\.json is not a history"):
        gpt("history").History.load(tmp_path / "other.json")


# ---- checkpoints

TINY = [
    *("--width", "8", "--blocks", "1", "--heads", "2", "--context", "8", "--batch-size", "2", "--steps", "6"),
    *("--precision", "fp16", "--output"),
]


def trained(gpt, monkeypatch, folder, *options):
    """The history of a run of the script in this process."""
    monkeypatch.setattr(sys, "argv", ["train.py", *TINY, str(folder), *options])
    try:
        gpt("train").main()
    finally:
        if torch.distributed.is_initialized():  # as the end of the process does
            torch.distributed.destroy_process_group()
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text())


def test_a_run_that_breaks_off_is_resumed_from_its_last_save_and_ends_the_same(gpt, monkeypatch, tmp_path):
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    unbroken = trained(gpt, monkeypatch, tmp_path / "unbroken", "--save-every", "2")
    show, broken = gpt("train").DistCoordinator.print_on_master, tmp_path / "broken"

    def break_off(self, text):
        show(self, text)
        if text.startswith("step    5"):
            raise KeyboardInterrupt

    monkeypatch.setattr(gpt("train"), "STEPS_PER_LINE", 5)
    monkeypatch.setattr(gpt("train").DistCoordinator, "print_on_master", break_off)
    with pytest.raises(KeyboardInterrupt):
        trained(gpt, monkeypatch, broken, "--resume", "--save-every", "2")
    monkeypatch.setattr(gpt("train").DistCoordinator, "print_on_master", show)
    (checkpoints,) = broken.glob("*-checkpoints")
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-0000000002", "step-0000000004"]
    try:
        resumed = trained(gpt, monkeypatch, broken, "--resume", "--save-every", "2")
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for name in ("loss", "loss_scale", "skipped", "validation_loss"):
        assert resumed[name] == unbroken[name], name


# ---- adapters


@pytest.mark.slow
def test_adapters_on_a_base_of_four_bits_come_within_two_percent_of_those_on_a_float32_base(tmp_path):
    script = str(EXAMPLES / "gpt" / "adapters.py")
    options = ["--base", str(tmp_path / "base.safetensors"), "--base-steps", "150", "--steps", "100"]
    done = run(script, *options, timeout=600)
    assert done.returncode == 0, done.stderr
    words = {line.partition(":")[0]: line.replace(",", "").split() for line in done.stdout.splitlines()}
    base, wide, packed = (float(words[name][words[name].index("loss") + 1]) for name in ("base", "float32", "nf4"))
    assert wide < base - 0.02, "adapters learn"
    assert abs(packed / wide - 1) < 0.02
    assert float(words["nf4"][-4]) <= 0.6
    assert float(words["float32"][-4]) == 4.0
