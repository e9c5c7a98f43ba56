"""Optimizers stepped on master weights: equal to the same optimizer on float32 weights, whatever is kept of them."""

import copy

import pytest
import torch
from comparing import same
from prescribed import loss_with
from torch import optim
from torch.utils._python_dispatch import TorchDispatchMode

import booster
from booster.interface.optimizer import OptimizerWrapper
from booster.loss_scaler import DynamicScale, NoScale
from booster.masters import MasterOptions, Masters, choose_master_update
from booster.update.choice import switch_to_fused
from booster.update.context import UpdateContext

ELEMENTWISE = {
    "Adam": lambda p: optim.Adam(p, lr=1e-2),
    "Adam amsgrad": lambda p: optim.Adam(p, lr=1e-2, amsgrad=True),
    "AdamW": lambda p: optim.AdamW(p, lr=1e-2),
    "SGD": lambda p: optim.SGD(p, lr=1e-2),
    "SGD momentum": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "Adagrad": lambda p: optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.125),
    "RMSprop": lambda p: optim.RMSprop(p, lr=1e-2, momentum=0.9, centered=True),
    "Adadelta": lambda p: optim.Adadelta(p, lr=1e-1),
    "Adamax": lambda p: optim.Adamax(p, lr=1e-2),
    "NAdam": lambda p: optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: optim.RAdam(p, lr=1e-2),
    "ASGD": lambda p: optim.ASGD(p, lr=1e-2),
    "Rprop": lambda p: optim.Rprop(p, lr=1e-2),
}
SHAPES = [(200, 101), (33,), (), (7, 5, 3), (40, 500)]
BF16, FP16 = torch.bfloat16, torch.float16


