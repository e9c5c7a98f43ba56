"""`booster estimate`: what it says, as a table and as JSON, and its exit statuses."""

import json
import re
from pathlib import Path

import pytest
import torch
from test_memory_estimate import JOB, WITHOUT_CUDA

from booster import memory
from booster.cli import main
from booster.memory.estimate_table import _COLOURS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def job(tmp_path):
    file = tmp_path / "job.py"
    file.write_text(JOB)
    return f"{file}:job"


@pytest.mark.slow
def test_json_has_every_precision_on_every_number_of_ranks_and_what_fits(job, capsys):
    options = ["--precision", "fp32,bf16_naive+8bit", "--plugin", "single,ddp", "--world_size", "2", "--json"]
    assert main(["estimate", *options, "--memory", "0.0022", job]) == 0
    answer = json.loads(capsys.readouterr().out)
    names = [each["name"] for each in answer["estimates"]]
    assert names == ["fp32", "fp32, ddp x 2", "bf16_naive+8bit", "bf16_naive+8bit, ddp x 2"]
    assert answer["memory"] == int(0.0022 * 2**30)
    assert answer["largest_batch"].keys() == set(names)
    assert answer["largest_batch"]["bf16_naive+8bit"] > answer["largest_batch"]["fp32"]
    assert answer["advice"].endswith("bf16_naive+8bit fits")
    held = {each["name"]: each["held"] for each in answer["estimates"]}
    assert held["fp32"] > 2 * held["bf16_naive+8bit"]


def test_a_larger_batch_takes_more_at_the_peak_and_in_inputs_alone(job, capsys):
    found = []
    for size in ("8", "80"):
        assert main(["estimate", "--precision", "fp32", "--json", "--batch_size", size, job]) == 0
        found += json.loads(capsys.readouterr().out)["estimates"]
    assert found[1]["inputs"] == 10 * found[0]["inputs"]
    assert found[1]["peak"] > found[0]["peak"]
    assert found[1]["states"] == found[0]["states"]


def test_released_gradients_are_not_held_and_a_clip_takes_a_second_pass(job, capsys):
    found = []
    for options in ([], ["--release_gradients", "exact"], ["--release-gradients", "exact", "--clips"]):
        assert (
            main(["estimate", *options, "--precision", "bf16", "--plugin", "ddp", "--world_size", "2", "--json", job])
            == 0
        )
        found += json.loads(capsys.readouterr().out)["estimates"]
    plain, released, clipped = found
    assert plain["gradients"] > 0
    assert (
        (released["gradients"], released["communication"]) == (clipped["gradients"], clipped["communication"]) == (0, 0)
    )
    assert released["peak"] < clipped["peak"]
    assert released["held"] == clipped["held"] < plain["held"]


def test_a_table_and_a_picture(job, tmp_path, capsys):
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    picture = tmp_path / "memory.png"
    assert main(["estimate", "--precision", "fp32,bf16", "--memory", "1", "--picture", str(picture), job]) == 0
    said = capsys.readouterr().out
    assert "largest batch" in said
    assert said.splitlines()[-1].startswith("fp32 fits")
    assert [line for line in said.splitlines() if line != line.rstrip()] == [], "padded with blanks"
    assert picture.exists()


def test_a_picture_has_the_sites_colours_and_numbers_on_its_bars(job, tmp_path):
    pytest.importorskip("matplotlib", reason="pictures are drawn by matplotlib")
    picture = tmp_path / "memory.svg"
    assert main(["estimate", "--precision", "fp32,bf16_naive", "--memory", "1", "--picture", str(picture), job]) == 0
    drawn = picture.read_text()
    style = (ROOT / "benchmarks" / "figures" / "style.py").read_text()
    for part in ("weights", "masters", "gradients", "states"):
        assert _COLOURS[part] in style
        assert f"fill: {_COLOURS[part]}" in drawn
    words = re.findall(r"<!-- (.*?) -->", drawn)
    assert sum(bool(re.fullmatch(r" ?[\d.,]+", word)) for word in words) > 6, (
        "of parts and of peaks, besides those of the axis"
    )
    assert "memory 1,024" in words


