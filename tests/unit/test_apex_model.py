"""Models and checkpoints under `fp16_apex`, and what apex could not do with them."""

import collections
import copy
import io
import pickle

import pytest
import torch
from torch import nn

from booster import Booster
from booster.mixed_precision import FP16ApexMixedPrecision
from booster.mixed_precision import apex_amp as amp

HALF, FLOAT = torch.float16, torch.float32
LEVELS = ["O0", "O1", "O2", "O3"]
Pair = collections.namedtuple("Pair", "first second")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.inner = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.plain_norm = nn.BatchNorm1d(8, affine=False)
        self.layer_norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 2)
        with torch.no_grad():
            for layer in (self.inner, self.head):
                for param in layer.parameters():
                    param.copy_(torch.randn(param.shape, generator=generator) / 3)

    def forward(self, x):
        return self.head(self.layer_norm(self.plain_norm(self.norm(self.inner(x)))))


def data(step=0):
    generator = torch.Generator().manual_seed(50 + step)
    return torch.randn(6, 4, generator=generator), torch.randn(6, 2, generator=generator)


def build(level, optimizer="sgd", **options):
    options = {"verbosity": 0, "max_loss_scale": 2.0**8, **options}
    booster = Booster("cpu", FP16ApexMixedPrecision(level, **options))
    net = Net()
    made = (
        torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        if optimizer == "sgd"
        else torch.optim.Adam(net.parameters(), lr=0.01, eps=1e-3)
    )
    model, boosted, *_ = booster.boost(net, made)
    return booster, model, boosted


def train(booster, model, optimizer, steps, **kwargs):
    losses = []
    for step in steps:
        x, y = data(step)
        loss = nn.functional.mse_loss(model(x).float(), y)
        booster.backward(loss, optimizer, **kwargs)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def dtypes(module):
    return {tensor.dtype for tensor in (*module.parameters(), *module.buffers()) if tensor.is_floating_point()}


@pytest.mark.parametrize(
    ("level", "options", "inner", "norm", "plain"),
    [
        ("O0", {}, FLOAT, FLOAT, FLOAT),
        ("O1", {}, FLOAT, FLOAT, FLOAT),
        ("O2", {}, HALF, FLOAT, HALF),
        ("O2", {"keep_batchnorm_fp32": False}, HALF, HALF, HALF),
        ("O3", {}, HALF, HALF, HALF),
        ("O3", {"keep_batchnorm_fp32": "True"}, HALF, FLOAT, HALF),
        ("O2", {"cast_model_type": False}, FLOAT, FLOAT, FLOAT),
    ],
)
def test_which_modules_are_cast(level, options, inner, norm, plain):
    _, model, _ = build(level, **options)
    assert dtypes(model.inner) == dtypes(model.layer_norm) == {inner}
    assert dtypes(model.norm) == {norm}
    assert dtypes(model.plain_norm) == {plain}
    assert model.norm.num_batches_tracked.dtype == torch.int64


@pytest.mark.parametrize("level", LEVELS)
def test_the_state_dict_holds_no_half_and_loads_back(level):
    booster, model, optimizer = build(level)
    losses = train(booster, model, optimizer, range(6))
    assert losses[-1] == losses[-1]
    state = model.state_dict()
    assert HALF not in {value.dtype for value in state.values()}
    assert HALF not in {value.dtype for value in model.inner.state_dict(prefix="x.").values()}
    other = build(level)[1]
    other.load_state_dict(state)
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.crossed
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("num_losses", [1, 2])
def test_a_resumed_run_equals_one_that_was_not_interrupted(level, optimizer, num_losses):
    booster, model, boosted = build(level, optimizer, num_losses=num_losses)
    train(booster, model, boosted, range(3), loss_id=num_losses - 1)
    saved = io.BytesIO()
    torch.save((model.state_dict(), boosted.state_dict()), saved)
    expected = train(booster, model, boosted, range(3, 6))
    saved.seek(0)
    model_state, optimizer_state = torch.load(saved, weights_only=True)
    booster, model, boosted = build(level, optimizer, num_losses=num_losses)
    train(booster, model, boosted, range(1))
    boosted.load_state_dict(optimizer_state)
    model.load_state_dict(model_state)
    assert train(booster, model, boosted, range(3, 6)) == expected


