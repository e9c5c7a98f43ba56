"""Scenarios of Lightning Fabric: precisions, wrappers, loaders, clipping, checkpoints."""

import copy
from functools import partial

import pytest
import torch
from scenarios import scenario
from small_job import backward, batch, boost, flat, flat_grads, net, sgd, train
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import booster as package
from booster import Booster
from booster.checkpoint import CheckpointError
from booster.mixed_precision import BF16MixedPrecision, BF16NaiveMixedPrecision, StaticScale
from booster.plugin import TorchDDPPlugin, TorchFSDPPlugin

AMP, INTEGRATION = "plugins/precision/test_amp.py", "plugins/precision/test_amp_integration.py"
HALF, WRAPPERS, WHOLE = "plugins/precision/test_half.py", "test_wrappers.py", "test_fabric.py"
CONNECTOR, CLIP = "test_connector.py", "strategies/test_single_device.py"
FSDP, CLOUD, SEED = "strategies/test_fsdp_integration.py", "utilities/test_cloud_io.py", "utilities/test_seed.py"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
NAIVE = {"fp16_naive": torch.float16, "bf16_naive": torch.bfloat16}
EVERY = ["fp32", *DTYPES, *NAIVE]


def fabric(file, test, says, *, differs=""):
    return scenario("Lightning Fabric", f"tests/tests_fabric/{file}", test, says, differs=differs)


@fabric(INTEGRATION, "test_amp", "weights and gradients are float32, the forward pass is half, its output float32")
@pytest.mark.parametrize("precision", DTYPES)
def test_weights_are_float32_and_computing_is_half(precision):
    booster, model, optimizer = boost(precision)
    inner = []
    model.unwrap()[0].register_forward_hook(lambda module, args, out: inner.append(out.dtype))
    out = model(batch()[0])
    backward(booster, model, optimizer)
    assert set(inner) == {DTYPES[precision]}
    assert {out.dtype, *(p.dtype for p in model.parameters()), *(p.grad.dtype for p in model.parameters())} == {
        torch.float32
    }


@fabric(INTEGRATION, "test_amp_fused_optimizer_parity", "fused and unfused optimizers train alike, clipping included")
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("precision", DTYPES)
def test_fused_and_unfused_optimizers_train_alike(make, precision):
    found = []
    for fused in (True, False):
        booster, model, optimizer = boost(precision, partial(make, lr=0.01), fused_optimizer=fused, clip_grad_norm=0.1)
        found.append((train(booster, model, optimizer, 4), flat(model)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-5, atol=1e-6)


@fabric(AMP, "test_amp_precision_default_scaler", "float16 has a loss scale from 2**16, nothing else has one")
@pytest.mark.parametrize("precision", EVERY)
def test_float16_alone_has_a_loss_scale(precision):
    assert boost(precision)[2].loss_scale == (2.0**16 if precision.startswith("fp16") else 1.0)


@fabric(AMP, "test_amp_precision_scaler_with_bf16", "a loss scale for bfloat16 is refused")
@pytest.mark.parametrize("precision", [BF16MixedPrecision, BF16NaiveMixedPrecision])
def test_bfloat16_takes_no_loss_scale(precision):
    with pytest.raises(TypeError, match="scale"):
        precision(scale=StaticScale(8.0))


@fabric(AMP, "test_amp_precision_forward_context", "the context computes in half, and ends")
@pytest.mark.parametrize("precision", DTYPES)
def test_the_context_computes_in_half(precision):
    x = torch.ones(2, 2)
    with Booster("cpu", precision).autocast():
        assert (x @ x).dtype == DTYPES[precision]
    assert (x @ x).dtype == torch.float32


@fabric(AMP, "test_amp_precision_backward", "backward scales the loss once")
@pytest.mark.parametrize("precision", ["fp16", "fp16_naive"])
def test_backward_scales_once(precision):
    booster, model, optimizer = boost(precision)
    backward(booster, model, optimizer)
    scaled = flat_grads(model).clone()
    optimizer.unscale_grads()
    torch.testing.assert_close(scaled / 2.0**16, flat_grads(model), rtol=1e-3, atol=1e-6)


@fabric(AMP, "test_amp_precision_optimizer_step_with_scaler", "a step applies the gradients and updates the scale")
@fabric(AMP, "test_amp_precision_optimizer_step_without_scaler", "without a scale it is the optimizer's step")
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_a_step_is_one_step_of_the_optimizer(precision):
    booster, model, optimizer = boost(precision, partial(torch.optim.Adam, lr=0.01))
    backward(booster, model, optimizer)
    assert optimizer.step().applied
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}
    assert optimizer.num_applied == 1


