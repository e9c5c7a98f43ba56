"""Numbers, defaults and messages of pages are those of the code, or of the raw tables that they were taken from."""

import ast
import inspect
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from pages import ROOT, as_script
from torch import nn

from booster import Booster, launch_from_torch
from booster import plugin as plugins
from booster.checkpoint.folder import DEAD
from booster.cli.run_command import DEFAULT_MASTER_PORT
from booster.memory import compare
from booster.mixed_precision import (
    BF16NaiveMixedPrecision,
    DelayedScaling,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
)
from booster.numerics import Budget
from booster.numerics.reports.compare import _DRIFT, _IN_LOSS, _IN_NORM
from booster.plugin import Plugin, SingleDevice

DOCS = ROOT / "docs"
# Messages of torch and of Python, which no file of the library has.
OF_OTHERS = (
    "Numpy is not available",
    "mat1 and mat2",
    "primitive descriptor",
    "expected scalar type",
    "finished reduction",
)
OF_OTHERS += ("create_graph=True is not", "setStorage", "Recomputed values", "got an unexpected keyword")


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text()


def constant(script: str, name: str) -> object:
    """What a script of benchmarks/figures sets `name` to, read without running it."""
    tree = ast.parse((ROOT / f"benchmarks/figures/{script}.py").read_text())
    (value,) = [
        each.value for each in tree.body if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == name
    ]
    return ast.literal_eval(value)


def default(called: object, name: str) -> object:
    return inspect.signature(called).parameters[name].default


HELD = {
    "fp32, bf16, fp16": ("bf16", {}),
    'naive, masters "fp32"': (BF16NaiveMixedPrecision(master_weights="fp32"), {}),
    'naive, masters "split"': (BF16NaiveMixedPrecision(master_weights="split"), {}),
    'naive, masters "split24"': (BF16NaiveMixedPrecision(master_weights="split24"), {}),
    'naive, masters "none"': (BF16NaiveMixedPrecision(master_weights="none"), {}),
    '"split24", states "8bit"': (BF16NaiveMixedPrecision(master_weights="split24", states="8bit"), {}),
    "kahan": (BF16NaiveMixedPrecision(master_weights="none", rounding="kahan"), {}),
    "bf16, 8bit": ("bf16", {"states": "8bit"}),
}


def test_bytes_of_a_parameter_are_those_of_the_picture_and_of_the_pages() -> None:
    drawn = {name: sum(size for _, size in parts) for name, parts in constant("weight_bits", "HELD").items()}
    held = {}
    for name, (precision, options) in HELD.items():
        b = Booster("cpu", precision, **options)
        net = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(5)))
        model, optimizer, *_ = b.boost(net, torch.optim.AdamW(net.parameters()))
        b.backward(model(torch.ones(2, 1024)).square().mean(), optimizer)
        optimizer.step()
        found = b.memory(model, optimizer)
        held[name] = (found.weights + found.masters + found.gradients + found.states) / (5 * 1024**2)
    assert {name: pytest.approx(held[name], abs=0.02) for name in drawn} == drawn
    masters = page("guides/half_weights").split("## Where the masters live")[1].split("\n## ")[0]
    table = re.findall(r"^\| `\"(\w+)\"`(, `rounding=\"kahan\"`)? \| (\d+) \|", masters, re.MULTILINE)
    said = {"kahan" if kahan else f'naive, masters "{name}"': int(size) for name, kahan, size in table}
    assert {name: pytest.approx(held[name], abs=0.02) for name in said} == said
    assert len(said) == 5
    for name, words in (("bf16, 8bit", "in 10.1 bytes|makes 10.1 bytes"), ('"split24", states "8bit"', "in 7.1 bytes")):
        assert re.search(words, page("guides/half_weights"))
        assert f"{held[name]:.1f}" in words


def test_a_page_shows_what_its_program_prints(capsys) -> None:
    text = page("concepts/step")
    exec(compile(as_script(text), "loss_scale.md", "exec"), {})  # noqa: S102
    printed = capsys.readouterr().out.splitlines()
    shown = text.split("```text\n")[1].split("```")[0].splitlines()
    assert printed[-len(shown) :] == shown
    steps = constant("guides", "STEPS")
    assert [(each.split()[0] == "True", each.split()[1]) for each in shown] == [(a, f"{2.0**s:g}") for a, s in steps]


PLANS = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "fsdp": "FSDP"}
PARTS = ("weights", "gradients", "states")


@cache
def shares_of_four_ranks() -> dict[str, list[float]]:
    """Of each plan, how much of weights, gradients and states one of four ranks holds, as it is estimated."""
    net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    job = (net, torch.optim.AdamW(net.parameters()), (torch.ones(4, 256), torch.ones(4, 256)), nn.MSELoss())
    found = {each.plugin: each for each in compare(*job, precisions=["fp32"], plugins=list(PLANS), world_sizes=[4])}
    whole = compare(*job, precisions=["fp32"])[0]
    return {plan: [getattr(found[plan], part) / getattr(whole, part) for part in PARTS] for plan in PLANS}


