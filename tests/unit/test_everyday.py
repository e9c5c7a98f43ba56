"""What a loop wants besides training: words of one rank, a bar, a trace, seeds, a batch size that fits."""

import json
import random
import re

import numpy
import pytest
import small_job
import torch
from torch import nn
from torch.utils.data import IterableDataset

import booster
from booster import Booster, find_batch_size, seed_everything
from booster.facade.diagnostic_methods import DisplayedLoss


@pytest.fixture
def deterministic_again():
    yield
    torch.use_deterministic_algorithms(False)


# ---- alone ----


def test_a_world_of_one_is_main_prints_and_waits_for_nobody(capsys):
    b = Booster("cpu")
    assert b.is_main
    b.print("loss", 0.5, sep="=", end="!")
    b.wait_for_everyone()
    assert capsys.readouterr().out == "loss=0.5!"


def test_progress_gives_the_items_and_draws_a_bar_that_counts_them(capsys):
    assert list(Booster("cpu").progress([3, 1, 2], "epoch 1")) == [3, 1, 2]
    drawn = capsys.readouterr().out
    assert "epoch 1" in drawn
    assert "3/3" in drawn
    assert "loss" not in drawn


def test_progress_takes_items_of_unknown_number(capsys):
    assert list(Booster("cpu").progress(iter([3, 1]), "stream")) == [3, 1]
    assert "2/?" in capsys.readouterr().out
    assert list(Booster("cpu").progress(iter([3, 1]), "stream", total=2)) == [3, 1]
    assert "2/2" in capsys.readouterr().out


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


def test_progress_takes_a_loader_of_a_stream_whose_length_nobody_knows(capsys):
    b = Booster("cpu")
    assert len(list(b.progress(b.prepare_dataloader(Stream(), 2)))) == 2
    assert "2/?" in capsys.readouterr().out


@pytest.mark.parametrize("sampled", [True, False], ids=["of the library", "of torch"])
def test_progress_of_a_resumed_epoch_goes_on_where_it_was_left(capsys, sampled):
    b = Booster("cpu")

    def loader():
        data = torch.arange(20)
        if sampled:
            return b.prepare_dataloader(data, 2, shuffle=True)
        return b.boost(torch.nn.Linear(2, 2), dataloader=torch.utils.data.DataLoader(data, 2))[3]

    first = loader()
    for count, _ in enumerate(first, 1):
        if count == 4:
            break
    second = loader()
    second.load_state_dict(first.state_dict())
    assert len(list(b.progress(second, "the rest"))) == 6
    assert "10/10" in capsys.readouterr().out
    for count, _ in enumerate(b.progress(second, "the next"), 1):
        if count == 3:
            break
    assert "2/10" in capsys.readouterr().out


def test_progress_shows_the_rate_and_the_last_loss_in_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    b, model, optimizer = small_job.boost("fp16")
    for number in b.progress(range(1, 4), "epoch 1 of 20"):
        b.backward(model(torch.ones(1, 8)).sum() * 0 + number, optimizer)
        optimizer.step()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line]
    assert re.search(r"epoch 1 of 20 .* 3/3 [\d.e+]+/s loss 3 ", line)
    assert len(line) <= 80
    words = DisplayedLoss()
    words.keep(torch.tensor(0.123456))
    assert words.text() == "loss 0.1235"
    words.keep(torch.tensor(7.0))
    assert words.text() == "loss 0.1235", "within a second the device is not waited for again"
    assert words.text(now=True) == "loss 7"


def test_a_loop_of_progress_may_be_left(capsys):
    for item in Booster("cpu").progress([1, 2, 3], "left"):
        if item == 2:
            break
    assert "1/3" in capsys.readouterr().out


def test_progress_without_rich_names_the_line_that_installs_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "rich.progress", None)
    with pytest.raises(ImportError, match=r"pip install rich"):
        Booster("cpu").progress([1])


# ---- several ranks ----


def of_one_rank(rank, world_size):
    import contextlib
    import io

    b = Booster("cpu")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        b.print("once")
        list(b.progress([1, 2], "bar"))
        b.wait_for_everyone()
    seed_everything(5)
    same = torch.rand(1).item()
    seed_everything(5, by_rank=True)
    own = torch.rand(1).item(), random.random(), numpy.random.rand()
    return b.is_main, out.getvalue(), same, own