@fabric(HALF, "test_selected_dtype", "half precisions convert the model; inputs are cast, outputs come back in float32")
@pytest.mark.parametrize("precision", NAIVE)
def test_half_models_convert_weights_and_inputs(precision):
    booster, model, optimizer = boost(precision)
    seen = []
    model.unwrap()[0].register_forward_hook(lambda module, args, out: seen.append((args[0].dtype, out.dtype)))
    assert model(batch()[0]).dtype == torch.float32
    assert seen == [(NAIVE[precision],) * 2]
    assert {p.dtype for p in model.parameters()} == {NAIVE[precision]}


@fabric(
    HALF,
    "test_forward_context",
    "tensors that the model makes stay float32; with default_dtype=True they are half",
    differs="there torch's default dtype is set for the forward pass always. It is process-wide, so it is asked for here",
)
@pytest.mark.parametrize("asked", [False, True])
def test_the_default_dtype_is_set_where_asked_for(asked):
    class Model(nn.Linear):
        def forward(self, x):
            self.made = torch.zeros(1).dtype
            return super().forward(x)

    raw = Model(8, 4)
    model, *_ = Booster("cpu", BF16NaiveMixedPrecision(default_dtype=asked)).boost(raw)
    model(torch.rand(2, 8))
    assert raw.made == (torch.bfloat16 if asked else torch.float32)


@fabric(
    "plugins/precision/test_all.py",
    "test_default_dtype_is_restored",
    "the default dtype is restored after an exception",
)
@pytest.mark.parametrize("precision", [*EVERY, "default_dtype"])
def test_the_default_dtype_is_restored_after_an_exception(precision):
    class Model(nn.Linear):
        def forward(self, x):
            raise LookupError

    strategy = BF16NaiveMixedPrecision(default_dtype=True) if precision == "default_dtype" else precision
    model, *_ = Booster("cpu", strategy).boost(Model(8, 4))
    with pytest.raises(LookupError):
        model(torch.rand(2, 8))
    assert torch.zeros(1).dtype == torch.get_default_dtype() == torch.float32
    assert not torch.is_autocast_enabled("cpu")


@fabric(
    CONNECTOR,
    "test_precision_selection_16_on_cpu_warns",
    "float16 on CPU computes in float16",
    differs="there it warns and computes in bfloat16. A precision never changes silently; few CPUs are fast at it, which the "
    "documentation says",
)
def test_float16_on_cpu_is_float16():
    with Booster("cpu", "fp16").autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float16


@fabric(
    CONNECTOR,
    "test_precision_selection_raises (unknown string)",
    "an unknown precision is refused, the legal ones named",
)
@pytest.mark.parametrize(("wrong", "legal"), [("16", "'fp16'"), ("bf-16", "'bf16_naive'"), ("half", "'fp16'")])
def test_an_unknown_precision_is_refused(wrong, legal):
    with pytest.raises(ValueError, match=legal):
        Booster("cpu", wrong)


@fabric(CLIP, "test_single_device_grad_clipping", "clipped by norm or value, true gradients are within the bound")
@pytest.mark.parametrize("precision", EVERY)
@pytest.mark.parametrize("kind", ["norm", "val"])
def test_clipped_gradients_are_within_the_bound(precision, kind):
    booster, model, optimizer = boost(precision, partial(torch.optim.SGD, lr=1.0))
    before = flat(model)
    backward(booster, model, optimizer)
    if kind == "norm":
        assert optimizer.clip_grad_by_norm(0.05) > 0.05
    else:
        optimizer.clip_grad_by_value(0.01)
    optimizer.step()
    moved = before - flat(model)
    ulp = 2e-3 if precision in NAIVE else 1e-6  # what a half weight rounds
    if kind == "norm":
        assert float(moved.norm()) == pytest.approx(0.05, rel=0.02, abs=10 * ulp)
    else:
        assert float(moved.abs().max()) == pytest.approx(0.01, rel=0.02, abs=ulp)


