"""How kernels are launched: at addresses beyond 2**31 elements, through compiled ones that are kept, by few calls; and a form
that is added."""

import pytest
import torch
from counts import calls
from interpreted import gradients, held, interpreted, pair, step_on
from prescribed import loss_with
from torch import nn
from torch.optim import AdamW

from booster.mixed_precision import BF16NaiveMixedPrecision

pytestmark = interpreted
BEYOND = 2**33  # elements


def adamw(params):
    return AdamW(params, lr=1e-2)


def make_model():
    return nn.Sequential(nn.Linear(7, 33), nn.Linear(33, 90))


FORMS = {  # with the bytes of an element of the weights, their rest, and each state, and whether it has scales
    "fp32": ("fp32", {}, (4, 0, 4, 4), False),
    "split24, 8bit": (lambda: BF16NaiveMixedPrecision(master_weights="split24", states="8bit"), {}, (2, 1, 1, 1), True),
}


@pytest.mark.parametrize("form", FORMS)
def test_elements_beyond_those_that_32_bits_count_are_found(form, monkeypatch):
    """Addresses are moved back by as much as offsets are moved on, so no memory of that size is needed."""
    from booster.kernels.launches import COLUMNS, TILE
    from booster.kernels.segments import Table

    precision, options, sizes, has_scales = FORMS[form]
    found = []
    there = Table._there

    def moved(table, values):
        values = values.clone()
        if values.dtype == torch.int32:
            values[:, 1] += BEYOND // TILE
        elif values.shape[1] == COLUMNS:
            for column, size in zip((0, 1, 3, 4), sizes, strict=True):
                values[:, column] -= BEYOND * size
            values[:, 2] -= BEYOND * sizes[0]  # gradients are of the weights' dtype
            values[:, 6:8] -= BEYOND // 32 * 2 if has_scales else 0
            values[:, 9] += BEYOND
        return there(table, values)

    for far in (False, True):
        with monkeypatch.context() as patched:
            if far:
                patched.setattr(Table, "_there", moved)
            step = pair(make_model, adamw, precision, clip_grad_norm=0.1, **options)[1]
            for number in range(2):
                assert step_on(*step, gradients(list(step[1].parameters()), number)).applied
            found.append(held(step[2]))
    (weights, states), (others, theirs) = found
    assert all(map(torch.equal, weights, others))
    assert all(torch.equal(own[name], other[name]) for own, other in zip(states, theirs, strict=True) for name in own)


class Compiled:
    """What a launch of a compiled kernel returns, and runs it again on arguments in the order of its parameters."""

    launched = 0

    def __init__(self, kernel, launch):
        self.kernel, self.launch = kernel, launch

    def __getitem__(self, grid):
        def run(*args):
            Compiled.launched += 1
            assert len(args) == len(self.kernel.arg_names)
            self.launch(self.kernel, grid)(*args)

        return run


@pytest.mark.parametrize(
    "precision", ["fp16", lambda: BF16NaiveMixedPrecision(master_weights="split24", states="8bit")]
)
def test_compiled_kernels_are_kept_and_launched_with_all_arguments_in_order(precision, monkeypatch):
    from triton.runtime.interpreter import InterpretedFunction

    launch = InterpretedFunction.__getitem__

    def first(kernel, grid):
        def run(*args, **kwargs):
            launch(kernel, grid)(*args, **kwargs)
            return Compiled(kernel, launch)

        return run

    plain, kept = (pair(make_model, adamw, precision, clip_grad_norm=0.1)[1] for _ in range(2))
    for number in range(5):
        bad = float("inf") if number == 3 else None
        step_on(*plain, gradients(list(plain[1].parameters()), number, bad))
        with monkeypatch.context() as patched:
            patched.setattr(InterpretedFunction, "__getitem__", first)
            before = Compiled.launched
            step_on(*kept, gradients(list(kept[1].parameters()), number, bad))
    assert Compiled.launched - before == 3
    (weights, states), (others, theirs) = held(plain[2]), held(kept[2])
    assert all(map(torch.equal, weights, others))
    assert all(torch.equal(own[name], other[name]) for own, other in zip(states, theirs, strict=True) for name in own)


MOST = {"fp32": 75, "fp16": 80, "split": 90}


