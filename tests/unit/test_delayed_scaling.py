"""Delayed scaling: scales are those that the largest magnitudes of earlier steps ask for, and a run resumes to the bit."""

import copy
import logging
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from booster import Booster
from booster.interface.model import extras_of
from booster.mixed_precision import Autopilot, DelayedScaling, FP8MixedPrecision
from booster.mixed_precision.low_precision import linear
from booster.mixed_precision.low_precision.linear import LowPrecisionLinear

LAYERS = ["1", "2.up", "2.down"]
LARGEST = torch.tensor([448.0, 448.0, 57344.0])


class Block(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.up, self.down, self.reentrant = nn.Linear(32, 64), nn.Linear(64, 32, bias=False), reentrant

    def inside(self, x):
        return self.down(F.gelu(self.up(x)))

    def forward(self, x):
        if self.reentrant is None:
            return x + self.inside(x)
        return x + checkpoint(self.inside, x, use_reentrant=self.reentrant)


def net(reentrant=None):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32), Block(reentrant), nn.Linear(32, 4))


def boosted(plan=True, model=None, **options):
    booster = Booster("cpu", FP8MixedPrecision(delayed_scaling=plan, emulate=True), **options)
    model = net() if model is None else model
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    return booster, model, optimizer


def batch(step, rows=8):
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(step)) * (1 + step % 3)


class Largest:
    """A watcher of all layers that notes the largest magnitudes by itself."""

    def __init__(self, model):
        self.model, self.seen = model, {}
        for name, layer in layers(model).items():
            layer.watchers = (lambda role, a, b, how, y, name=name: self.look(name, role, a, b),)

    def look(self, name, role, a, b):
        found = {"forward": [(0, a), (1, b)], "input_grad": [(2, a)], "weight_grad": []}[role]
        for place, matrix in found:
            key = name, place
            self.seen[key] = max(self.seen.get(key, 0.0), float(matrix.detach().abs().max()))

    def take(self):
        rows = torch.tensor([[self.seen.get((name, place), 0.0) for place in range(3)] for name in LAYERS])
        self.seen = {}
        return rows


def layers(model):
    return {name: each for name, each in model.named_modules() if isinstance(each, LowPrecisionLinear)}


def scales(model):
    return torch.stack(
        [
            torch.stack([how.delayed.scale for how in (each.output.left, each.output.right, each.input_gradient.left)])
            for each in (layer.recipe for layer in layers(model).values())
        ]
    )


def step(run, number, parts=1):
    booster, model, optimizer = run
    for part in batch(number).chunk(parts):
        booster.backward(model(part).square().mean() / parts, optimizer)
    optimizer.step()
    optimizer.zero_grad()


def train(run, steps, **options):
    for number in steps:
        step(run, number, **options)
    return {name: param.detach().clone() for name, param in run[1].named_parameters()}


@pytest.mark.crossed
@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("parts", [1, 4])
def test_a_scale_fits_the_largest_magnitude_of_the_last_steps(reentrant, parts):
    """Of all micro-batches, recomputed or not, times two to the margin, whatever the current one is."""
    run = boosted(DelayedScaling(amax_history_len=3, margin=1), net(reentrant))
    assert list(layers(run[1])) == LAYERS
    largest, history = Largest(run[1]), []
    assert (scales(run[1]) == 0).all()
    for number in range(7):
        step(run, number, parts)
        history.insert(0, largest.take())
        assert (history[0] > 0).all()
        torch.testing.assert_close(scales(run[1]), torch.stack(history[:3]).amax(0) / LARGEST * 2, rtol=1e-6, atol=0)


