"""What would keep a training step out of a CUDA graph: found by running it, reported by the user's line, with no change."""

import copy
import dataclasses
import math
import random

import pytest
import torch
from comparing import same
from prescribed import loss_with
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from booster import Booster
from booster.mixed_precision import BF16NaiveMixedPrecision

PRECISIONS = ["fp32", "bf16", "fp16", "bf16_naive", "fp16_naive"]
HERE = "tests/unit/test_capturable.py"


class Run:
    """A model with dropout and batch statistics under a booster, its schedule, and a batch."""

    def __init__(self, precision="fp32", make=lambda params: AdamW(params, lr=1e-2), **options):
        torch.manual_seed(0)
        self.booster = Booster("cpu", precision, **options)
        net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
        optimizer = make(net.parameters())
        self.model, self.optimizer, self.criterion, _, self.schedule = self.booster.boost(
            net, optimizer, nn.CrossEntropyLoss(), None, CosineAnnealingLR(optimizer, 100)
        )
        self.batch = torch.randn(4, 8), torch.randint(0, 4, (4,))

    def forward(self, x, y):
        return self.criterion(self.model(x), y)

    def step(self, x, y, look=lambda loss: None, clip=1.0):
        loss = self.forward(x, y)
        look(loss)
        self.booster.backward(loss, self.optimizer)
        if clip:
            self.optimizer.clip_grad_by_norm(clip)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return loss

    def found(self, function=None, *batch):
        return self.booster.capturable(function or self.step, *(batch or self.batch))

    def found_when(self, look, **options):
        return self.found(lambda x, y: self.step(x, y, look, **options))


# ---------------------------------------------------------------------- a step that reads nothing


@pytest.mark.slow_cases("fp32", "bf16")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_nothing_waits_in_a_clean_step_with_clip_and_schedule(precision):
    run = Run(precision)
    assert run.found() == []
    run.step(*run.batch)
    assert run.found() == []


@pytest.mark.parametrize("form", ["fp32", "split", "split24", "none"])
def test_forms_of_masters_read_nothing(form):
    assert Run(BF16NaiveMixedPrecision(master_weights=form)).found() == []


@pytest.mark.parametrize(
    "make",
    [
        lambda params: Adam(params, lr=1e-2),
        lambda params: SGD(params, lr=1e-2, momentum=0.9),  # its first step reads, and no later one
        lambda params: Adagrad(params, lr=1e-2),
    ],
)
def test_fused_optimizers_read_nothing(make):
    assert Run("fp16", make).found() == []


def test_an_if_on_a_python_number_is_no_read():
    run, count = Run(), 3

    def step(x, y):
        if count > 2 and len(x) == 4 and x.shape[1] and x.dim() == 2 and x.requires_grad is False:
            return run.step(x, y)
        return None

    assert run.found(step) == []


def test_tensors_of_numbers_that_lie_on_the_host_may_be_read():
    run = Run()

    def look(loss):
        weight = torch.tensor([1.0, 2.0])
        assert weight.sum().item() == 3.0
        assert bool((weight * 2 > 1).all())
        assert weight.tolist()

    assert run.found_when(look) == []


def test_an_integer_index_and_a_mask_that_is_filled_are_no_reads():
    run = Run()

    def look(loss):
        values = loss.detach() + torch.zeros(5, device=loss.device)
        values[values > 100] = 0.0
        return values[values.argsort()], torch.where(values > 0, values, -values), values.masked_fill(values > 0, 1.0)

    assert run.found_when(look) == []


# ---------------------------------------------------------------------- reads, by line


def helper(loss):
    return loss.item()  # LINE helper


@dataclasses.dataclass
class Held:
    loss: torch.Tensor