@pytest.mark.parametrize("name", MOST)
def test_a_step_by_kernels_is_few_calls_whatever_there_is_to_step(name, monkeypatch):
    from triton.runtime.interpreter import InterpretedFunction

    made = (lambda: BF16NaiveMixedPrecision(master_weights="split")) if name == "split" else name
    found = []
    for depth in (2, 20):
        layers = lambda depth=depth: nn.Sequential(*(nn.Linear(16, 16) for _ in range(depth)))  # noqa: E731
        booster, model, optimizer = pair(layers, adamw, made, clip_grad_norm=1.0)[1]
        params = list(model.parameters())
        for number in range(4):
            booster.backward(loss_with(params, gradients(params, number)), optimizer)
            if number < 3:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
        with monkeypatch.context() as patched:
            patched.setattr(InterpretedFunction, "__getitem__", lambda kernel, grid: lambda *args, **kwargs: None)
            found.append(calls(optimizer.step)[0])
    assert max(found) <= MOST[name], found
    assert found[0] == found[1]


def test_nothing_is_launched_where_there_are_no_programs(monkeypatch):
    """CUDA refuses a grid of 0, and the interpreter does not."""
    from triton.runtime.interpreter import InterpretedFunction

    launch, grids = InterpretedFunction.__getitem__, []
    monkeypatch.setattr(
        InterpretedFunction, "__getitem__", lambda kernel, grid: (grids.append(grid), launch(kernel, grid))[1]
    )

    class Empty(nn.Module):
        def __init__(self):
            super().__init__()
            self.none = nn.Parameter(torch.zeros(0, 3))

    def counting():
        return BF16NaiveMixedPrecision(master_weights="split24", states="8bit", log_num_zeros_in_grad=True)

    for precision, release in (
        ("fp32", False),
        ("fp32", "previous_norm"),
        ("fp16", False),
        (counting, "previous_norm"),
    ):
        booster, model, optimizer = pair(Empty, adamw, precision, clip_grad_norm=0.1, release_gradients=release)[1]
        for _ in range(2):
            booster.backward(model.none.square().sum(), optimizer)
            assert optimizer.step().applied
            optimizer.zero_grad()
    assert len(grids) > 4
    assert all(grid[0] > 0 for grid in grids)


@pytest.mark.parametrize("name", ["measure", "update", "decide"])
def test_what_does_not_compile_is_known_before_anything_is_written_and_torch_steps(name, monkeypatch, caplog):
    from triton.runtime.interpreter import InterpretedFunction

    from booster.kernels.steps import KernelSteps

    made, run, asked = KernelSteps._make_tables, InterpretedFunction.run, {}

    def as_on_a_gpu(steps, *given):
        tables = made(steps, *given)
        for table in tables.each:
            steps._try(table)
        return tables

    def refusing(kernel, *args, **options):
        asked[kernel.fn.__name__] = args
        if kernel.fn.__name__ == name:
            raise RuntimeError("no compiler")
        return run(kernel, *args, **options)

    monkeypatch.setattr(KernelSteps, "_make_tables", as_on_a_gpu)
    counting = lambda: BF16NaiveMixedPrecision(log_num_zeros_in_grad=True)  # noqa: E731
    both = pair(make_model, adamw, counting, clip_grad_norm=0.1)
    monkeypatch.setattr(InterpretedFunction, "run", refusing)
    for number in range(2):
        for each in both:
            assert step_on(*each, gradients(list(each[1].parameters()), number)).applied
    why = "Triton compiles or loads no kernels here: no compiler"
    assert both[1][2]._update.decision.steps.reason == why
    warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warned == [f"AdamW is stepped by torch, and not by kernels: {why}"]
    assert asked["measure"][3] is not None  # zeros, which steps count
    assert all(map(torch.equal, both[0][1].parameters(), both[1][1].parameters()))


def test_a_form_is_one_file_and_one_entry_and_serves_every_rule(monkeypatch):
    from interpreted_added import CUT, Cut

    from booster.kernels.weights import FORMS as KERNELS
    from booster.masters import formats

    monkeypatch.setitem(KERNELS, Cut, CUT)
    monkeypatch.setitem(formats._ROUNDINGS, "nearest", Cut)
    for make in (adamw, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.RMSprop(p, lr=1e-3)):
        both = pair(make_model, make, lambda: BF16NaiveMixedPrecision(master_weights="none"))
        for number in range(3):
            for each in both:
                assert step_on(*each, gradients(list(each[1].parameters()), number)).applied
        for own, other in zip(both[1][1].parameters(), both[0][1].parameters(), strict=True):
            torch.testing.assert_close(own, other, rtol=2.0**-7, atol=1e-6)
            assert (own != other).float().mean() < 0.01