def clip_on_shards(rank, world_size, precision, kind):
    booster, model, optimizer = boost(precision, partial(torch.optim.SGD, lr=1.0), TorchFSDPPlugin())
    before = flat(model)
    backward(booster, model, optimizer)
    optimizer.clip_grad_by_norm(0.05) if kind == "norm" else optimizer.clip_grad_by_value(0.01)
    optimizer.step()
    moved = before - flat(model)
    return float(moved.norm() if kind == "norm" else moved.abs().max())


@fabric(FSDP, "test_fsdp_grad_clipping", "the same where gradients are divided among ranks")
@pytest.mark.parametrize("kind", ["norm", "val"])
def test_clipped_shards_are_within_the_bound(ranks2, kind):
    for precision in ("fp32", "fp16"):
        assert ranks2(clip_on_shards, precision, kind) == pytest.approx(
            [0.05 if kind == "norm" else 0.01] * 2, rel=0.02
        )


# ---------------------------------------------------------------------- wrappers


@fabric(
    WRAPPERS,
    "test_fabric_optimizer_wraps",
    "the boosted optimizer is a torch Optimizer and gives back the user's; it is no SGD",
    differs="there the wrapper takes on the class of what it wraps. What that class's own methods set would be set on the "
    "wrapper and missing in the optimizer",
)
def test_a_boosted_optimizer_is_an_optimizer():
    booster, model, optimizer = boost("bf16")
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert not isinstance(optimizer, torch.optim.SGD)
    assert isinstance(booster.unwrap(optimizer), torch.optim.SGD)


@fabric(WRAPPERS, "test_fabric_optimizer_zero_grad_kwargs", "set_to_none arrives")
@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_takes_set_to_none(to_none):
    booster, model, optimizer = boost("bf16")
    backward(booster, model, optimizer)
    optimizer.zero_grad(set_to_none=to_none)
    assert all((p.grad is None) if to_none else (p.grad == 0).all() for p in model.parameters())


@fabric(WRAPPERS, "test_fabric_optimizer_steps", "step() says what happened, and takes a closure")
def test_step_returns_a_result_and_takes_a_closure():
    booster, model, optimizer = boost("bf16")
    x, y = batch()

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        booster.backward(loss, optimizer)
        return loss

    assert optimizer.step(closure).loss > 0


@fabric(WRAPPERS, "test_fabric_optimizer_state_dict", "the state dict loads back")
@pytest.mark.parametrize("precision", EVERY)
def test_the_state_of_an_optimizer_loads_back(precision):
    booster, model, optimizer = boost(precision, partial(torch.optim.AdamW, lr=0.01))
    train(booster, model, optimizer, 2)
    twin = boost(precision, partial(torch.optim.AdamW, lr=0.01))
    twin[1].load_state_dict(model.state_dict())
    twin[2].load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(booster, model, optimizer, 2, first=5)
    train(*twin, 2, first=5)
    assert torch.equal(flat(model), flat(twin[1]))


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.attribute = 1

    def forward(self, x):
        return self.layer(x)

    def method(self):
        return 2


@fabric(
    WRAPPERS, "test_fabric_module_attribute_lookup", "attributes and methods of the model are there, others are not"
)
def test_attributes_of_the_model_are_there():
    raw = Named()
    model, *_ = Booster("cpu", "bf16").boost(raw)
    assert (model.attribute, model.method(), model.layer) == (1, 2, raw.layer)
    with pytest.raises(AttributeError, match="not_there"):
        _ = model.not_there


@fabric(WRAPPERS, "test_fabric_module_setattr", "what is set on the boosted model is set on the model")
def test_attributes_are_set_on_the_model():
    raw = Named()
    model, *_ = Booster("cpu", "bf16").boost(raw)
    model.attribute, model.other = 3, 4
    assert (raw.attribute, raw.other) == (3, 4)