@pytest.mark.parametrize(("limit", "white"), [(None, ["44.0"]), (1229 * 2**20, [])])
def test_a_part_has_its_number_where_the_axis_gives_it_room(limit, white, tmp_path):
    pytest.importorskip("matplotlib", reason="pictures are drawn by matplotlib")
    parts = {"weights": 22, "gradients": 22, "states": 44, "inputs": 9, "activations": 400, "peak": 532}
    estimate = memory.Estimate(
        "fp32",
        "single",
        1,
        masters=0,
        communication=0,
        host=0,
        **{name: size * 2**20 for name, size in parts.items()},
    )
    memory.picture([estimate], tmp_path / "memory.svg", limit=limit)
    drawn = (tmp_path / "memory.svg").read_text()
    assert re.findall(r"<!-- ([\d.,]+) -->\s*<g style=\"fill: #ffffff\"", drawn) == white


def test_a_picture_is_not_written_through_a_link(job, tmp_path, capsys):
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    (tmp_path / "precious").write_text("mine")
    picture = tmp_path / "memory.png"
    picture.symlink_to(tmp_path / "precious")
    command = ["estimate", "--precision", "fp32", "--picture", str(picture), job]
    assert main(command) == 1
    assert "no regular file" in capsys.readouterr().err
    assert (tmp_path / "precious").read_text() == "mine"
    picture.unlink()
    for _ in range(2):
        assert main(command) == 0
        assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["nothing"], 1, "names no job"),
        (["--precision", "fp33", "JOB"], 2, "--precision: 'fp33' is no precision; choose from"),
        (["--precision", "cuda", "JOB"], 2, "--precision: 'cuda' is no precision; cuda is a device; choose from"),
        (["--plugin", "bf16", "JOB"], 2, "--plugin: 'bf16' is not estimated; bf16 is a precision; choose from"),
        (["--precision", "fp16_apex+8bit", "JOB"], 2, "in its own way"),
        (["--plugin", "tp", "--world_size", "2", "JOB"], 2, "--plugin: 'tp' is not estimated"),
        (["--precision", "half", "JOB"], 2, "--precision: 'half' is no precision; write fp16; choose from"),
        (["--plugin", "ddp", "JOB"], 2, "needs --world_size above 1"),
        (["--world_size", "4", "JOB"], 2, "--world_size is for ranks, and --plugin is single, one of them"),
        (["--memory", "-1", "JOB"], 2, "is not an amount of memory"),
        (["--batch_size", "0", "JOB"], 2, "is not a whole number of at least 1"),
        (["--precision", ",", "JOB"], 2, "names nothing"),
        pytest.param(["--device", "cuda", "JOB"], 1, "It needs a GPU, or a build of torch", marks=WITHOUT_CUDA),
    ],
)
def test_what_cannot_be_estimated_ends_with_a_status_and_the_reason(job, options, status, message, capsys):
    assert main(["estimate", *(job if option == "JOB" else option for option in options)]) == status
    assert message in capsys.readouterr().err


def test_a_missing_package_is_named_with_the_line_that_installs_it(capsys, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "timm", None)
    assert main(["estimate", "timm:resnet18"]) == 1
    assert "pip install timm" in capsys.readouterr().err


LOW = """
import torch
from torch import nn
def job():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8))
    return model, torch.optim.SGD(model.parameters()), (torch.ones(32, 64), torch.zeros(32, 8)), nn.MSELoss()
"""

