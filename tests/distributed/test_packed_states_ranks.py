"""Packed states and 24-bit masters under every placement: ranks agree, resume to the bit, and move to other layouts."""

import copy

import pytest
import torch
from comparing import same, whole
from test_moving_masters import LAYOUTS, steps, wholes
from test_refused_loads_ranks import Block
from torch import nn

from booster import Booster
from booster.masters.quantized_state import QuantizedState
from booster.mixed_precision import BF16NaiveMixedPrecision

FORMS = {
    "split24": "split24",
    "shards": "auto",
    "autocast": None,
}  # under fully_shard "auto" keeps float32 shards, elsewhere split masters


def built(layout, form="split24", states="8bit"):
    torch.manual_seed(7)
    if form == "autocast":
        booster = Booster("cpu", "bf16", LAYOUTS[layout](), states=states)
    else:
        precision = BF16NaiveMixedPrecision(keep_fp32="*.norm", master_weights=FORMS[form], states=states)
        booster = Booster("cpu", precision, LAYOUTS[layout]())
    model = nn.Sequential(Block(), Block())
    made = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, made, criterion, *_ = booster.boost(model, made, nn.MSELoss())
    return booster, model, made, criterion


def everything(parts):
    _, model, made, _ = parts
    weights = [whole(param).detach().clone() for param in model.parameters()]
    state = wholes(made.state_dict())["state"]
    return weights + [state[index][key].clone() for index in sorted(state) for key in sorted(state[index])]


def packed_bytes(parts):
    state = parts[2].unwrap().state
    return sum(v.nbytes for own in state.values() for v in own.values() if isinstance(v, QuantizedState))


def trained(rank, world_size, layout, form):
    wide, few, resumed = built(layout, form, "fp32"), built(layout, form), built(layout, form)
    start = torch.cat([whole(param).detach().float().flatten() for param in few[1].parameters()])
    for parts in (wide, few):
        steps(parts, 0, 6)
    found = everything(few)
    ends = [torch.cat([whole(p).detach().float().flatten() for p in parts[1].parameters()]) for parts in (wide, few)]
    off = float((ends[1] - ends[0]).norm() / (ends[0] - start).norm())
    saved = copy.deepcopy((few[1].state_dict(), few[2].state_dict()))
    steps(resumed, 20, 21)
    resumed[1].load_state_dict(saved[0])
    resumed[2].load_state_dict(saved[1])
    for parts in (few, resumed):
        steps(parts, 6, 9)
    return found, off, same(everything(few), everything(resumed)), packed_bytes(few)


@pytest.mark.crossed
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "single"])
def test_ranks_agree_train_as_on_float32_states_and_resume_to_the_bit(ranks2, layout, form):
    first, second = ranks2(trained, layout, form)
    assert same(first[0], second[0])
    for _, off, resumes, packed in (first, second):
        assert off < 0.2
        assert resumes
        assert packed > 0
    if layout.startswith(("zero", "fsdp")):
        count = sum(param.numel() for param in nn.Sequential(Block(), Block()).parameters())
        # Two moments of a part of the parameters; every part is padded to 64 elements.
        assert max(first[3], second[3]) <= 2 * 1.0625 * (count / 2 + 64 * 20)


def gradient_bytes(rank, world_size, layout):
    parts = built(layout, "autocast")
    booster, model, made, criterion = parts
    batch = torch.randn(4, 8)
    booster.backward(criterion(model(batch), batch), made)
    return booster.memory(model, made).gradients


@pytest.mark.parametrize(("layout", "share"), [("ddp", 1.0), ("zero1", 1.0), ("zero2", 0.5), ("fsdp", 0.5)])
def test_memory_counts_the_gradients_that_a_rank_keeps(ranks2, layout, share):
    count = sum(param.numel() for param in nn.Sequential(Block(), Block()).parameters())
    for found in ranks2(gradient_bytes, layout):
        # In ZeRO's buckets every parameter begins at a multiple of 64 elements.
        assert 4 * count * share <= found <= 4 * (count * share + 64 * 20)


def moved(rank, world_size, target, path):
    parts = built(target)
    parts[0].load(path, parts[1], parts[2])
    loaded = everything(parts)
    steps(parts, 3, 5)
    return loaded


@pytest.mark.parametrize("target", ["ddp", "zero1", "fsdp", "tp"])
def test_packed_states_of_one_process_load_under_other_layouts(ranks2, target, tmp_path):
    parts = built("single")
    steps(parts, 0, 3)
    parts[0].save(tmp_path, parts[1], parts[2], step=3)
    expected = everything(parts)
    for found in ranks2(moved, target, str(tmp_path)):
        for ours, theirs in zip(found, expected, strict=True):
            # A part that begins elsewhere has other groups, and is rounded anew: by a step of eight bits at most.
            scale = float(theirs.abs().max()) if theirs.dim() else 1.0
            torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05 * scale)
