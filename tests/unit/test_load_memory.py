"""A load into masters is to the bit, and has no more in memory twice than a few buckets."""

import copy
import math
from pathlib import Path

import pytest
import torch
from bytes_alive import BytesAlive
from comparing import same
from torch import nn

from booster import Booster
from booster.checkpoint import CheckpointError
from booster.masters.masters import Masters
from booster.mixed_precision import BF16NaiveMixedPrecision, FP16NaiveMixedPrecision

FORMS = {
    "fp32": lambda: "fp32",
    "bf16_naive": BF16NaiveMixedPrecision,
    "float32 masters": lambda: BF16NaiveMixedPrecision(master_weights="fp32"),
    "fp16_naive": lambda: FP16NaiveMixedPrecision(initial_scale=2.0**4),
    "8-bit states": lambda: BF16NaiveMixedPrecision(states="8bit"),
}
MASTERS = list(FORMS)[1:]
BUCKET = 2**18 * 4  # bytes of one in float32, of as many elements as the smallest has


class Job:
    def __init__(self, precision, steps, seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024), nn.LayerNorm(1024))
        self.booster = Booster("cpu", FORMS[precision]())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.model, self.optimizer, *_ = self.booster.boost(model, optimizer)
        for _ in range(steps):
            self.step()

    def step(self):
        self.booster.backward(
            self.model(torch.linspace(-1, 1, 2048).view(2, 1024)).float().square().mean(), self.optimizer
        )
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self):
        return self.model.state_dict(), self.optimizer.state_dict()


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize(("saved", "loaded"), [*((each, each) for each in MASTERS), ("fp32", "bf16_naive")])
def test_a_load_into_masters_holds_a_few_buckets_twice_and_is_to_the_bit(tmp_path, saved, loaded, steps):
    first = Job(saved, 2, seed=0)
    first.booster.save(tmp_path, first.model, first.optimizer)
    second = Job(loaded, steps, seed=1)
    with BytesAlive() as memory:
        second.booster.load(tmp_path, second.model, second.optimizer)
    assert memory.most - max(memory.before, memory.now) < 6 * BUCKET  # 2 million elements have 24 of them
    if saved == loaded:
        assert same(second.state(), first.state())
        first.step()
        second.step()
        assert same(second.state(), first.state())
    else:
        wide = second.optimizer.state_dict()["booster"]["masters"]["weights"]
        assert all(torch.equal(wide[name], value) for name, value in first.model.state_dict().items() if name in wide)
        assert len(wide) == 6


def test_memory_of_a_second_copy_is_counted():
    kept = torch.zeros(1000, dtype=torch.float32)
    with BytesAlive() as memory:
        kept = kept.clone()
        wide = kept.double()
        del wide
    assert memory.most - memory.before == 8000
    assert memory.now == memory.before


def written_to(file):
    with file.open("r+b") as opened:
        opened.seek(-1, 2)
        opened.write(b"\x7f")


@pytest.mark.parametrize("change", [written_to, Path.unlink], ids=["written to", "removed"])
def test_a_file_that_changes_while_masters_are_read_from_it_is_told_and_a_whole_one_loads(
    tmp_path, monkeypatch, change
):
    first, second, rebuild = Job("bf16_naive", 1, seed=0), Job("bf16_naive", 1, seed=1), Masters.rebuild
    for folder in ("a", "b"):
        first.booster.save(tmp_path / folder, first.model, first.optimizer)

    def changed(masters, *rest):
        for file in (tmp_path / "a").rglob("*.safetensors"):
            change(file)
        rebuild(masters, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Masters, "rebuild", changed)
        with pytest.raises(CheckpointError, match="hold parts of it; load a checkpoint before you go on"):
            second.booster.load(tmp_path / "a", second.model, second.optimizer)
    second.booster.load(tmp_path / "b", second.model, second.optimizer)
    assert same(second.state(), first.state())


def test_masters_of_nan_are_refused_before_anything_changes(tmp_path):
    first, second = Job("fp32", 1, seed=0), Job("bf16_naive", 1, seed=1)
    with torch.no_grad():
        first.model[1].weight[5, 5] = math.nan
    first.booster.save(tmp_path, first.model, first.optimizer)
    before = copy.deepcopy(second.state())
    with pytest.raises(CheckpointError, match=r"1\.weight.*holds NaN"):
        second.booster.load(tmp_path, second.model, second.optimizer)
    assert same(second.state(), before)
