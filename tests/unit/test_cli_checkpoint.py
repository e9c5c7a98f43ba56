"""`booster checkpoint`: what it lists, its exit statuses, and the files that it writes."""

import json

import pytest
import torch
from torch import nn

from booster import Booster
from booster.cli import main
from booster.mixed_precision import BF16NaiveMixedPrecision

safetensors = pytest.importorskip("safetensors.torch")


@pytest.fixture
def saved(tmp_path):
    """A folder with checkpoints of steps 1 and 2, and the model and the masters of the second."""
    torch.manual_seed(0)
    booster = Booster("cpu", BF16NaiveMixedPrecision(master_weights="fp32"))
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for step in (1, 2):
        booster.backward(model(torch.randn(3, 4)).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        booster.save(tmp_path / "run", model, optimizer, step=step)
    return tmp_path / "run", model.state_dict(), optimizer.state_dict()["booster"]["masters"]["weights"]


def run(*arguments):
    return main(["checkpoint", *map(str, arguments)])


def damaged(folder):
    file = next(folder.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_show_lists_the_newest(saved, capsys):
    folder, state, _ = saved
    assert run("show", "--json", folder) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["step"], report["world_size"], report["plugin"]) == (2, 1, "SingleDevice")
    assert report["parameters"] == {
        f"models/0/{name}": [report["parameters"][f"models/0/{name}"][0], list(value.shape)]
        for name, value in state.items()
    }
    assert run("show", folder) == 0
    assert "0/0.weight" in capsys.readouterr().out


def test_verify_tells_by_its_status(saved, capsys):
    folder, *_ = saved
    assert run("verify", folder) == 0
    assert capsys.readouterr().out.count("whole") == 2
    damaged(folder / "step-0000000002")
    assert run("verify", folder) == 1
    assert run("verify", folder / "step-0000000001") == 0
    assert run("verify", folder / "step-0000000002") == 1
    assert run("verify", folder.parent) == 1
    assert "there is no checkpoint in" in capsys.readouterr().err


@pytest.mark.parametrize("masters", [False, True], ids=["weights", "masters"])
@pytest.mark.parametrize("torch_files", [False, True], ids=["safetensors", "torch"])
@pytest.mark.parametrize("shard", [False, True], ids=["one file", "shards"])
def test_convert_writes_the_weights(saved, tmp_path, masters, torch_files, shard):
    folder, state, wide = saved
    target = tmp_path / "out" if shard else tmp_path / "out.file"
    options = ["--masters"] * masters + ["--torch"] * torch_files + (["--shard", "1"] if shard else [])
    assert run("convert", folder, target, *options) == 0
    files = [target]
    if shard:
        index = json.loads(next(target.glob("*.index.json")).read_text())
        files = [target / name for name in set(index["weight_map"].values())]
    found = {}
    for file in files:
        found |= torch.load(file, weights_only=True) if torch_files else safetensors.load_file(file)
    expected = {**state, **wide} if masters else state
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


def test_convert_refuses_what_is_not_there_and_what_is_damaged(saved, tmp_path, capsys):
    folder, *_ = saved
    assert run("convert", folder, tmp_path / "out", "--model", "critic") == 1
    assert "holds no model 'critic'; choose one of ['0']" in capsys.readouterr().err
    damaged(folder / "step-0000000002")
    assert run("convert", folder / "step-0000000002", tmp_path / "out") == 1
    assert "is damaged" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
