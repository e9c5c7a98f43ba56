"""State that was written under one plugin, or by torch's own functions, loads under another."""

import copy

import pytest
import torch
from choices import plugins
from comparing import whole
from matrix import TP_PLAN, Transformer, loss_of
from refusals import fingerprint
from test_hybrid import batch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from booster import Booster
from booster.plugin import LowLevelZeroPlugin

PLUGINS = plugins("single", "ddp", "fsdp", "zero1", "zero2", "tp", "pp", "interleaved", tp_plan=TP_PLAN)


def built(name, precision="fp32", num_blocks=2):
    torch.manual_seed(7)
    plugin = LowLevelZeroPlugin(stage=1, reduce_scatter=True) if name == "zero1 in slices" else PLUGINS[name]()
    booster = Booster("cpu", precision, plugin)
    model = Transformer(num_blocks=num_blocks)
    # Not Adam, which makes a step of the noise that is the gradient of a key's bias.
    made = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, made, criterion, _, _ = booster.boost(model, made, loss_of)
    return booster, model, made, criterion


def steps(parts, first, last):
    booster, model, made, criterion = parts
    losses = []
    for step in range(first, last):
        out = booster.execute_pipeline(iter([batch(step, booster)]), model, criterion, made)
        losses.append(float(booster.reduce(out["loss"])))
        made.step()
        made.zero_grad()
    return losses


def written_by_one_process(num_blocks):
    parts = built("single", num_blocks=num_blocks)
    steps(parts, 0, 2)
    saved = copy.deepcopy((parts[1].state_dict(), parts[2].state_dict()))
    return saved, steps(parts, 2, 5)


def resumed(rank, world_size, name, model_state, state, num_blocks):
    parts = built(name, num_blocks=num_blocks)
    steps(parts, 7, 8)
    parts[1].load_state_dict(model_state)
    parts[2].load_state_dict(state)
    return steps(parts, 2, 5)


@pytest.mark.parametrize("name", [name for name in PLUGINS if name != "single"])
def test_whole_state_of_one_process_resumes_under_every_plugin(run_on_ranks, name):
    num_blocks = 4 if name == "interleaved" else 2  # one for each chunk of a stage
    (model_state, state), expected = written_by_one_process(num_blocks)
    for losses in run_on_ranks(resumed, 2, name, model_state, state, num_blocks):
        assert losses == pytest.approx(expected, abs=2e-6)


def through_torch(rank, world_size, name, folder):
    """Losses after a load of what torch's own functions wrote, into an optimizer without states, and what they should be."""
    found = []
    for flat in (False, True) if name != "pp" else (True,):  # else torch writes the groups of one stage for all
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        parts = built(name)
        steps(parts, 0, 2)
        dcp.save(
            dict(enumerate(get_state_dict(parts[0].unwrap(parts[1]), parts[2], options=options))), checkpoint_id=folder
        )
        expected = steps(parts, 2, 4)
        fresh = built(name)
        model = fresh[0].unwrap(fresh[1])
        state = dict(enumerate(get_state_dict(model, fresh[2], options=options)))
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, fresh[2], model_state_dict=state[0], optim_state_dict=state[1], options=options)
        found.append((steps(fresh, 2, 4), expected, fresh[2].num_steps))
    return found


SLICES = pytest.param("zero1 in slices", marks=pytest.mark.slow)


@pytest.mark.slow_cases("ddp", "zero2")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of torch.distributed.checkpoint
@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero1", SLICES, "zero2", "tp", "pp"])
def test_states_that_torch_writes_and_reads_load(run_on_ranks, tmp_path, name):
    for found in run_on_ranks(through_torch, 2, name, str(tmp_path)):
        for losses, expected, num_steps in found:
            assert losses == pytest.approx(expected, abs=2e-6)
            assert num_steps == 2


def with_waiting_gradients(rank, world_size):
    """What torch's functions say while slices of gradients wait, and whether they still do."""
    booster, model, made, criterion = built("zero2")
    booster.execute_pipeline(iter([batch(0, booster)]), model, criterion, made)
    with pytest.raises(
        RuntimeError, match=r"would drop the gradients that this rank has slices of; call optimizer.step\(\)"
    ):
        get_state_dict(booster.unwrap(model), made)
    before = whole(next(model.parameters())).clone()
    made.step()
    return torch.equal(before, whole(next(model.parameters())))


def test_torch_makes_no_states_in_the_place_of_gradients_that_wait_in_slices(run_on_ranks):
    assert run_on_ranks(with_waiting_gradients, 2) == [False, False]


def saved_on_one_rank(rank, world_size, name, path):
    booster, model, made, criterion = parts = built(name)
    steps(parts, 0, 1)
    if rank == 0:
        torch.save((model.state_dict(), made.state_dict()), path)
    torch.distributed.barrier()
    model_state, state = torch.load(path, weights_only=True)
    if rank == 1:
        with pytest.raises(ValueError, match="saved on another rank"):
            model.load_state_dict(model_state)
    before = fingerprint(made, model)
    with pytest.raises(ValueError, match=r"saved on another rank" if rank == 1 else r"rank 1 .* saved on another rank"):
        made.load_state_dict(state)
    assert fingerprint(made, model) == before


@pytest.mark.parametrize("name", ["fsdp", "tp"])
def test_a_part_that_another_rank_saved_is_refused(run_on_ranks, name, tmp_path):
    run_on_ranks(saved_on_one_rank, 2, name, str(tmp_path / "state.pt"))


def idle_steps(rank, world_size, name, precision):
    booster, model, made, criterion = built(name, precision)
    before = [whole(param) for param in model.parameters()]
    result = made.step()
    return result.applied, all(torch.equal(whole(p), b) for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.crossed
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero1", "zero2", "tp", "pp"])
def test_a_step_without_any_gradient_does_nothing(run_on_ranks, name, precision):
    assert run_on_ranks(idle_steps, 2, name, precision) == [(True, True)] * 2