@fabric(WRAPPERS, "test_fabric_module_state_dict_access", "names in the state dict are those of the model")
def test_names_in_the_state_are_those_of_the_model():
    raw = Named()
    model, *_ = Booster("cpu", "bf16").boost(raw)
    state = model.state_dict()
    assert set(state) == {"layer.weight", "layer.bias"}
    model.load_state_dict({name: torch.ones_like(value) for name, value in state.items()})
    assert (raw.layer.weight == 1).all()


@fabric(
    WRAPPERS,
    "test_fabric_module_forward_conversion",
    "inputs reach the model as they are; integers under every precision",
    differs="there every floating input of the model becomes half. Autocast casts what goes into a half operation, so that "
    "coordinates and times keep their digits",
)
@pytest.mark.parametrize("given", [torch.float32, torch.float64, torch.int64, torch.bool])
def test_inputs_reach_the_model_as_they_are(given):
    seen = []

    class Model(nn.Linear):
        def forward(self, x):
            seen.append(x.dtype)
            return super().forward(x.float())

    for precision in ("fp16", "bf16", *([] if given.is_floating_point else ["fp16_naive"])):
        model, *_ = Booster("cpu", precision).boost(Model(3, 2) if precision != "fp16_naive" else Taking(seen))
        model(torch.ones(1, 3, dtype=given))
    assert set(seen) == {given}


