"""Booster.record: every step is written down, a kill loses none, and what is read back is what happened."""

import copy
import gc
import json
import math
import os
import signal
from pathlib import Path

import pytest
import torch
from prescribed import DEVICE, HOST, parameters, sgd, step_on
from programs import run
from small_job import backward, boost, net, train

from booster import Booster
from booster.numerics import Record, read_run
from booster.plugin import SingleDevice

INF = float("inf")
both = pytest.mark.parametrize("decides", [HOST, DEVICE])


def lines(folder, kind="step"):
    text = (folder / "rank-00000.jsonl").read_text()
    return [line for line in map(json.loads, text.splitlines()) if line["kind"] == kind]


def recorded(folder, optimizer, **options):
    """A record of an optimizer that no Booster made."""
    record = Record(
        folder, precision=Booster("cpu").precision, plugin=SingleDevice(), device=torch.device("cpu"), **options
    )
    record.attach(optimizer)
    return record


# ---------------------------------------------------------------------- what is written
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16_naive"])
def test_every_step_is_a_line_with_the_fields_of_its_result(tmp_path, precision):
    booster, model, optimizer = boost(precision, clip_grad_norm=0.3)
    booster.record(tmp_path)
    expected = []
    for seed in range(1, 6):
        loss, rate = backward(booster, model, optimizer, seed), optimizer.param_groups[0]["lr"]
        result = optimizer.step()
        optimizer.zero_grad()
        clip = min(1.0, 0.3 / (result.grad_norm + 1e-6))
        expected.append((seed, True, loss, result.loss_scale, result.grad_norm, clip, (rate,)))
        optimizer.param_groups[0]["lr"] *= 0.5
    steps = read_run(tmp_path).steps["0"]
    found = [(s.number, s.applied, s.loss, s.loss_scale, s.grad_norm, s.clip, s.lr) for s in steps]
    assert found == [(*e[:5], pytest.approx(e[5]), e[6]) for e in expected]


@both
def test_a_skip_is_written_with_its_reason_its_culprits_and_the_scale_that_overflowed(tmp_path, decides):
    params = parameters(3, 2, 4)
    optimizer = sgd(params, decides, 1024.0)
    with recorded(tmp_path, optimizer):
        step_on(optimizer, params, 1.0, 1.0, 1.0)
        step_on(optimizer, params, 1.0, INF, INF)
        step_on(optimizer, params, 1.0, 1.0, 1.0, value=INF)
        step_on(optimizer, params, INF, 1.0, 1.0, value=INF)
    steps = read_run(tmp_path).steps["0"]
    assert [s.applied for s in steps] == [True, False, True, False]
    assert [s.reason for s in steps] == [None, "nonfinite_grad", None, "nonfinite_loss"]
    assert [s.culprit for s in steps] == [(), ("p1", "p2"), (), ("p0",)]
    assert [s.loss_scale for s in steps] == [1024.0, 1024.0, 512.0, 512.0]
    assert [s.loss for s in steps] == [1.0, 1.0, INF, INF]
    assert not math.isfinite(steps[1].grad_norm)


def test_where_a_device_decides_the_same_is_written_as_where_the_host_does(tmp_path):
    for decides in (HOST, DEVICE):
        params = parameters(3, 2)
        optimizer = sgd(params, decides, 8.0, clip_grad_norm=1.0)
        with recorded(tmp_path / decides, optimizer):
            for size in (0.1, 0.9, INF, 2.0):
                step_on(optimizer, params, size, -size, value=size)
    host, device = ([dict(line, time=0) for line in lines(tmp_path / decides)] for decides in (HOST, DEVICE))
    assert [line.keys() for line in host] == [line.keys() for line in device]
    for one, other in zip(host, device, strict=True):
        assert all(one[k] == other[k] or math.isclose(one[k], other[k], rel_tol=1e-6) for k in one), (one, other)


def test_the_numbers_of_a_device_are_not_read_in_the_step_that_makes_them(tmp_path, monkeypatch):
    params = parameters(3)
    optimizer = sgd(params, DEVICE, 8.0)
    ready = []
    monkeypatch.setattr("booster.common.devices.HostCopy.ready", lambda copy: bool(ready))
    monkeypatch.setattr(
        "booster.common.devices.HostCopy.tensor", lambda copy: copy._host if ready else pytest.fail("it waited")
    )
    with recorded(tmp_path, optimizer):
        result = step_on(optimizer, params, 1.0, value=3.0)
        assert callable(result._fields), "the fields of the result were read"
        assert lines(tmp_path) == []
        ready.append(True)
    assert [(line["loss"], line["loss_scale"]) for line in lines(tmp_path)] == [(3.0, 8.0)]