def test_only_rank_0_prints_and_draws_and_ranks_may_draw_their_own_numbers(ranks2):
    (main, out, same, own), (other_main, other_out, other_same, other_own) = ranks2(of_one_rank)
    assert main
    assert not other_main
    assert out.startswith("once\n")
    assert "bar" in out
    assert other_out == ""
    assert same == other_same == own[0]
    assert not set(own) & set(other_own)


def fits_less_on_rank_1(rank, world_size):
    tried = []

    def trial(size):
        tried.append(size)
        if size > (40, 9)[rank]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    return find_batch_size(trial, 64), tried


def test_ranks_agree_on_a_batch_size_that_fits_on_each(ranks2):
    assert ranks2(fits_less_on_rank_1) == [(8, [64, 32, 16, 8])] * 2


# ---- batch sizes ----


def refusing(above, error):
    def trial(size):
        if size > above:
            raise error

    return trial


@pytest.mark.slow_cases("error1", "error3", "error0")
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 4 bytes"),
        MemoryError(),
    ],
)
def test_a_batch_is_halved_until_it_fits_whatever_says_that_memory_is_out(error):
    assert find_batch_size(refusing(10, error), 24, least=5) == 6
    assert find_batch_size(refusing(100, error), 100) == 100


def test_torch_s_own_refusal_to_allocate_is_known():
    bytes_of_one = 2**50

    def trial(size):
        torch.empty(size * bytes_of_one, dtype=torch.uint8)
        raise AssertionError("no machine has that")

    with pytest.raises(MemoryError, match="not even least=1 fits"):
        find_batch_size(trial, 4)


def test_the_least_size_is_tried_before_giving_up():
    tried = []

    def trial(size):
        tried.append(size)
        raise MemoryError

    with pytest.raises(MemoryError, match="not even least=3 fits"):
        find_batch_size(trial, 8, least=3)
    assert tried == [8, 4, 3]


def test_any_other_error_of_a_trial_comes_through():
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        find_batch_size(lambda size: torch.ones(1, 2) @ torch.ones(3, 1), 4)


# ---- seeds ----


def draw():
    return random.random(), numpy.random.rand(), torch.rand(1).item()


def test_a_seed_reaches_every_generator():
    seed_everything(7)
    first = draw()
    assert draw() != first
    seed_everything(7)
    assert draw() == first


def test_deterministic_makes_torch_refuse_what_gives_other_bits_each_time(deterministic_again):
    seed_everything(7)
    assert not torch.are_deterministic_algorithms_enabled()
    seed_everything(7, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.benchmark


# ---- traces ----


def train(b, steps, profile):
    model = nn.Linear(4, 4)
    model, optimizer, *_ = b.boost(model, torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(steps):
        b.backward(model(torch.ones(2, 4)).sum(), optimizer)
        optimizer.step()
        if profile is not None:
            profile.step()


def test_profile_writes_one_trace_of_the_wanted_steps(tmp_path):
    b = Booster("cpu")
    with b.profile(tmp_path / "trace", skip=1, steps=2) as profile:
        train(b, 5, profile)
    events = json.loads((tmp_path / "trace" / "rank_0.json").read_text())["traceEvents"]
    steps = {event["name"] for event in events if str(event.get("name", "")).startswith("ProfilerStep#")}
    assert steps == {"ProfilerStep#1", "ProfilerStep#2"}
    assert any(event.get("name") == "aten::linear" for event in events)


def test_profile_that_was_never_stepped_says_so(tmp_path):
    b = Booster("cpu")
    with pytest.raises(RuntimeError, match=r"call \.step\(\) .* after each of the 5 steps"), b.profile(tmp_path):
        train(b, 6, None)


def test_an_error_inside_profile_comes_through(tmp_path):
    with pytest.raises(KeyError), Booster("cpu").profile(tmp_path):
        raise KeyError


def test_what_is_public_of_it_is_exported():
    assert {"find_batch_size", "launch_notebook", "seed_everything"} <= set(booster.__all__)