def test_what_each_rank_holds_in_the_picture_is_what_is_estimated() -> None:
    for plugin, name in PLANS.items():
        (held,) = [held for plan, held, _ in constant("guides", "PLANS") if plan == name]
        parts = shares_of_four_ranks()[plugin]
        assert parts == [pytest.approx(1 if kind == "w" else 0.25, rel=0.02) for kind in held], name


def test_the_picture_of_plugins_has_those_of_the_code() -> None:
    drawn = [plugin for _, plugin in constant("guides", "QUESTIONS")]
    classes = {name: getattr(plugins, name) for name in plugins.__all__}
    public = {name for name, kind in classes.items() if issubclass(kind, Plugin) and kind not in (Plugin, SingleDevice)}
    assert {plugin.partition("(")[0] for plugin in drawn} == public
    for plugin in drawn:
        options = [node.arg for node in ast.walk(ast.parse(plugin)) if isinstance(node, ast.keyword)]
        assert set(options) <= inspect.signature(classes[plugin.partition("(")[0]]).parameters.keys(), plugin
    assert {"tp_size", "pp_size"} <= inspect.signature(classes[drawn[-1]]).parameters.keys()  # what is left for it


def test_the_picture_of_plugins_asks_for_what_each_of_them_holds_whole() -> None:
    """What a question says fits on a device is what a rank holds whole, and each has room for less than the one above."""
    for plugin, (question, _) in zip(PLANS, constant("guides", "QUESTIONS"), strict=False):
        clause = question.split(",\n")[0]
        fits = [part in clause and "do not" not in clause for part in PARTS]
        assert [share > 0.9 for share in shares_of_four_ranks()[plugin]] == fits, question


@pytest.mark.parametrize("name", ["choice", "choice-dark"])
def test_the_picture_of_plugins_is_drawn_from_its_questions(name: str) -> None:
    words = [line for each in constant("guides", "QUESTIONS") for text in each for line in text.split("\n")]
    assert re.findall("<!-- (.*?) -->", (DOCS / f"images/{name}.svg").read_text()) == words