class Taking(nn.Module):
    """Notes the dtype of its input."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        self.seen.append(x.dtype)
        return self.weight * x


@fabric(WRAPPERS, "test_fabric_dataloader_iterator", "a boosted loader has the length and the batches of the loader")
def test_a_loader_keeps_length_and_batches():
    raw = DataLoader(torch.arange(5), batch_size=2)
    *_, loader, _ = Booster("cpu").boost(net(), dataloader=raw)
    assert len(loader) == 3
    assert [part.tolist() for part in loader] == [[0, 1], [2, 3], [4]]


@fabric(WRAPPERS, "test_fabric_dataloader_device_placement", "batches arrive on the device in their containers")
def test_batches_arrive_in_their_containers():
    raw = DataLoader([{"data": torch.tensor(float(i)), "name": "x"} for i in range(2)], batch_size=2)
    *_, loader, _ = Booster("cpu").boost(net(), dataloader=raw)
    (got,) = list(loader)
    assert got["data"].device.type == "cpu"
    assert got["name"] == ["x", "x"]


@fabric(WRAPPERS, "test_fabric_dataloader_distributed_sampler_set_epoch", "the sampler learns of every new epoch")
def test_the_sampler_learns_of_epochs():
    calls = []

    class Sampler(DistributedSampler):
        def set_epoch(self, epoch):
            calls.append(epoch)
            super().set_epoch(epoch)

    dataset = list(range(6))
    raw = DataLoader(dataset, sampler=Sampler(dataset, num_replicas=1, rank=0))
    *_, loader, _ = Booster("cpu").boost(net(), dataloader=raw)
    orders = [[int(value) for value in loader] for _ in range(2)]
    assert orders[0] != orders[1]
    assert calls[-1] == 1


# ---------------------------------------------------------------------- the facade


@fabric(WHOLE, "test_setup_twice_fails", "boosting anything a second time is refused")
@pytest.mark.parametrize("again", ["model", "boosted model", "optimizer", "boosted optimizer"])
def test_boosting_twice_is_refused(again):
    booster, raw = Booster("cpu"), net()
    made = sgd(raw.parameters())
    model, optimizer, *_ = booster.boost(raw, made)
    given = {"model": (raw,), "boosted model": (model,), "optimizer": (net(), made)}
    with pytest.raises((RuntimeError, ValueError), match="boosted|belong"):
        booster.boost(*given.get(again, (net(), optimizer)))


@fabric(
    WHOLE, "test_backward_required", "a method other than forward cannot train past the synchronisation of gradients"
)
def test_methods_that_train_are_refused_on_ranks(ranks2):
    ranks2(call_method)


class Method(nn.Linear):
    def loss(self, x):
        return self(x).sum()


def call_method(rank, world_size):
    model = Method(8, 4)
    model, *_ = Booster("cpu", "bf16", TorchDDPPlugin()).boost(model, sgd(model.parameters()))
    with pytest.raises(RuntimeError, match="Compute the loss in forward"):
        model.loss(torch.rand(2, 8))


def rows_of(rank, world_size):
    booster = Booster("cpu", plugin=TorchDDPPlugin())
    loader = booster.prepare_dataloader(TensorDataset(torch.arange(12)), batch_size=2, shuffle=True)
    epochs = [torch.cat([rows for (rows,) in loader]) for _ in range(2)]
    sampler = DistributedSampler(range(12), world_size, rank, shuffle=True, seed=1024)
    expected = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        expected.append(list(sampler))
    return [epoch.tolist() for epoch in epochs], expected


@fabric(
    WHOLE,
    "test_setup_dataloaders_distributed_sampler_parity",
    "ranks read what DistributedSampler gives, anew each epoch",
)
def test_ranks_read_what_the_sampler_gives(ranks2):
    (first, expected), (second, _) = ranks2(rows_of)
    assert first == expected
    assert sorted(first[0] + second[0]) == list(range(12))
    assert first[0] != first[1]


def local_gradients(rank, world_size):
    booster, model, optimizer = boost("bf16", plugin=TorchDDPPlugin())
    with booster.no_sync(model):
        backward(booster, model, optimizer, seed=rank + 1)
    local = flat_grads(model).clone()
    backward(booster, model, optimizer, seed=rank + 11)
    return local, flat_grads(model)


@fabric(WHOLE, "test_no_backward_sync", "gradients stay local, and meet in the next backward")
def test_gradients_stay_local_without_synchronisation(ranks2):
    (a, both), (b, other) = ranks2(local_gradients)
    assert not torch.equal(a, b)
    assert torch.equal(both, other)


@fabric(WHOLE, "test_autocast", "autocast() is for losses outside the model")
def test_autocast_serves_losses_outside():
    booster, model, optimizer = boost("bf16")
    x, _ = batch()
    with booster.autocast():
        half = x[:, :4] @ x[:, :4].mT
        loss = (model(x) @ model(x).mT - half).square().mean()
    assert half.dtype == torch.bfloat16
    booster.backward(loss, optimizer)
    assert optimizer.step().applied


@fabric(
    WHOLE,
    "test_load_raw, test_save_wrapped_objects",
    "the state dict of a boosted model loads into a bare one, and back",
)
@pytest.mark.parametrize("precision", ["bf16", "bf16_naive"])
def test_weights_move_between_boosted_and_bare_models(precision):
    _, model, _ = boost(precision)
    bare = net()
    bare.load_state_dict(model.state_dict())
    model.load_state_dict(bare.state_dict())
    torch.testing.assert_close(flat(bare), flat(model), rtol=0, atol=0)


@fabric(WHOLE, "test_load_strict", "a missing weight is refused, unless strict=False")
def test_a_missing_weight_is_refused():
    _, model, _ = boost("bf16")
    state = dict(list(model.state_dict().items())[1:])
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(state)
    model.load_state_dict(state, strict=False)


@fabric(
    CLOUD,
    "test_atomic_save_local_interrupted_save_creates_no_partial_file",
    "an exception in save leaves what was there",
)
def test_a_save_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    booster, model, optimizer = boost("fp16")
    train(booster, model, optimizer, 1)
    booster.save(tmp_path, model, optimizer, step=1)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises((CheckpointError, TypeError, ValueError)):
        booster.save(tmp_path, model, optimizer, step=1, extra={"of": object()})
    assert sorted(tmp_path.rglob("*")) == before
    assert booster.load(tmp_path, model, optimizer).step == 1


@fabric(
    SEED,
    "test_out_of_bounds_seed",
    "a seed out of range is refused by name, before the group starts",
    differs="there a warning says that another seed was taken. The run would not be the one that was meant",
)
@pytest.mark.parametrize("seed", [10_000_000_000 * 2**40, -1, 1.5])
def test_a_seed_out_of_range_is_refused(seed, monkeypatch):
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, **options: pytest.fail("it starts"))
    with pytest.raises((ValueError, TypeError), match="seed"):
        package.launch(rank=0, world_size=1, host="127.0.0.1", port=29999, backend="gloo", seed=seed)
    assert not torch.distributed.is_initialized()