def test_the_loss_of_several_passes_is_their_mean(tmp_path):
    booster, model, optimizer = boost("fp16")
    with booster.record(tmp_path):
        with booster.accumulate(model, optimizer, 3):
            losses = [backward(booster, model, optimizer, seed) for seed in (1, 2, 3)]
        optimizer.step()
    assert read_run(tmp_path).steps["0"][0].loss == pytest.approx(sum(losses) / 3, rel=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16_naive"])
def test_the_loss_of_losses_summed_over_tokens_is_their_mean_per_token(tmp_path, precision):
    booster, model, optimizer = boost(precision)
    losses, sizes = [], (16, 5)
    with booster.record(tmp_path):
        with booster.accumulate(model, optimizer, 2, num_tokens=sum(sizes)):
            for size in sizes:
                losses.append(model(torch.ones(size, 8)).float().square().sum())
                booster.backward(losses[-1], optimizer)
        optimizer.step()
    found = read_run(tmp_path).steps["0"][0].loss
    assert found == pytest.approx(sum(losses).item() / sum(sizes), rel=1e-6)


def test_a_step_with_a_closure_is_written_with_the_loss_that_it_returned(tmp_path):
    booster, model, optimizer = boost("fp32")

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 8)).square().mean()
        loss.backward()
        return loss

    with booster.record(tmp_path):
        result = optimizer.step(closure)
    assert [step.loss for step in read_run(tmp_path).steps["0"]] == [result.loss.item()]


def test_optimizers_that_are_boosted_before_and_after_have_numbers_of_their_own(tmp_path):
    booster, model, optimizer = boost("bf16")
    record = booster.record(tmp_path)
    other = net()
    other, second, *_ = booster.boost(other, torch.optim.SGD(other.parameters(), lr=0.5))
    train(booster, model, optimizer, steps=2)
    train(booster, other, second, steps=1)
    record.close()
    run = read_run(tmp_path)
    assert {name: [(s.number, s.lr) for s in steps] for name, steps in run.steps.items()} == {
        "0": [(1, (0.1,)), (2, (0.1,))],
        "1": [(1, (0.5,))],
    }


def test_recording_changes_no_bit_of_the_training(tmp_path):
    weights = []
    for record in (False, True):
        booster, model, optimizer = boost("fp16", clip_grad_norm=0.2)
        if record:
            booster.record(tmp_path)
        train(booster, model, optimizer, steps=5)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*weights)


def test_a_closed_record_writes_nothing_and_a_copy_of_the_optimizer_is_not_recorded(tmp_path):
    booster, model, optimizer = boost("fp16")
    record = booster.record(tmp_path)
    clone_model, clone = copy.deepcopy((model, optimizer))
    train(booster, model, optimizer, steps=1)
    clone.backward(clone_model(torch.ones(2, 8)).sum())
    clone.step()
    record.close()
    train(booster, model, optimizer, steps=1)
    record.close()
    assert [line["step"] for line in lines(tmp_path)] == [1]


def test_a_record_nobody_holds_lives_as_long_as_its_optimizer_and_closes_its_file(tmp_path):
    booster, model, optimizer = boost("fp16")
    booster.record(tmp_path)
    gc.collect()
    train(booster, model, optimizer, steps=1)
    assert len(lines(tmp_path)) == 1
    del booster, model, optimizer
    gc.collect()
    open_files = [
        os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if Path(f"/proc/self/fd/{fd}").exists()
    ]
    assert str(tmp_path / "rank-00000.jsonl") not in open_files


def test_a_tracker_gets_the_numbers_of_each_step_by_name(tmp_path):
    booster, model, optimizer = boost("fp16")
    given = []
    record = booster.record(tmp_path, tracker=lambda values, step: given.append((step, values)))
    losses = train(booster, model, optimizer, steps=2)
    assert [(step, values["loss"]) for step, values in given] == [(1, losses[0]), (2, losses[1])]
    assert set(given[0][1]) == {"loss", "loss_scale", "grad_norm", "applied", "lr"}
    assert record.latest == given[-1][1]


def test_two_records_of_one_booster_in_one_folder_are_refused(tmp_path):
    booster, *_ = boost("fp16")
    record = booster.record(tmp_path)
    with pytest.raises(ValueError, match="records in .* already; close that record first"):
        booster.record(tmp_path / ".")
    record.close()
    booster.record(tmp_path)