def test_a_checkpoint_has_the_files_of_the_picture(tmp_path: Path) -> None:
    b = Booster("cpu")
    model, optimizer, *_ = b.boost(net := nn.Linear(2, 2), torch.optim.SGD(net.parameters(), lr=0.1))
    b.save(tmp_path, model, optimizer, step=4)
    drawn = {name for _, name, _, _ in constant("guides", "FOLDER")}
    (folder,) = tmp_path.glob("step-*")
    assert f"{folder.name}/" in drawn
    assert {each.name for each in folder.iterdir()} == drawn - {"checkpoints/", "step-0000000004/"} - {
        "step-0000000008/",
        "tensors-00001.safetensors",  # of a second rank
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_table_of_formats_is_torch_s(dtype: torch.dtype) -> None:
    info, name = torch.finfo(dtype), str(dtype).removeprefix("torch.")
    (row,) = re.findall(rf"^\| {name} \|(.*)\|$", page("concepts/formats"), re.MULTILINE)
    bits, *numbers = map(float, row.split("|"))
    smallest = torch.tensor(1, dtype=torch.int32 if dtype is torch.float32 else torch.int16).view(dtype).item()
    assert bits == info.bits
    assert numbers == [pytest.approx(each, rel=0.02) for each in (info.max, info.tiny, smallest, info.eps)]


def test_idle_time_of_pipelines_is_that_of_their_formulas() -> None:
    ranks, batches, stages = 4, 8, 2
    plain, interleaved = ((ranks - 1) / (v * batches + ranks - 1) for v in (1, stages))
    words = page("concepts/seam")
    assert re.findall(r"idle (\d+) percent", words) == [f"{100 * each:.0f}" for each in (plain, plain, interleaved)]


def test_defaults_in_the_table_of_options_are_those_of_the_code() -> None:
    checked, precision = 0, FP16TorchMixedPrecision
    for table in re.findall(r"^\| option \| default \|.*\n\|.*\n((?:\|.*\n)+)", page("guides/options"), re.MULTILINE):
        for names, values in re.findall(r"^\| (.+?) \| (.+?) \|", table, re.MULTILINE):
            options, said = re.findall(r"`(\w+)", names), [each.strip("` ") for each in values.split(", ")]
            for option, value in zip(options, said * len(options) if len(said) == 1 else said, strict=True):
                found = default(precision, option)
                assert value == getattr(found, "__name__", None) or ast.literal_eval(power(value)) == found, option
                checked += 1
    assert checked >= 8


def power(value: str) -> str:
    """`value`, a power of two written out."""
    return re.sub(r"2\.0\*\*(\d+)", lambda found: str(2.0 ** int(found[1])), value)


def test_defaults_in_sentences_are_those_of_the_code() -> None:
    for name, words in {
        "guides/loop": f"Booster(max_consecutive_skips={default(Booster, 'max_consecutive_skips')})",
        "launch": f"`seed={default(launch_from_torch, 'seed')}` on all ranks",
        "guides/choose": "Budget"
        + re.sub(r": '[\w| ]+' = ", "=", str(inspect.signature(Budget))).replace("(*, ", "(").replace(".0,", ","),
        "low_precision": f"DelayedScaling(amax_history_len={default(DelayedScaling, 'amax_history_len')}, margin=0)",
    }.items():
        assert words.partition(" ->")[0] in page(name), name
    naive = {name: default(FP16NaiveMixedPrecision, name) for name in ("growth_interval", "hysteresis")}
    assert f"after {naive['growth_interval']:,} clean steps" in page("guides/half_weights")
    assert "falls at the second overflow" in page("guides/half_weights")
    assert naive["hysteresis"] == 2
    assert f"after {default(Booster, 'patience'):g} seconds (`Booster(patience=...)`)" in page("launch")
    assert "every 100th (`record(folder, every=100)`)" in page("numerics")
    assert default(Booster.record, "every") == 100
    assert "silent for a minute" in page("checkpoints")
    assert DEAD == 60


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("measured/speed#Speed", "2026-11-29-cpu"),
        ("measured/speed#Saving and loading", "2026-11-28-checkpoints-cpu"),
        ("guides/half_weights", "2026-11-22-states-cpu"),
    ],
)
def test_what_a_page_measured_is_in_the_raw_tables(name: str, raw: str) -> None:
    name, _, section = name.partition("#")
    words = page(name)
    if section:
        words = words.split(f"\n## {section}\n")[1].split("\n## ")[0]
        numbers = {
            each for row in re.findall(r"^\|.*\d.*\|$", words, re.M) for each in re.findall(r"\b\d[\d.]*\b", row)
        }
        numbers -= {"32", "1.15.0", "2.6.6"}  # of formats, of versions
    else:
        numbers = set(re.findall(r"\[(\d\.\d) times as long\]", words))
    assert numbers
    tables = (ROOT / "benchmarks" / "results" / f"{raw}.md").read_text()
    assert [each for each in sorted(numbers) if not re.search(rf"\b{re.escape(each)}\b", tables)] == []


def test_readme_and_pages_tell_one_story_of_the_h100_in_600_words() -> None:
    readme = (ROOT / "README.md").read_text()
    for words in ("2 to 26 times", "2.4 times as long as bf16", "(torch 2.11, 2026-11-23)"):
        for stated in (readme, page("compared")):
            assert words in re.sub(r"\s+", " ", stated)
    assert len(readme.split()) <= 600