def weights(shapes=SHAPES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


class Run:
    """Half parameters with masters that start from `weights`, and prescribed gradients."""

    def __init__(
        self, make, dtype, form="fp32", *, fused=True, scale=None, shapes=SHAPES, rounding="nearest", **options
    ):
        self.sources = weights(shapes)
        self.params = [torch.nn.Parameter(source.to(dtype)) for source in self.sources]
        self.inner = make(self.params)
        if fused:
            switch_to_fused(self.inner)
        names = {param: f"p{i}" for i, param in enumerate(self.params)}
        self.masters = Masters(
            self.inner,
            names,
            MasterOptions(master_weights=form, rounding=rounding),
            sources=dict(zip(self.params, self.sources, strict=True)),
        )
        scaler = NoScale() if scale is None else DynamicScale(init_scale=scale)
        self.optimizer = OptimizerWrapper(
            UpdateContext(optimizer=self.inner, scaler=scaler, names=names),
            lambda job: choose_master_update(job, masters=self.masters, **options),
        )
        self.generator = torch.Generator().manual_seed(7)

    def backward(self, present=None):
        grads = [torch.randn(param.shape, generator=self.generator).to(param.dtype) for param in self.params]
        kept = [grad if present is None or i in present else None for i, grad in enumerate(grads)]
        self.optimizer.zero_grad()
        used = [i for i, grad in enumerate(kept) if grad is not None]
        scale = self.optimizer.loss_scale
        self.optimizer.backward(loss_with([self.params[i] for i in used], [kept[i] for i in used]))
        return [None if grad is None else (grad * scale).float() / scale for grad in kept]

    def train(self, steps, clip=None):
        for _ in range(steps):
            self.backward()
            if clip is not None:
                self.optimizer.clip_grad_by_norm(clip)
            assert self.optimizer.step()

    def values(self):
        return [self.masters.values()[param].clone() for param in self.params]


@pytest.mark.crossed
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "default"])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_split_master_trains_bit_for_bit_like_a_separate_one(name, fused):
    runs = [Run(ELEMENTWISE[name], BF16, form, fused=fused) for form in ("fp32", "split")]
    for run in runs:
        run.train(100 if name == "AdamW" else 25, clip=1.0)
    assert same(runs[0].values(), runs[1].values())
    assert same(runs[0].params, runs[1].params)
    assert not same(runs[0].values(), runs[0].sources)


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_masters_train_like_float32_parameters_on_the_same_gradients(name, dtype):
    run = Run(ELEMENTWISE[name], dtype, "fp32", scale=2.0**7 if dtype == FP16 else None)
    reference = [torch.nn.Parameter(source.clone()) for source in run.sources]
    optimizer = ELEMENTWISE[name](reference)
    for _ in range(10):
        for param, grad in zip(reference, run.backward(), strict=True):
            param.grad = grad
        run.optimizer.step()
        optimizer.step()
    for ours, theirs, working in zip(run.values(), reference, run.params, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(working.detach().float(), ours, rtol=torch.finfo(dtype).eps, atol=1e-7)
    for param, other in zip(run.params, reference, strict=True):
        ours, theirs = run.optimizer.state[param], optimizer.state[other]
        assert {key: value for key, value in ours.items() if value is not None}.keys() == theirs.keys()
        for key, value in theirs.items():
            torch.testing.assert_close(ours[key], torch.as_tensor(value), rtol=2e-5, atol=2e-6, check_dtype=False)


def test_without_masters_small_updates_are_lost_and_kahan_and_stochastic_rounding_keep_them():
    moved = {}
    for form, rounding in [("none", "nearest"), ("none", "stochastic"), ("none", "kahan"), ("split", "nearest")]:
        run = Run(lambda p: optim.SGD(p, lr=2.0**-13), BF16, form, rounding=rounding, shapes=[(64, 64)])
        with torch.no_grad():
            run.params[0].fill_(1.0)
        for _ in range(64):
            run.optimizer.zero_grad()
            run.optimizer.backward(loss_with(run.params, [1.0]))
            run.optimizer.step()
        moved[form, rounding] = 1.0 - float(run.params[0].detach().double().mean())
    assert moved["none", "nearest"] == 0.0
    for key in [("none", "stochastic"), ("none", "kahan")]:
        assert moved[key] == pytest.approx(64 * 2.0**-13, rel=0.05)


@pytest.mark.parametrize("by_hook", [False, True])
def test_a_parameter_without_gradient_is_left_alone_as_torch_does(by_hook):
    run = Run(ELEMENTWISE["AdamW"], BF16, "split")
    kept = []

    def exchange(optimizer, args, kwargs):
        for param, grad in zip(run.params, kept, strict=True):
            param.grad = grad

    if by_hook:
        run.inner.register_step_pre_hook(exchange)
    reference = [torch.nn.Parameter(source.clone()) for source in run.sources]
    optimizer = ELEMENTWISE["AdamW"](reference)
    for present in [{0, 1, 2, 3, 4}, {0, 1}, {1, 2, 4}, {3}, set(range(5))]:
        for param, grad in zip(reference, run.backward(present), strict=True):
            param.grad = grad
        if by_hook:
            kept[:] = [param.grad for param in run.params]
            for param in run.params:
                param.grad = torch.zeros_like(param) if param.grad is None else None
        run.optimizer.step()
        optimizer.step()
    for ours, theirs, param in zip(run.values(), reference, run.params, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=2e-6, atol=2e-6)
        assert run.optimizer.state[param]["step"] == optimizer.state[theirs]["step"]


@pytest.mark.parametrize("form", ["fp32", "split"])
def test_parameters_with_different_histories_are_saved_and_loaded_with_their_own_step_counts(form):
    run, other = Run(ELEMENTWISE["AdamW"], BF16, form), Run(ELEMENTWISE["AdamW"], BF16, form)
    for present in [{0, 1}, {1, 2, 4}, {1}]:
        run.backward(present)
        run.optimizer.step()
    other.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    counts = [int(other.optimizer.state[param].get("step", 0)) for param in other.params]
    assert counts == [1, 3, 1, 0, 1]
    other.generator.set_state(run.generator.get_state())
    for each in (run, other):
        each.train(3)
    assert same(run.values(), other.values())
    assert same(run.params, other.params)


@pytest.mark.parametrize("form", ["fp32", "split"])
def test_hooks_fire_once_a_step_and_see_the_users_parameters(form):
    run = Run(ELEMENTWISE["AdamW"], BF16, form)
    seen = []
    for register in (run.inner.register_step_pre_hook, run.inner.register_step_post_hook):
        register(lambda optimizer, args, kwargs: seen.append([id(p) for p in optimizer.param_groups[0]["params"]]))
    run.train(3)
    assert seen == [[id(param) for param in run.params]] * 6


def test_groups_are_the_same_objects_after_a_step_and_schedulers_drive_them():
    run = Run(ELEMENTWISE["AdamW"], BF16)
    groups, group, params = run.inner.param_groups, run.inner.param_groups[0], run.inner.param_groups[0]["params"]
    scheduler = optim.lr_scheduler.ExponentialLR(run.inner, 0.5)
    run.train(1)
    scheduler.step()  # warns, which is an error here, if it thinks that step() never ran
    assert run.inner.param_groups is groups
    assert groups[0] is group
    assert group["params"] is params
    assert params == run.params or [id(p) for p in params] == [id(p) for p in run.params]
    assert group["lr"] == 5e-3


class Counting(optim.SGD):
    """Writes to its group once a step, as schedule-free optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = group["lr"] * 0.5
        return super().step(closure)


def test_an_optimizer_that_writes_to_its_group_writes_once_a_step_and_every_bucket_sees_the_same():
    booster.register_elementwise(Counting)
    run = Run(lambda p: Counting(p, lr=1.0), BF16, "split", shapes=[(900_000,)])
    assert len(run.masters.buckets) > 3
    run.optimizer.backward(loss_with(run.params, [1.0]))
    run.optimizer.step()
    assert run.inner.param_groups[0]["lr"] == 0.5
    assert torch.equal(run.values()[0], run.sources[0] - 0.5)


@pytest.mark.parametrize(("elements", "made"), [(70_000, 0), (2**22, 2)])
def test_scratch_of_a_small_model_is_kept_for_the_next_step(elements, made):
    class Zeros(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func is torch.ops.aten.zeros.default and args[0][0] > 1000
            return func(*args, **(kwargs or {}))

    run = Run(lambda p: optim.SGD(p, lr=0.1), BF16, "split", shapes=[(elements,)])
    run.train(2)
    run.optimizer.backward(loss_with(run.params, [1.0]))
    with Zeros() as zeros:
        run.optimizer.step()
    assert zeros.count == made


def test_hooks_fire_once_also_where_step_calls_the_step_of_its_base():
    booster.register_elementwise(Counting)
    optim.SGD([torch.nn.Parameter(torch.zeros(1))])  # torch wraps the step of a class when it is first instantiated
    run = Run(lambda p: Counting(p, lr=1e-3), BF16, "split", shapes=[(900_000,)])
    calls = []
    run.inner.register_step_pre_hook(lambda *args: calls.append("pre"))
    run.inner.register_step_post_hook(lambda *args: calls.append("post"))
    run.train(1)
    assert calls == ["pre", "post"]


def test_a_subclass_is_not_elementwise_by_inheritance():
    class Other(optim.AdamW):
        pass

    params = [torch.nn.Parameter(torch.zeros(3, dtype=BF16))]
    with pytest.raises(
        ValueError, match=r"Other would be .*and is not known to treat every element.*register_elementwise\(Other\)"
    ):
        Masters(Other(params), {}, MasterOptions(master_weights="split"))


def test_an_unknown_optimizer_is_stepped_once_on_whole_separate_masters():
    class Norms(optim.SGD):
        calls = 0

        def step(self, closure=None):
            Norms.calls += 1
            total = sum(p.grad.norm() ** 2 for g in self.param_groups for p in g["params"]).sqrt()
            for group in self.param_groups:
                for param in group["params"]:
                    assert param.dtype == torch.float32
                    param.data -= group["lr"] * param.grad / total

    run = Run(lambda p: Norms(p, lr=0.1), BF16, "auto")
    grads = run.backward()
    run.optimizer.step()
    assert Norms.calls == 1
    total = sum(grad.norm() ** 2 for grad in grads).sqrt()
    for ours, source, grad in zip(run.values(), run.sources, grads, strict=True):
        torch.testing.assert_close(ours, source - 0.1 * grad / total)


@pytest.mark.parametrize("name", [name for name in ("Adafactor", "Muon") if hasattr(optim, name)])
def test_per_tensor_optimizers_step_whole_tensors_exactly_as_on_float32_parameters(name):
    make, shapes = (lambda p: getattr(optim, name)(p, lr=1e-2)), [(40, 30), (200, 301), (64, 64)]
    run = Run(make, BF16, "auto", shapes=shapes)
    reference = [torch.nn.Parameter(source.clone()) for source in run.sources]
    optimizer = make(reference)
    for _ in range(5):
        for param, grad in zip(reference, run.backward(), strict=True):
            param.grad = grad
        run.optimizer.step()
        optimizer.step()
    assert same(run.values(), [param.detach() for param in reference])
    for form in ("split", "none") if name == "Adafactor" else ():
        with pytest.raises(ValueError, match=f"{name} needs whole tensors; use master_weights='fp32' or 'auto'"):
            Run(make, BF16, form, shapes=shapes)


def test_lbfgs_trains_masters_through_its_closure_as_it_trains_float32_weights():
    target = torch.linspace(-1, 1, 12).reshape(4, 3)

    def make(params):
        return optim.LBFGS(params, lr=0.5, max_iter=4)

    run = Run(make, BF16, "auto", shapes=[(4, 3)])
    seen = []

    def closure():
        run.optimizer.zero_grad()
        loss = ((run.params[0].float() - target) ** 2).sum()
        seen.append(loss.item())
        run.optimizer.backward(loss)
        return loss

    for _ in range(6):
        run.optimizer.step(closure)
    assert seen[-1] < 1e-3 < seen[0]
    assert len(set(seen)) > 6  # the weights moved inside a step
    torch.testing.assert_close(run.params[0].detach(), run.values()[0].bfloat16())
    with pytest.raises(ValueError, match="register_elementwise"):
        Run(make, BF16, "split", shapes=[(4, 3)])


def test_a_closure_of_an_elementwise_optimizer_runs_once_and_its_clip_counts():
    run, twin = (Run(ELEMENTWISE["SGD"], BF16, "split") for _ in range(2))
    calls = []

    def closure():
        calls.append(1)
        run.backward()
        run.optimizer.clip_grad_by_norm(0.5)
        return 3.0

    result = run.optimizer.step(closure)
    twin.train(1, clip=0.5)
    assert result.loss == 3.0
    assert calls == [1]
    assert same(run.values(), twin.values())


def test_zero_grad_clears_working_gradients_and_a_step_leaves_them_with_their_scale():
    run = Run(ELEMENTWISE["AdamW"], FP16, scale=2.0**4)
    run.backward()
    before = [param.grad.clone() for param in run.params]
    run.optimizer.clip_grad_by_norm(1.0)
    run.optimizer.step()
    assert same([param.grad for param in run.params], before)
    run.optimizer.zero_grad()
    assert all(param.grad is None for param in run.params)


def test_no_float32_copy_of_the_model_is_held_by_a_split_master_at_rest():
    run = Run(ELEMENTWISE["SGD"], BF16, "split")
    run.train(1)
    total = sum(param.numel() for param in run.params)
    kept = sum(bucket.residual.untyped_storage().nbytes() for bucket in run.masters.buckets)
    assert 2 * total <= kept < 2 * (total + 64 * len(run.params))
    handles = [handle for bucket in run.masters.buckets for handle in bucket.handles]
    assert all(handle.untyped_storage().nbytes() == 4 and handle.grad is None for handle in handles)


def test_a_sparse_gradient_of_a_half_parameter_raises_with_the_way_out():
    run = Run(ELEMENTWISE["SGD"], BF16, shapes=[(6, 2)])
    run.params[0].grad = torch.ones(6, 2, dtype=BF16).to_sparse(1)
    with pytest.raises(RuntimeError, match=r"sparse gradient.*sparse=False.*keep_fp32"):
        run.optimizer.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"master_weights": "fp16"},
            r"master_weights='fp16' is not legal; choose one of \['auto', 'fp32', 'split', 'split24', 'none'\]",
        ),
        ({"rounding": "up"}, "rounding='up' is not legal"),
        ({"master_weights": "split", "rounding": "kahan"}, "rounding='kahan' is for master_weights='none'"),
    ],
)
def test_options_that_are_not_legal_raise(options, message):
    with pytest.raises(ValueError, match=message):
        MasterOptions(**options)