# ---------------------------------------------------------------------- kills and resumes
KILLED = """
import os, signal, sys, torch
from torch import nn
from booster import Booster
booster, model = Booster("cpu", "fp16"), nn.Linear(2, 2)
model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
booster.record(sys.argv[1])
for step in range(7):
    booster.backward(model(torch.ones(1, 2)).sum(), optimizer)
    optimizer.step()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_loses_no_step(tmp_path):
    done = run("-c", KILLED, tmp_path)
    assert done.returncode == -signal.SIGKILL
    assert [step.number for step in read_run(tmp_path).steps["0"]] == list(range(1, 8))


def test_a_last_line_that_was_cut_short_is_left_out_and_said(tmp_path):
    booster, model, optimizer = boost("fp16")
    with booster.record(tmp_path, every=None):
        train(booster, model, optimizer, steps=3)
    file = tmp_path / "rank-00000.jsonl"
    file.write_bytes(file.read_bytes()[:-30])
    run = read_run(tmp_path)
    assert [step.number for step in run.steps["0"]] == [1, 2]
    assert run.notes == ["line 4 of rank-00000.jsonl was cut short, as by a kill; it is left out"]


def test_a_resumed_run_goes_on_in_the_same_file_and_steps_made_again_count_as_made_last(tmp_path):
    booster, model, optimizer = boost("fp16")
    with booster.record(tmp_path, every=None):
        train(booster, model, optimizer, steps=2)
        state = copy.deepcopy(optimizer.state_dict())
        train(booster, model, optimizer, steps=2)
    file = tmp_path / "rank-00000.jsonl"
    file.write_bytes(file.read_bytes()[:-30])  # step 4
    booster, model, optimizer = boost("fp16")
    optimizer.load_state_dict(state)
    with booster.record(tmp_path, every=None):
        losses = train(booster, model, optimizer, steps=3, first=7)
    run = read_run(tmp_path)
    assert [step.number for step in run.steps["0"]] == [1, 2, 3, 4, 5]
    assert [step.loss for step in run.steps["0"]][2:] == losses
    assert "line 5" in run.notes[0]
    assert (
        run.notes[1]
        == "rank-00000.jsonl was written by 2 processes in turn, and 1 steps were made again; the later ones count"
    )


def write_rank(folder, rank, *lines):
    """Append lines of a rank: a number is a step of that loss, and of the time since; a tuple begins a process."""
    with (folder / f"rank-{rank:05d}.jsonl").open("a") as file:
        for line in lines:
            if isinstance(line, tuple):
                world_size, time = line
                line = {"kind": "run", "schema": 1, "rank": rank, "world_size": world_size, "time": time}
            file.write(f"{json.dumps(line)}\n")


def written_step(number, loss, time):
    return {"kind": "step", "optimizer": "0", "step": number, "time": time, "applied": True, "loss": loss}


def test_what_a_resume_went_back_behind_is_no_part_of_the_run(tmp_path):
    first = [written_step(number, 1.0, 10 + number) for number in range(1, 9)]
    look = {"kind": "look", "layers": 1, "operations": 0.1, "wide": 0.0, "model": 0, "again": False}
    change = {"kind": "pilot", "name": "a", "role": "forward", "wide": True, "noise": 0.1, "ahead": 0.2, "model": 0}
    low = {"kind": "low", "optimizer": "0", "name": "a", "product": "forward", "operand": "input", "format": "e4m3"}
    low |= dict.fromkeys(("total", "underflow", "saturated", "top"), 1)
    said = [line | {"step": step} for step in (3, 7) for line in (look, change, low)]
    switches = [{"kind": "switch", "step": step, "precision": f"at {step}"} for step in (3, 7)]
    write_rank(tmp_path, 0, (1, 10.0), *first, *said, *switches)
    write_rank(tmp_path, 0, (1, 30.0), *(written_step(number, 2.0, 30 + number) for number in (5, 6)))
    run = read_run(tmp_path)
    assert [(step.number, step.loss) for step in run.steps["0"]] == [(1, 1), (2, 1), (3, 1), (4, 1), (5, 2), (6, 2)]
    assert [each.step for each in (*run.switches, *run.piloted, *run.looks, *run.rounded)] == [3, 3, 3, 3]
    assert run.notes == [
        "rank-00000.jsonl was written by 2 processes in turn, and 2 steps were made again; the later ones count; what it "
        "has of steps 7 to 8 is left out, since the run went back behind them"
    ]


def test_what_a_process_went_back_behind_is_no_part_of_the_run(tmp_path):
    numbers = (1, 2, 3, 4, 2, 3)
    write_rank(tmp_path, 0, (1, 0.0), *(written_step(number, time, time) for time, number in enumerate(numbers)))
    run = read_run(tmp_path)
    assert [(step.number, step.loss) for step in run.steps["0"]] == [(1, 0), (2, 4), (3, 5)]
    assert run.notes[0].startswith("rank-00000.jsonl was written by a process that went back, and 2 steps")


def test_a_run_that_goes_on_with_fewer_ranks_does_not_count_those_that_are_gone(tmp_path):
    for rank in (0, 1):
        write_rank(tmp_path, rank, (2, 10.0), *(written_step(number, rank, 10 + number) for number in range(1, 5)))
    write_rank(tmp_path, 0, (1, 30.0), written_step(3, 7.0, 31.0))
    run = read_run(tmp_path)
    assert [(step.number, step.loss) for step in run.steps["0"]] == [(1, 0.5), (2, 0.5), (3, 7.0)]


def test_a_switch_before_the_first_step_of_a_resumed_run_is_after_the_steps_that_were_loaded(tmp_path):
    booster, model, optimizer = boost("fp32")
    train(booster, model, optimizer, steps=3)
    state = copy.deepcopy(optimizer.state_dict())
    booster, model, optimizer = boost("fp32")
    with booster.record(tmp_path, every=None):
        optimizer.load_state_dict(state)
        booster.switch("bf16")
        train(booster, model, optimizer, steps=1)
    assert [each.step for each in read_run(tmp_path).switches] == [3]


def test_a_group_without_a_learning_rate_and_one_that_is_no_number_stop_no_training(tmp_path):
    booster, model, optimizer = boost("fp32")
    with booster.record(tmp_path, every=None) as record:
        del optimizer.param_groups[0]["lr"]
        optimizer.unwrap().step = lambda closure=None: None
        train(booster, model, optimizer, steps=1)
        assert "lr" not in record.latest
        optimizer.param_groups[0]["lr"] = math.nan
        train(booster, model, optimizer, steps=1)
    assert [step.lr for step in read_run(tmp_path).steps["0"]] == [(), ()]


def test_other_damage_is_an_error_that_names_the_line(tmp_path):
    booster, model, optimizer = boost("fp16")
    with booster.record(tmp_path):
        train(booster, model, optimizer, steps=3)
    file = tmp_path / "rank-00000.jsonl"
    good = file.read_text().splitlines()
    file.write_text("\n".join([*good[:2], good[2][:20], *good[3:]]) + "\n")
    with pytest.raises(ValueError, match=r"line 3 of .*rank-00000.jsonl is not a line of a record"):
        read_run(tmp_path)
    file.write_text("\n".join(good[1:]) + "\n")
    with pytest.raises(ValueError, match="does not begin with the line of a run"):
        read_run(tmp_path)
    file.write_text(good[0].replace('"schema":1', '"schema":99') + "\n")
    with pytest.raises(ValueError, match="later version of booster .schema 99, this one reads 1.; upgrade"):
        read_run(tmp_path)


def test_lines_of_other_kinds_and_keys_are_passed_over(tmp_path):
    booster, model, optimizer = boost("fp16")
    with booster.record(tmp_path):
        train(booster, model, optimizer, steps=1)
    with open(tmp_path / "rank-00000.jsonl", "a") as file:
        file.write('{"kind":"weather","sky":"blue"}\n')
    assert len(read_run(tmp_path).steps["0"]) == 1


# ---------------------------------------------------------------------- several ranks
def test_the_files_of_ranks_are_one_run(tmp_path):
    for rank, (loss, culprit) in enumerate([(1.0, ["a"]), (3.0, ["b", "a"])]):
        step = {
            "kind": "step",
            "optimizer": "0",
            "step": 1,
            "time": 5.0,
            "applied": False,
            "loss": loss,
            "culprit": culprit,
        }
        run = {"kind": "run", "schema": 1, "rank": rank, "world_size": 3}
        (tmp_path / f"rank-0000{rank}.jsonl").write_text(f"{json.dumps(run)}\n{json.dumps(step)}\n")
    run = read_run(tmp_path)
    (step,) = run.steps["0"]
    assert (step.loss, step.culprit) == (2.0, ("a", "b"))
    assert run.notes == ["the files of ranks [2] are not here; what follows is of the others"]


def test_a_folder_without_a_record_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no record in .*; Booster.record"):
        read_run(tmp_path)


def test_a_disk_that_refuses_is_an_error_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    booster = Booster("cpu")
    with pytest.raises(OSError):
        booster.record(tmp_path / "file")