READS = {
    "item": lambda loss: loss.item(),
    "float": lambda loss: float(loss.detach()),
    "int": lambda loss: int(loss.detach()),
    "tolist": lambda loss: loss.tolist(),
    "numpy": lambda loss: loss.detach().numpy(),
    "cpu": lambda loss: loss.cpu(),
    "bool": lambda loss: None if loss > 1000 else 0,
    "and": lambda loss: loss.isfinite() and 3,
    "print": lambda loss: print(loss),
    "format": lambda loss: f"{loss:.3f}",
    "str": lambda loss: str(loss),
    "math": lambda loss: math.sqrt(loss.detach()),
    "list by tensor": lambda loss: [1, 2, 3][(loss > 1000).long()],
    "tensor by tensor": lambda loss: torch.zeros(3, device=loss.device)[(loss > 1000).long()],
    "slice by tensor": lambda loss: loss.detach().expand(4)[: (loss > 0).long()],
    "range": lambda loss: list(range((loss > 1000).long())),
    "mask": lambda loss: loss.detach().expand(4)[loss.detach().expand(4) > 0],
    "masked_select": lambda loss: loss.detach().expand(4).masked_select(loss > 0),
    "nonzero": lambda loss: loss.detach().expand(4).nonzero(),
    "where": lambda loss: torch.where(loss.detach().expand(4) > 0),
    "unique": lambda loss: loss.detach().expand(4).unique(),
    "equal": lambda loss: torch.equal(loss, loss + 1),
    "allclose": lambda loss: torch.allclose(loss, loss),
    "one_hot": lambda loss: nn.functional.one_hot((loss > 0).long().expand(3)),
    "in": lambda loss: 2.0 in loss.expand(3),
    "inverse": lambda loss: torch.linalg.inv(torch.eye(2, device=loss.device) * loss),
    "max": lambda loss: max(loss, loss + 1),
    "to cpu": lambda loss: loss.to("cpu"),
    "to cpu, wide": lambda loss: loss.to(torch.device("cpu"), torch.float64),
    "copy to the host": lambda loss: torch.zeros(3).copy_(loss.detach()),
    "element of the host": lambda loss: torch.zeros(3).__setitem__(0, loss.detach()),
    "deepcopy": lambda loss: copy.deepcopy(loss.detach()).item(),
    "tensor of tensors": lambda loss: torch.tensor([loss.detach(), 2.0]),
    "as_tensor of tensors": lambda loss: torch.as_tensor([loss.detach()]),
    "new_tensor of tensors": lambda loss: loss.new_tensor(data=[loss.detach()]),
    "dataclass": lambda loss: Held(loss.detach()) == Held(loss.detach() + 1),
    "executed": lambda loss: exec("loss.item()", {"loss": loss}),  # noqa: S102
    "number to the device": lambda loss: loss + torch.tensor(2.0, device=loss.device),
}


@pytest.mark.slow_cases(
    "float",
    "int",
    "bool",
    "and",
    "format",
    "str",
    "list by tensor",
    "slice by tensor",
    "masked_select",
    "where",
    "equal",
    "to cpu, wide",
    "as_tensor of tensors",
    "new_tensor of tensors",
)
@pytest.mark.parametrize("name", READS)
def test_what_a_host_reads_is_told_by_the_users_line(name):
    look, run = READS[name], Run()
    (line,) = run.found_when(look)
    assert line.startswith(f"{HERE}:{look.__code__.co_firstlineno}: "), line


def test_a_read_in_a_helper_is_told_by_the_helpers_line():
    (line,) = Run().found_when(helper)
    assert line == f"{HERE}:{helper.__code__.co_firstlineno + 1}: .item() of a tensor"


def test_a_read_in_a_package_of_any_environment_is_told_by_the_line_that_calls_it(tmp_path):
    path = tmp_path / "lib" / "site-packages" / "metric.py"
    names = {}
    exec(compile("def read(loss):\n    return loss.item()\n", str(path), "exec"), names)  # noqa: S102

    def look(loss):
        return names["read"](loss)

    (line,) = Run().found_when(look)
    assert line == f"{HERE}:{look.__code__.co_firstlineno + 1}: .item() of a tensor, in {path}:2"