def test_products_read_numbers_under_the_scales_of_earlier_steps_cut_off_above_them():
    run = boosted(DelayedScaling(amax_history_len=2))
    train(run, range(3))
    layer = layers(run[1])["1"]
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(9)) * 20
    scale_x, scale_w, _ = scales(run[1])[0]
    assert x.abs().max() / scale_x > 448, "some are beyond"
    x.requires_grad_()

    def low(x, scale):
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale

    expected = low(x.detach(), scale_x) @ low(layer.weight.detach(), scale_w).t() + layer.bias.detach()
    torch.testing.assert_close(layer(x).detach(), expected, rtol=1e-5, atol=1e-5)


def test_the_first_step_scales_as_without_and_later_ones_do_not():
    delayed, current = boosted(), boosted(False)
    first = [train(run, [0]) for run in (delayed, current)]
    assert all(torch.equal(first[0][name], first[1][name]) for name in first[0])
    later = [train(run, [1, 2, 3]) for run in (delayed, current)]
    assert any(not torch.equal(later[0][name], later[1][name]) for name in later[0])


def test_evaluation_leaves_the_histories_alone():
    quiet, watched = boosted(), boosted()
    train(quiet, range(3))
    for number in range(3):
        step(watched, number)
        watched[1].eval()
        (watched[1](batch(50) * 1e4)).sum().backward()
        watched[2].zero_grad()
        watched[1].train()
        with torch.no_grad():
            watched[1](batch(51) * 1e4)
    ends = [train(run, [3, 4]) for run in (quiet, watched)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_is_seen_and_does_not_count(bad):
    run = boosted(skip_nonfinite=True)
    train(run, range(2))
    booster, model, optimizer = run
    x = batch(2)
    x[0, 0] = bad
    assert model(x).isnan().any()
    booster.backward(model(x).square().mean(), optimizer)
    assert not optimizer.step().applied
    optimizer.zero_grad()
    assert torch.isfinite(scales(model)).all()
    end = train(run, range(3, 6))
    assert all(torch.isfinite(param).all() for param in end.values())


def test_a_step_that_shows_nothing_counts_as_the_one_before():
    booster, model, optimizer = run = boosted(DelayedScaling(amax_history_len=1))
    train(run, range(2))
    before = scales(model)
    booster.backward(model(batch(2)).square().mean() * 0.0, optimizer)  # gradients of outputs are zeros
    optimizer.step()
    assert torch.equal(scales(model)[:, 2], before[:, 2])
    assert not torch.equal(scales(model)[:, 0], before[:, 0])


def test_a_run_resumes_to_the_bit(tmp_path):
    through = boosted(DelayedScaling(amax_history_len=4))
    train(through, range(6))
    through[0].save(tmp_path, through[1], through[2])
    expected = train(through, range(6, 10))
    again = boosted(DelayedScaling(amax_history_len=4), net(None))
    again[0].load(tmp_path, again[1], again[2])
    assert torch.equal(scales(again[1]), extras_of(again[1]).histories._scale)
    got = train(again, range(6, 10))
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    without = boosted(DelayedScaling(amax_history_len=4))
    without[0].load(tmp_path, without[1], without[2])
    extras_of(without[1]).histories.load_state_dict({})
    other = train(without, range(6, 10))
    assert any(not torch.equal(other[name], expected[name]) for name in expected), "the histories count"


def test_checkpoints_of_other_histories_and_of_none_load(tmp_path, caplog):
    long = boosted(DelayedScaling(amax_history_len=8))
    train(long, range(6))
    long[0].save(tmp_path / "long", long[1], long[2])
    kept = extras_of(long[1]).histories.state_dict()["history"]
    short = boosted(DelayedScaling(amax_history_len=2))
    short[0].load(tmp_path / "long", short[1], short[2])
    assert torch.equal(extras_of(short[1]).histories.state_dict()["history"], kept[:2])
    plain = boosted(False)
    train(plain, range(2))
    plain[0].save(tmp_path / "plain", plain[1], plain[2])
    with caplog.at_level(logging.WARNING):
        short[0].load(tmp_path / "plain", short[1], short[2])
    assert "no history of scales was saved; delayed scaling begins anew" in caplog.text
    assert (scales(short[1]) == 0).all()
    plain[0].load(tmp_path / "long", plain[1], plain[2])


def test_copies_train_and_tell_the_run_nothing():
    run = boosted()
    train(run, range(2))
    before = scales(run[1]).clone()
    twin = copy.deepcopy(run[1].unwrap())
    twin.train()(batch(7) * 1e4).sum().backward()
    step(run, 2)
    assert scales(run[1]).max() < before.max() * 100


def test_it_goes_under_an_autopilot_and_with_wide_products():
    booster = Booster("cpu", Autopilot(FP8MixedPrecision(delayed_scaling=True, emulate=True), every=2))
    model = net()
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    train((booster, model, optimizer), range(4))
    assert (extras_of(model).histories._scale > 0).all()
    wide = Booster("cpu", FP8MixedPrecision(delayed_scaling=True, emulate=True, weight_grad="bf16"))
    model = net()
    model, optimizer, *_ = wide.boost(model, torch.optim.AdamW(model.parameters()))
    train((wide, model, optimizer), range(2))
    assert (extras_of(model).histories._scale > 0).all()


def test_what_does_not_go_with_it_is_refused():
    with pytest.raises(ValueError, match="delayed_scaling goes with recipe='tensorwise', got 'rowwise'"):
        FP8MixedPrecision("rowwise", delayed_scaling=True)
    with pytest.raises(ValueError, match="delayed_scaling and gather_in_fp8=True"):
        FP8MixedPrecision(delayed_scaling=True, gather_in_fp8=True)
    booster, model, optimizer = boosted()
    with pytest.raises(ValueError, match="delayed scaling follows from the steps"):
        booster.switch("bf16")
    assert "delayed_scaling=True" in repr(FP8MixedPrecision(delayed_scaling=True))
    assert "margin=2" in repr(FP8MixedPrecision(delayed_scaling=DelayedScaling(margin=2)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of torch's compiler about itself
def test_a_graph_is_made_anew_once_scales_are_known_and_computes_what_eager_layers_do(tmp_path):
    """Its operations run one by one. A rehearsal on a CPU multiplies scales into sums where it is not compiled."""
    torch.compiler.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def compiled():
        return boosted(model=torch.compile(net(), backend=backend, dynamic=False, fullgraph=True))

    with mock.patch.object(linear, "multiplies_into_sums", return_value=False):
        eager, run = boosted(), compiled()
        tried = len(graphs)  # `boost` looks at a layer of each shape
        for number in range(4):
            if number == 2:  # all of an operand is not finite, in either graph
                eager[1](batch(0) * torch.nan), run[1](batch(0) * torch.nan)
            expected, got = (train(each, [number]) for each in (eager, run))
            assert all(torch.equal(got[name], expected[name]) for name in expected)
            assert len(graphs) - tried == (1 if number == 0 else 2)
        run[0].save(tmp_path, run[1], run[2])
        again = compiled()
        again[0].load(tmp_path, again[1], again[2])
        resumed = [how.delayed.known for layer in layers(again[1]).values() for how in (layer.recipe.output.left,)]
        assert resumed == [True] * 3
        again[0].load(tmp_path, again[1], again[2])
        extras_of(again[1]).histories.load_state_dict({})
        assert not layers(again[1])["1"].recipe.output.left.delayed.known, "what begins anew knows nothing"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of torch's compiler about itself
def test_compiled_layers_note_what_eager_ones_do():
    torch.compiler.reset()
    eager, compiled = boosted(), boosted(model=torch.compile(net(), dynamic=False, fullgraph=True))
    for number in range(3):
        step(eager, number)
        step(compiled, number)
        seen, noted = extras_of(eager[1]).histories._scale, extras_of(compiled[1]).histories._scale
        assert (noted > 0).all()
        torch.testing.assert_close(noted, seen, rtol=0.05, atol=0)  # bfloat16 sums in another order
