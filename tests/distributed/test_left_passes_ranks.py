"""A pass that one rank leaves by an exception ends on all ranks, with the reason, before the timeout of the process group."""

import os
import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from choices import plugins
from switching import AllReduces
from torch import nn

from booster import Booster
from booster.common import hang_watchdog
from booster.facade.accumulation import Accumulations
from booster.plugin import TorchDDPPlugin

PLUGINS = plugins("ddp", "zero1", "zero2", "fsdp")
TIMEOUT = 800.0  # seconds, of the process group: half of it is no time that a loaded machine takes
REASONS = {
    "constant": "the loss does not require gradients: .* loss = 0.0 \\* output.sum\\(\\)",
    "forward": "mat1 and mat2 shapes cannot be multiplied",
    "step": "step\\(\\) inside accumulate\\(\\)",
    "argument": "max_norm=-1",
    "body": "the file is broken",
    "uneven": "num_micro_batches=. on rank . and . on rank ..*drop_last=True",
}


def train(b, model, optimizer, how, leaves):
    x, number = torch.ones(4, 8), 2 if leaves and how == "uneven" else 1
    with b.accumulate(model, optimizer, num_micro_batches=number):
        for _ in range(number):
            if leaves and how == "body":
                raise OSError("the file is broken")
            output = model(x[:, :3] if leaves and how == "forward" else x)
            loss = torch.zeros(()) if leaves and how == "constant" else output.float().square().mean()
            b.backward(loss, optimizer)
    if leaves and how == "step":
        optimizer.forbid_step("step() inside accumulate()")
    optimizer.clip_grad_by_norm(-1 if leaves and how == "argument" else 1.0)
    optimizer.step()
    optimizer.zero_grad()


def rank_of(rank, folder, name, how):
    """Train, leave a later step on rank 1, and write down what was raised, and whether it took long."""
    hang_watchdog._PROMPT, hang_watchdog._INTERVAL = 0.4, 0.1
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", f"file://{folder}/store", timedelta(seconds=TIMEOUT), rank=rank, world_size=2)
    b = Booster("cpu", "bf16", PLUGINS[name]())
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model, optimizer, *_ = b.boost(model, torch.optim.AdamW(model.parameters()))
    for _ in range(5):
        train(b, model, optimizer, how, False)
    with pytest.raises(RuntimeError):  # all ranks leave this one, so nobody waits for it
        train(b, model, optimizer, "constant", True)
    time.sleep(3.0 * rank)
    train(b, model, optimizer, how, False)
    began = time.monotonic()
    try:
        for _ in range(2):  # who is in a step that needs no other rank comes to one that does
            train(b, model, optimizer, how, rank == 1)
    except (RuntimeError, ValueError, OSError) as error:
        (folder / f"new_{rank}").write_text(f"{time.monotonic() - began < TIMEOUT / 2} {type(error).__name__} {error}")
        (folder / f"new_{rank}").rename(folder / f"{rank}")
    while not all((folder / f"{each}").exists() for each in range(2)):  # lives on
        time.sleep(0.05)
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize("how", REASONS)
@pytest.mark.parametrize("name", PLUGINS)
def test_what_one_rank_raises_in_a_pass_is_raised_on_all(tmp_path, name, how):
    if how == "uneven" and name in ("ddp", "zero1"):
        pytest.skip("such passes need no other rank")
    mp.spawn(rank_of, (tmp_path, name, how), nprocs=2)
    texts = [(tmp_path / f"{rank}").read_text() for rank in range(2)]
    left, waited = sorted(texts, key=lambda text: "make the same passes" in text)
    assert re.match(f"True RuntimeError rank . raised .*{REASONS[how]}.* All ranks make the same passes", waited), (
        waited
    )
    assert re.match(f"True (Runtime|Value|OS)Error .*{REASONS[how]}", left), left


def numbers(rank, world_size, rows):
    """Which groups of numbers of micro-batches are refused on this rank, and how."""
    accumulations, refused = Accumulations(), {}
    accumulations._looks = 0
    for index, row in enumerate(rows):
        dist.barrier()
        try:
            accumulations.compare(row[rank], None, dist.group.WORLD, alike=True)
        except ValueError as error:
            refused[index] = str(error)
    return refused


def compared(rank, world_size):
    """All-reduces of each of five groups of a run."""
    accumulations, found = Accumulations(), []
    for _ in range(5):
        with AllReduces() as counting:
            accumulations.compare(1, None, dist.group.WORLD, alike=False)
        found.append(counting.number)
    return found


def hooked(rank, world_size):
    """Hooks on the model after each of three groups."""
    b = Booster("cpu", "fp32", TorchDDPPlugin())
    model = nn.Linear(8, 8)
    model, optimizer, *_ = b.boost(model, torch.optim.AdamW(model.parameters()))
    found = []
    for _ in range(3):
        train(b, model, optimizer, "", False)
        found.append(len(model._forward_pre_hooks))
    return found


def test_a_group_leaves_no_hook_on_the_model(ranks2):
    assert [len(set(found)) for found in ranks2(hooked)] == [1, 1]


def test_ranks_compare_what_they_divide_by_in_the_first_groups_alone(ranks2):
    first, _ = ranks2(compared)
    assert min(first[:3]) > 0
    assert first[3:] == [0, 0]


def test_unequal_numbers_of_micro_batches_are_refused_on_the_rank_that_came_later(ranks2):
    one, other = ranks2(numbers, [(2, 2), (1, 1), (2, 1), (3, 3)])
    assert [*one, *other] == [2]
    assert re.search(r"num_micro_batches=. on rank . and . on rank .", next(iter((one or other).values())))
    assert ranks2(numbers, [(1, 1), (4, 4)]) == [{}, {}]