def test_to_a_device_that_the_line_does_not_name_is_no_read():
    run = Run()
    assert run.found_when(lambda loss: (loss.to(run.booster.device), loss.to(loss.device, torch.float64))) == []


def test_a_statement_of_several_lines_is_told_by_its_first():
    def look(loss):
        if (
            loss
            > 1000
        ):  # fmt: skip
            raise AssertionError
        return (
            1,
            loss.item(),
        )

    first = look.__code__.co_firstlineno
    assert [line.split(":")[1] for line in Run().found_when(look)] == [str(first + 1), str(first + 6)]


def test_a_hook_that_reads_in_the_backward_pass_is_told_by_its_line():
    run = Run()
    seen = []
    next(run.model.parameters()).register_hook(lambda grad: seen.append(grad.abs().max().item()))
    (line,) = run.found()
    assert f":{lines_of('seen.append(grad.abs()')}:" in line


def lines_of(text):
    with open(__file__) as file:
        return next(number for number, line in enumerate(file, 1) if text in line)


def test_reads_of_both_branches_are_found_by_running_and_not_by_reading():
    run = Run()

    def look(loss):
        if len(run.batch) == 3:
            loss.item()

    assert run.found_when(look) == []


def test_the_outcome_of_the_step_is_a_read():
    run = Run("fp16")

    def step(x, y):
        run.booster.backward(run.forward(x, y), run.optimizer)
        if run.optimizer.step():
            run.schedule.step()
        run.optimizer.zero_grad()

    (line,) = run.found(step)
    assert line.startswith(f"{HERE}:{step.__code__.co_firstlineno + 2}: ")


# ---------------------------------------------------------------------- reads of this library


def rmsprop(params):
    return RMSprop(params, lr=1e-2)


@pytest.mark.parametrize("precision", ["fp16", "fp16_naive"])
def test_an_optimizer_that_decides_on_the_host_reads(precision):
    lines = Run(precision, rmsprop).found()
    assert any("booster/update/host.py" in line for line in lines), lines


def test_whatever_decides_on_the_host_reads_where_it_clips_and_not_where_it_looks_at_nothing():
    clipped = Run("fp32", rmsprop)
    assert any("booster/update/host.py" in line for line in clipped.found())
    unclipped = Run("fp32", rmsprop)
    lines = unclipped.found_when(lambda loss: None, clip=0.0)
    assert lines == []


def test_what_is_counted_on_the_host_of_every_machine_is_no_read_of_a_device():
    """Step counts of torch's default implementations."""
    run = Run("fp32", lambda params: Adam(params, lr=1e-2, foreach=False))
    run.step(*run.batch, clip=0.0)
    assert not any(".item()" in line for line in run.found_when(lambda loss: None, clip=0.0))


# ---------------------------------------------------------------------- numbers that a graph would keep


def test_a_schedule_that_was_not_boosted_writes_numbers_that_a_graph_would_keep():
    run = Run()
    own = LambdaLR(run.optimizer.unwrap(), lambda step: 0.5**step)

    def step(x, y):
        run.step(x, y)
        own.step()

    (line,) = run.found(step)
    assert line.startswith(f"{HERE}:{step.__code__.co_firstlineno + 2}: 'lr' of group 0"), line


def test_a_boosted_schedule_that_is_stepped_before_the_optimizer_is_told_by_its_line():
    run = Run()

    def step(x, y):
        run.booster.backward(run.forward(x, y), run.optimizer)
        run.schedule.step()
        run.optimizer.step()
        run.optimizer.zero_grad()

    (line,) = run.found(step)
    assert line.startswith(f"{HERE}:{step.__code__.co_firstlineno + 2}: 'lr' of group 0"), line


