"""Optimizer states in the host's memory under every placement, on CPU ranks that stand for devices."""

from unittest import mock

import pytest
import torch
from comparing import same
from fake_transfers import FakeTransfers, on_host
from test_moving_masters import LAYOUTS, steps
from test_packed_states_ranks import everything
from test_refused_loads_ranks import Block
from torch import nn

from booster import Booster
from booster.masters import offload
from booster.mixed_precision import BF16NaiveMixedPrecision
from booster.tensors import flat


def built(layout, form, on):
    torch.manual_seed(7)
    precision = "bf16"
    if form != "autocast":
        states = "8bit" if form == "split24" else "fp32"
        precision = BF16NaiveMixedPrecision(keep_fp32="*.norm", master_weights=form, states=states)
    booster = Booster("cpu", precision, LAYOUTS[layout](), offload_states=on)
    model = nn.Sequential(Block(), Block())
    made = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, made, criterion, *_ = booster.boost(model, made, nn.MSELoss())
    return booster, model, made, criterion


def trained(rank, world_size, layout, form):
    with mock.patch.object(flat, "SMALLEST_SPARING_BUCKET", 256):
        stays = built(layout, form, False)
        with mock.patch.dict(offload.TRANSFERS, {"cpu": FakeTransfers}):
            moved = built(layout, form, True)
            for parts in (stays, moved):
                steps(parts, 0, 4)
            where = on_host(moved[2])
            found = everything(moved)
            moved[2].load_state_dict(moved[2].state_dict())
            for parts in (stays, moved):
                steps(parts, 4, 6)
            return (
                found,
                alike(everything(stays), everything(moved), divided=layout == "fsdp" and form != "split24"),
                where,
            )


def alike(stays, moved, divided):
    """To the bit; divided float32 weights begin elsewhere in a bucket than alone, where torch's vectorised kernel may round
    the last ones of a tensor otherwise."""
    if not divided:
        return same(stays, moved)
    return all(torch.allclose(x, y, rtol=1e-6, atol=1e-8) for x, y in zip(stays, moved, strict=True))


@pytest.mark.slow_cases("zero1", "ddp")
@pytest.mark.crossed
@pytest.mark.parametrize(
    "form", ["split24", pytest.param("auto", marks=pytest.mark.slow), pytest.param("autocast", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "single"])
def test_ranks_agree_and_train_as_with_states_that_stay(ranks2, layout, form):
    first, second = ranks2(trained, layout, form)
    assert same(first[0], second[0])
    for _, agree, where in (first, second):
        assert agree
        assert where
        assert all(where)