def test_messages_of_troubleshooting_are_in_the_code() -> None:
    """Three words of each in a row; what is of torch or of Python is named above."""
    parts = []
    for path in (ROOT / "booster").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts.append("".join(v.value if isinstance(v, ast.Constant) else " {} " for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts.append(node.value)
    source = re.sub(r"\s+", " ", " \n ".join(parts))
    stated = re.findall(r"^- \*\*(.+)\*\*", page("faq"), re.MULTILINE)
    assert len(stated) >= 20
    missing = []
    for entry in stated:
        for message in re.findall(r"`([^`]+)`", entry):
            words = re.sub(r"\b\d+\b", "{}", message).split()
            runs = [" ".join(words[place : place + 3]) for place in range(max(len(words) - 2, 1))]
            if (
                len(words) > 2
                and not any(each in message for each in OF_OTHERS)
                and not any(run in source for run in runs)
            ):
                missing.append(message)
    assert missing == []


def test_the_readme_names_the_command_that_trains_and_the_one_that_runs_the_tests():
    text = (ROOT / "README.md").read_text()
    assert "`make demo`" in text
    assert "`make test`" in text


def test_the_picture_of_numbers_between_one_and_two_counts_them() -> None:
    (stated,) = re.findall(r"All numbers from 1 to 2: (.*?)\]", page("concepts/formats"))
    counted = {
        name: int(steps.replace(",", "")) for steps, name in re.findall(r"([\d,]+) (?:steps )?in ([\w ]+)", stated)
    }
    kinds = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
    steps = [round(1 / torch.finfo(dtype).eps) for dtype in kinds]
    assert list(counted.values()) == [*steps, 2]  # e2m1 has 1, 1.5 and 2
    assert list(counted) == ["float32", "float16", "bfloat16", "float8 e4m3", "e5m2", "float4"]
    (reach,) = re.findall(r"How far formats reach.*?\]", page("concepts/formats"))
    for dtype in (torch.float16, torch.float8_e5m2, torch.float8_e4m3fn):
        assert f" {torch.finfo(dtype).max:.0f}" in reach
    assert "bfloat16's next number is 1.0078" in page("concepts/step")
    assert f"{1 + torch.finfo(torch.bfloat16).eps:.4f}" == "1.0078"
    assert "bfloat16 keeps 8 bits of a number, float16 keeps 11" in page("guides/serving")
    assert [1 - torch.log2(torch.tensor(torch.finfo(d).eps)).int().item() for d in (kinds[2], kinds[1])] == [8, 11]


def test_comments_of_a_page_say_what_its_lines_print(capsys) -> None:
    (block,) = re.findall(r"^```python\n(import torch\n\ngradient.*?)^```", page("concepts/step"), re.M | re.S)
    exec(compile(block, "loss_scale.md", "exec"), {})  # noqa: S102
    zero, number = (float(each) for each in re.findall(r"tensor\((.*?)[,)]", capsys.readouterr().out))
    assert [float(each) for each in re.findall(r"# ([\d.e-]+):", block)] == [zero, pytest.approx(number, rel=1e-4)]


def test_bytes_that_states_take_and_that_the_bus_carries_are_those_of_the_code() -> None:
    """Of AdamW: its two moments in each form, and with them the masters of half weights, which offloading moves."""
    moved = {}
    for masters, states in (("split", "fp32"), ("split", "bf16"), ("split24", "8bit")):
        b = Booster("cpu", BF16NaiveMixedPrecision(master_weights=masters, states=states))
        net = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(5)))
        model, optimizer, *_ = b.boost(net, torch.optim.AdamW(net.parameters()))
        b.backward(model(torch.ones(2, 1024)).square().mean(), optimizer)
        optimizer.step()
        found, numbers = b.memory(model, optimizer), 5 * 1024**2
        assert f'| `"{states}"` | {round(found.states / numbers, 3):g} |' in page("guides/half_weights")
        moved[states] = (found.masters + found.states) / numbers
    stated = 'moves {:.0f} bytes a parameter each way over the bus; {:.1f} with `split24` and `"8bit"`'
    assert stated.format(moved["fp32"], moved["8bit"]) in re.sub(r"\s+", " ", page("memory"))


def test_what_zero_holds_on_a_rank_is_what_is_estimated() -> None:
    """Rows of bytes of each kind, whole or as N-th parts, on two ranks and on four."""
    table = re.findall(r"^\| (`\"\w+\"`[^|]*)\|(.*)\|$", page("guides/fsdp").split("## FSDP")[0], re.MULTILINE)
    assert len(table) == 3
    net = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4)))  # scratch is small compared with it
    job = (net, torch.optim.AdamW(net.parameters()), (torch.ones(4, 2048), torch.ones(4, 2048)), nn.MSELoss())
    for names, row in table:
        weights, first, second, states = (each.strip() for each in row.split("|"))
        precisions = re.findall(r"`\"(\w+)\"`", names)
        for found in compare(*job, precisions=precisions, plugins=["zero1", "zero2"], world_sizes=[2, 4]):
            gradients = first if found.plugin == "zero1" else second
            for said, kinds in ((weights, ("weights",)), (gradients, ("gradients",)), (states, ("masters", "states"))):
                bytes_, _, by_ranks = said.partition(" / ")
                part = int(bytes_) / (found.world_size if by_ranks else 1)
                assert sum(getattr(found, kind) for kind in kinds) / (4 * 2048**2) == pytest.approx(part, rel=0.05), (
                    said
                )


def test_what_is_sent_in_fp8_and_what_runs_may_differ_by_are_those_of_the_code() -> None:
    sent = 1 + 1 / 128  # a byte, and a one-byte scale for 128 numbers
    words = page("low_precision")
    assert f"| {2 * sent:.2f} (n-1)/n |" in words
    assert f"| {sent:.2f} (n-1)/n, instead of 2 |" in words
    stated = re.sub(r"\s+", " ", page("numerics"))
    assert f"{_IN_LOSS} unit roundoffs of the coarser format for a loss, and {_IN_NORM} for the norm" in stated
    assert f"more than {100 * _DRIFT:.0f} % apart" in stated
    assert f"{default(plugins.TorchDDPPlugin, 'bucket_cap_mb')} MiB" in page("memory")
    assert f"at most {default(Booster.save_model, 'size_per_shard')} MB" in page("checkpoints")
    assert f"The port is {DEFAULT_MASTER_PORT} unless" in page("launch")