def test_a_rate_that_is_written_by_hand_is_told_by_its_line():
    run = Run()

    def look(loss):
        run.optimizer.param_groups[0]["lr"] = 0.5

    (line,) = run.found_when(look)
    assert line.startswith(f"{HERE}:{look.__code__.co_firstlineno + 1}: 'lr' of group 0")
    assert run.optimizer.param_groups[0]["lr"] == 1e-2


# ---------------------------------------------------------------------- nothing changes


def everything(run):
    return copy.deepcopy(
        {
            "model": run.model.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "schedule": run.schedule.state_dict(),
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in run.optimizer.param_groups],
            "gradients": [param.grad for param in run.model.parameters()],
            "scale": run.optimizer.loss_scale,
            "counts": (run.optimizer.num_applied, run.optimizer.num_skipped, run.optimizer.progress),
            "update": type(run.optimizer._update),
            "random": (torch.get_rng_state(), random.getstate()),
        }
    )


class Stop(Exception):
    pass


@pytest.mark.crossed
@pytest.mark.parametrize("ends", ["returns", "raises in the forward pass", "raises after the step"])
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_everything_is_afterwards_what_it_was(precision, begun, ends):
    run = Run(precision)
    average = [param.detach().clone() for param in run.model.parameters()]
    generator = torch.Generator().manual_seed(3)
    for _ in range(3 if begun else 0):
        run.step(*run.batch)
    before = everything(run), copy.deepcopy(average), generator.get_state()

    def step(x, y):
        x = x + torch.randn(x.shape, generator=generator) * random.random()
        if ends == "raises in the forward pass":
            raise Stop
        run.step(x, y)
        with torch.no_grad():
            for own, param in zip(average, run.model.parameters(), strict=True):
                own.lerp_(param, 0.1)
        run.model.train(not run.model.training)
        if ends == "raises after the step":
            raise Stop

    if ends == "returns":
        run.found(step)
    else:
        with pytest.raises(Stop):
            run.found(step)
    assert same(before, (everything(run), average, generator.get_state()))
    assert run.model.training


@pytest.mark.slow_cases("fp16", "bf16")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_training_goes_on_as_if_it_had_not_been_looked_at(precision):
    def trained(look):
        run = Run(precision)
        for _step in range(4):
            if look:
                run.found()
            run.step(*run.batch)
        return everything(run)

    assert same(trained(True), trained(False))


def test_gradients_that_wait_stay():
    run = Run("fp16")
    run.booster.backward(run.forward(*run.batch), run.optimizer)
    run.optimizer.clip_grad_by_norm(0.01)
    gradients = [param.grad for param in run.model.parameters()]
    values = copy.deepcopy(gradients)
    assert run.found() == []
    assert all(param.grad is grad for param, grad in zip(run.model.parameters(), gradients, strict=True))
    assert same(values, gradients)
    assert run.optimizer.step().applied
    assert run.optimizer.last_step.grad_norm > 0.01


def test_a_record_and_a_diagnosis_hear_nothing_of_it(tmp_path):
    run = Run("fp16", diagnose="every")
    with run.booster.record(tmp_path / "record", every=1) as record:
        run.step(*run.batch)
        record.flush()
        latest = dict(record.latest)
        text = [path.read_text() for path in (tmp_path / "record").iterdir()]
        params = list(run.model.parameters())

        def overflows():
            run.booster.backward(loss_with(params, [torch.full_like(p, math.inf) for p in params]), run.optimizer)
            run.optimizer.step()
            run.optimizer.zero_grad()

        assert run.booster.capturable(overflows) == []
        record.flush()
        assert [path.read_text() for path in (tmp_path / "record").iterdir()] == text
        assert record.latest == latest
    assert run.booster.diagnoses == ()
    assert run.optimizer.num_skipped == 0


def test_before_boost_there_is_nothing_to_look_at():
    with pytest.raises(RuntimeError, match=r"capturable\(\) came before boost\(\)"):
        Booster("cpu").capturable(lambda: None)
    with pytest.raises(TypeError, match="train_step"):
        Run().booster.capturable("step")
