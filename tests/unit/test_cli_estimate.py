"""`booster estimate`: what it says, as a table and as JSON, and its exit statuses."""

import json

import pytest
from test_memory_estimate import JOB, OF_CPUS

from booster.cli import main


@pytest.fixture
def job(tmp_path):
    file = tmp_path / "job.py"
    file.write_text(JOB)
    return f"{file}:job"


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
    assert picture.exists()


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["nothing"], 1, "names no job"),
        (["--precision", "fp33", "JOB"], 2, "--precision: 'fp33' is no precision"),
        (["--precision", "fp16_apex+8bit", "JOB"], 2, "in a way of its own"),
        (["--plugin", "tp", "--world_size", "2", "JOB"], 2, "--plugin: 'tp' is not estimated"),
        (["--plugin", "ddp", "JOB"], 2, "needs --world_size"),
        (["--memory", "-1", "JOB"], 2, "is not an amount of memory"),
        (["--batch_size", "0", "JOB"], 2, "is not a whole number of at least 1"),
        (["--precision", ",", "JOB"], 2, "names nothing"),
        pytest.param(["--device", "cuda", "JOB"], 1, "cannot be estimated by this build of torch", marks=OF_CPUS),
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