# Both read a number out of a tensor: one by itself, the other through a layer of torch.
READING = """
import torch
from torch import nn
class Own(nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        return x / x.abs().max().item()
class Masked(nn.TransformerEncoder):
    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return super().forward(x, mask=mask)
def own():
    model = Own(8, 8)
    return model, torch.optim.SGD(model.parameters()), (torch.ones(2, 8), torch.zeros(2, 8)), nn.MSELoss()
def masked():
    model = Masked(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1, enable_nested_tensor=False)
    return model, torch.optim.SGD(model.parameters()), (torch.ones(2, 4, 8), torch.zeros(2, 4, 8)), nn.MSELoss()
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="about devices without fp8")
def test_a_low_precision_that_is_not_there_is_estimated_as_it_is_emulated_where_that_is_asked_for(tmp_path, capsys):
    (tmp_path / "low.py").write_text(LOW)
    job = f"{tmp_path / 'low.py'}:job"
    assert main(["estimate", "--precision", "fp8", job]) == 1
    said = capsys.readouterr().err
    assert "fp8 tensorwise needs an NVIDIA GPU" in said
    assert said.endswith("Add --emulate to estimate that\n")
    assert main(["estimate", "--precision", "fp32,fp8,fp8+8bit", "--emulate", "--json", job]) == 0
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)["estimates"]}
    assert found.keys() == {"fp32", "fp8", "fp8+8bit"}
    assert found["fp8"]["peak"] > found["fp32"]["peak"]


@pytest.mark.parametrize(
    ("function", "line", "fix"),
    [
        ("own", "7 in forward", "estimate the model without that line"),
        ("masked", "11 in forward", "is_causal=True of others"),
    ],
)
def test_a_number_read_out_of_a_tensor_is_named_with_the_line_of_the_script(function, line, fix, tmp_path, capsys):
    (tmp_path / "reading.py").write_text(READING)
    assert main(["estimate", "--precision", "fp32", f"{tmp_path / 'reading.py'}:{function}"]) == 1
    said = capsys.readouterr().err
    assert f"it reads a number out of a tensor at {tmp_path / 'reading.py'}:{line}" in said
    assert fix in said


@pytest.mark.parametrize("command", ["estimate", "advise"])
def test_what_the_script_itself_raises_is_told_with_its_line(command, tmp_path, capsys):
    (tmp_path / "own.py").write_text("def job():\n    raise ValueError('no data in ./data')\n")
    assert main([command, f"{tmp_path / 'own.py'}:job"]) in (1, 2)
    said = capsys.readouterr().err
    assert said == f"booster {command}: no data in ./data ({tmp_path / 'own.py'}:2 in job)\n"


def test_a_long_estimate_says_how_far_it_is_and_what_takes_so_long(tmp_path, monkeypatch, capsys):
    slow = LOW.replace("import torch\n", "import time, torch\n", 1).replace(
        "nn.MSELoss()", "lambda a, b: (time.sleep(0.1), (a - b).sum())[1]"
    )
    (tmp_path / "slow.py").write_text(slow)
    monkeypatch.setattr("booster.cli.planning_commands._PATIENCE", 0.02)
    options = ["--precision", "fp32", "--plugin", "single,ddp", "--world_size", "2", "--json"]
    assert main(["estimate", *options, f"{tmp_path / 'slow.py'}:job"]) == 0
    said = capsys.readouterr().err.splitlines()
    assert re.match(r"booster estimate: 1 of 2, fp32, after \d+ s: every operation of forward and backward is", said[0])
    assert re.match(r"booster estimate: 2 of 2, fp32, ddp x 2, after \d+ s$", said[-1])
    assert sum("every operation" in line for line in said) == 1


def test_the_table_says_what_its_columns_are(job, capsys):
    pytest.importorskip("rich")
    assert main(["estimate", "--precision", "fp32", job]) == 0
    said = capsys.readouterr().out
    assert said.startswith("MiB on one rank, for a batch of 8")
    for line in ("held: what is there between steps", "peak: the highest point of a step", "docs/memory.md"):
        assert line in said
    assert "masters:" not in said, "a column that is not there"


SCALAR = """
import torch


class Learned(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        return (self.weight * x).sum()


def job():
    model = Learned()
    return model, torch.optim.SGD(model.parameters()), (torch.tensor(2.0), torch.tensor(1.0)), torch.nn.MSELoss()
"""


def test_a_batch_without_samples_is_estimated_all_the_same(tmp_path, capsys):
    (tmp_path / "scalar.py").write_text(SCALAR)
    assert main(["estimate", "--precision", "fp32", f"{tmp_path / 'scalar.py'}:job"]) == 0
    assert "for a batch" not in capsys.readouterr().out