def test_loaded_weights_reach_the_masters_in_the_middle_of_training():
    booster, model, optimizer = build("O2")
    train(booster, model, optimizer, range(2))
    state = {name: torch.full_like(value, 0.25) for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    assert all(torch.equal(p.detach(), torch.full_like(p, 0.25)) for p in amp.master_params(optimizer))


def test_masters_are_in_the_optimizer_state_and_scaler_state_is_that_of_apex_and_its_kind():
    booster, model, optimizer = build("O2")
    train(booster, model, optimizer, range(2))
    own = optimizer.state_dict()["booster"]
    assert set(own["masters"]["weights"]) == {name for name, param in model.named_parameters() if param.dtype == HALF}
    assert own["loss_scaler"] == {"loss_scaler0": {"loss_scale": 256.0, "unskipped": 2, "dynamic": True}}


def test_a_scaler_state_of_another_precision_is_refused_and_changes_nothing():
    _, _, optimizer = build("O1")
    state = optimizer.state_dict()
    state["booster"] = {**state["booster"], "loss_scaler": {"scale": 2.0, "growth_tracker": 1}}
    with pytest.raises(ValueError, match="loss_scaler0"):
        optimizer.load_state_dict(state)
    assert optimizer.loss_scale == 256.0


def pickled(model):
    return pickle.loads(pickle.dumps(model))  # noqa: S301  (our own bytes)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("copier", [copy.deepcopy, pickled])
def test_a_copy_of_the_model_computes_with_its_own_weights(level, copier):
    booster, model, optimizer = build(level)
    x = data()[0]
    model.eval()
    before = model(x)
    clone = copier(model)
    assert torch.equal(clone(x), before)
    model.train()
    train(booster, model, optimizer, range(3))
    model.eval()
    assert torch.equal(clone(x), before)
    assert not torch.equal(model(x), before)
    with torch.no_grad():
        clone.head.bias.add_(1.0)
    torch.testing.assert_close(clone(x).float(), before.float() + 1.0, rtol=1e-2, atol=1e-2)


class Structured(nn.Module):
    def __init__(self):
        super().__init__()
        self.product = nn.Linear(4, 4)
        self.seen = None

    def forward(self, batch, scale=None):
        self.seen = (batch["x"].dtype, None if scale is None else scale.dtype, batch["n"].dtype)
        out = self.product(batch["x"])
        return Pair(out, {"again": [out]})


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_inputs_of_any_width_are_cast_and_containers_keep_their_type(level):
    plain = Structured()
    model = Booster("cpu", FP16ApexMixedPrecision(level, verbosity=0)).boost(plain)[0]
    wide = collections.OrderedDict(x=torch.ones(2, 4, dtype=torch.float64), n=torch.ones(2, dtype=torch.int64))
    out = model(wide, scale=torch.ones(1, dtype=HALF))
    inside = FLOAT if level == "O0" else HALF
    assert plain.seen == (inside, inside, torch.int64)
    assert type(out) is Pair
    assert (out.first.dtype, out.second["again"][0].dtype) == (FLOAT, FLOAT)


def test_a_model_output_of_transformers_stays_one(transformers):
    class Wrapping(nn.Module):
        def __init__(self):
            super().__init__()
            self.product = nn.Linear(4, 4)

        def forward(self, x):
            return transformers.modeling_outputs.BaseModelOutput(last_hidden_state=self.product(x))

    model = Booster("cpu", FP16ApexMixedPrecision("O2", verbosity=0)).boost(Wrapping())[0]
    out = model(torch.ones(1, 4))
    assert type(out) is transformers.modeling_outputs.BaseModelOutput
    assert out.last_hidden_state.dtype == FLOAT


def test_cast_model_outputs_names_the_dtype_of_the_output():
    model = Booster("cpu", FP16ApexMixedPrecision("O2", cast_model_outputs=HALF, verbosity=0)).boost(Net())[0]
    assert model(data()[0]).dtype == HALF


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_takes_set_to_none(level, set_to_none):
    booster, model, optimizer = build(level)
    x, y = data()
    booster.backward(nn.functional.mse_loss(model(x).float(), y), optimizer)
    optimizer.zero_grad(set_to_none=set_to_none)
    grads = [param.grad for param in model.parameters()]
    assert all(grad is None for grad in grads) if set_to_none else not any(grad.any() for grad in grads)
    booster.backward(nn.functional.mse_loss(model(x).float(), y), optimizer)
    once = [p.grad.clone() for p in amp.master_params(optimizer)]
    booster, model, optimizer = build(level)
    booster.backward(nn.functional.mse_loss(model(x).float(), y), optimizer)
    for mine, master in zip(once, amp.master_params(optimizer), strict=True):
        torch.testing.assert_close(mine, master.grad, rtol=1e-2, atol=1e-3)


def test_a_scheduler_made_while_a_skip_waits_works_and_does_not_advance_on_it():
    booster = Booster("cpu", FP16ApexMixedPrecision(verbosity=0))
    net = Net()
    plain = torch.optim.SGD(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)
    model, optimizer, _, _, scheduler = booster.boost(net, plain, lr_scheduler=scheduler)
    booster.backward(model(data()[0]).float().sum() * torch.inf, optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert not optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_state_that_was_made_before_the_cast_follows_it():
    net = Net()
    made = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, foreach=False)
    net(data()[0]).sum().backward()
    made.step()
    booster = Booster("cpu", FP16ApexMixedPrecision("O3", verbosity=0))
    model, optimizer, *_ = booster.boost(net, made)
    assert {s["momentum_buffer"].dtype for s in optimizer.state.values()} == {HALF}
    train(booster, model, optimizer, range(1))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_compiled_update_is_declined_with_a_word(level, caplog):
    booster = Booster("cpu", FP16ApexMixedPrecision(level, verbosity=0), fused_optimizer="compile")
    net = Net()
    _, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert 'fused_optimizer="compile" does not apply' in caplog.text
    assert optimizer.param_groups[0]["fused"]


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_batch_norm_that_is_the_whole_model_stays_in_float32_under_o2(level):
    norm = nn.BatchNorm1d(4)
    booster = Booster("cpu", FP16ApexMixedPrecision(level, verbosity=0, max_loss_scale=8.0))
    model, optimizer, *_ = booster.boost(norm, torch.optim.SGD(norm.parameters(), lr=0.1))
    expected = FLOAT if level == "O2" else HALF
    assert {norm.weight.dtype, norm.running_mean.dtype} == {expected}
    out = model(data()[0])
    assert out.dtype == FLOAT
    booster.backward(out.pow(2).sum(), optimizer)
    assert optimizer.step()


class Batch:
    def __init__(self, x):
        self.x = x

    def to(self, dtype):
        return Batch(self.x.to(dtype))


class Taking(nn.Module):
    """Returns what it was given, and notes it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, given):
        self.seen = [given]
        return given


def test_objects_with_a_method_to_and_any_collection_are_cast_on_the_way_in_and_out():
    taking = Taking()
    model = Booster("cpu", FP16ApexMixedPrecision("O2", verbosity=0)).boost(taking)[0]
    wide = torch.ones(2, dtype=torch.float64)

    out = model({"batch": Batch(wide), "queue": collections.deque([wide, [Batch(wide)]], maxlen=3), "set": {1, 2}})
    queue = taking.seen[0]["queue"]
    assert [taking.seen[0]["batch"].x.dtype, queue[0].dtype, queue[1][0].x.dtype] == [HALF] * 3
    assert [out["batch"].x.dtype, out["queue"][0].dtype, out["queue"][1][0].x.dtype] == [FLOAT] * 3
    assert (type(queue), queue.maxlen) == (collections.deque, 3)

    for untouched in ("text", b"bytes", wide.numpy(), range(3), {1, 2}, nn.Linear(2, 2), Batch, object(), iter([wide])):
        assert model(untouched) is untouched
        assert taking.seen[0] is untouched


@pytest.mark.parametrize("through", ["booster", "amp"])
@pytest.mark.parametrize(
    ("level", "options", "fused", "error"),
    [("O2", {"cast_model_type": torch.bfloat16}, None, TypeError), ("O3", {}, True, ValueError)],
)
def test_what_cannot_train_is_refused_before_anything_changes(through, level, options, fused, error):
    net = Net()
    made = torch.optim.SGD(net.parameters(), lr=0.1, fused=fused)
    with pytest.raises(error):
        if through == "booster":
            Booster("cpu", FP16ApexMixedPrecision(level, verbosity=0, **options)).boost(net, made)
        else:
            amp.initialize(net, made, opt_level=level, verbosity=0, **options)
    assert {param.dtype for param in net.parameters()} == {FLOAT}
    if through == "amp":
        made = made if fused is None else torch.optim.SGD(net.parameters(), lr=0.1)
        amp.initialize(net, made, opt_level="O2", verbosity=0)
    amp.shutdown()
