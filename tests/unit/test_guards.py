"""What users may hold besides the boosted objects: the own optimizer and model, a GradScaler, gradients touched by hand."""

import copy
import gc
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from booster import Booster
from booster.plugin import SingleDevice

PRECISIONS = ("fp32", "bf16", "fp16", "fp16_naive", "bf16_naive")


def run(precision="bf16", make=torch.optim.SGD, net=None, **options):
    """(booster, model, optimizer, net, the user's optimizer, a batch)"""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)) if net is None else net
    own = make(net.parameters(), lr=1e-2)
    b = Booster("cpu", precision, **options)
    model, optimizer, *_ = b.boost(net, own)
    return b, model, optimizer, net, own, torch.randn(16, 8)


def train(b, model, optimizer, x, steps=1):
    for _ in range(steps):
        b.backward(model(x).square().mean(), optimizer)
        assert optimizer.step().applied
        optimizer.zero_grad()


# ---------------------------------------------------------------------- a GradScaler


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bare", [True, False])
def test_a_grad_scaler_beside_a_boosted_optimizer_is_refused_and_says_what_to_delete(precision, make, bare):
    b, model, optimizer, _, _, x = run(precision, make)
    scaler = torch.amp.GradScaler("cpu")
    loss = model(x).square().mean()
    before = [param.clone() for param in model.parameters()]
    if bare:
        scaler.scale(loss).backward()
    else:
        b.backward(scaler.scale(loss), optimizer)
    with pytest.raises(RuntimeError, match=r"a GradScaler stepped.*Delete the GradScaler.*GradScaler\(enabled=False\)"):
        scaler.step(optimizer)
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.zero_grad()
    train(b, model, optimizer, x)  # as before: nothing is left of the scaler


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_grad_scaler_that_is_not_enabled_may_stay(precision):
    (b, model, optimizer, _, _, x), (_, twin, alone, *_) = run(precision), run(precision)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(3):
        b.backward(scaler.scale(model(x).square().mean()), optimizer)
        scaler.unscale_(optimizer)
        assert scaler.step(optimizer).applied
        scaler.update()
        optimizer.zero_grad()
        b.backward(twin(x).square().mean(), alone)
        alone.step()
        alone.zero_grad()
    assert all(map(torch.equal, twin.parameters(), model.parameters()))


# ---------------------------------------------------------------------- the user's own optimizer


@pytest.mark.parametrize(
    "options", [{}, {"release_gradients": "exact"}, {"fused_optimizer": False}, {"states": "bf16"}]
)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_stepping_the_users_own_optimizer_is_refused(precision, options):
    b, model, optimizer, _, own, x = run(precision, **options)
    train_one = lambda: b.backward(model(x).square().mean(), optimizer)  # noqa: E731
    train_one()
    if not options.get("release_gradients"):
        with pytest.raises(RuntimeError, match=r"this SGD was given to boost\(\).*model, optimizer, \*_ ="):
            own.step()
    assert optimizer.step().applied
    with pytest.raises(RuntimeError, match="this SGD was given to boost"):
        own.step()
    with pytest.raises(RuntimeError, match="this SGD was given to boost"):
        own.step(lambda: torch.tensor(0.0))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_state_dicts_of_the_users_own_optimizer_are_right_or_refused(precision):
    b, model, optimizer, _, own, x = run(precision, torch.optim.AdamW)
    train(b, model, optimizer, x)
    state = optimizer.state_dict()
    for entry in state["state"].values():
        entry["step"] = torch.tensor(41.0)
    if not precision.endswith("naive"):
        own.load_state_dict(own.state_dict())
        own.load_state_dict(state)
        train(b, model, optimizer, x)
        assert optimizer.state_dict()["state"][0]["step"] == 42
        return
    for call in (own.state_dict, lambda: own.load_state_dict(state)):
        with pytest.raises(RuntimeError, match=r"state_dict\(\) of the AdamW that was given to boost\(\)"):
            call()
    optimizer.load_state_dict(state)
    train(b, model, optimizer, x)
    assert optimizer.state_dict()["state"][0]["step"] == 42
    clone = copy.deepcopy(optimizer)
    with pytest.raises(RuntimeError, match="of the AdamW that was given to boost"):
        clone.optimizer.state_dict()
    assert b.unwrap(optimizer).param_groups


def test_the_guard_of_an_optimizer_is_not_a_hook_of_the_users():
    # A hook of the user's must see true gradients, for which the loss scale is divided out beforehand.
    b, model, optimizer, _, own, x = run("fp16")
    b.backward(model(x).square().mean(), optimizer)
    before = model[0].weight.grad.clone()
    assert optimizer.step().applied
    assert torch.equal(before / 65536, model[0].weight.grad)  # torch's fused kernel divided, not a pass before it


def test_the_users_optimizer_is_free_again_when_the_boosted_one_is_gone():
    b, model, optimizer, _, own, x = run("fp32")
    train(b, model, optimizer, x)
    del optimizer
    gc.collect()
    model(x).square().mean().backward()
    own.step()


def test_the_users_optimizer_is_free_once_it_was_asked_for():
    b, model, optimizer, _, own, x = run("fp32")
    train(b, model, optimizer, x)
    assert b.unwrap(optimizer) is own
    model(x).square().mean().backward()
    own.step()
    train(b, model, optimizer, x)


@pytest.mark.parametrize("ask", [True, False])
def test_an_optimizer_that_is_boosted_again_belongs_to_the_later_boost(ask):
    b, model, optimizer, net, own, x = run("fp32")
    train(b, model, optimizer, x)
    other = Booster("cpu", "bf16")
    again, stepped, *_ = other.boost(b.unwrap(model), b.unwrap(optimizer) if ask else own)
    train(other, again, stepped, x)
    with pytest.raises(RuntimeError, match="given to boost"):
        own.step()


def test_a_copy_of_a_boosted_optimizer_guards_its_own_and_a_copy_of_the_users_is_free():
    b, model, optimizer, _, own, x = run("bf16")
    train(b, model, optimizer, x)
    clone = copy.deepcopy(optimizer)
    with pytest.raises(RuntimeError, match="given to boost"):
        clone.unwrap().step()
    assert clone.step().applied
    copy.deepcopy(own).step()
    pickle.loads(pickle.dumps(own)).step()  # noqa: S301 - made here


def test_states_of_the_users_optimizer_are_made_by_torchs_checkpoint_functions():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    _, _, _, net, own, _ = run("fp32", torch.optim.AdamW)
    assert get_optimizer_state_dict(net, own)["state"]


def test_a_scheduler_made_before_boost_leaves_the_guard_in_place():
    torch.manual_seed(0)
    net = nn.Linear(8, 1)
    own = torch.optim.SGD(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(own, 1)
    b = Booster("cpu", "bf16")
    model, optimizer, *_, schedule = b.boost(net, own, lr_scheduler=schedule)
    train(b, model, optimizer, torch.randn(4, 8))
    schedule.step()
    with pytest.raises(RuntimeError, match="given to boost"):
        own.step()


# ---------------------------------------------------------------------- the user's own model


def test_the_users_own_model_called_in_training_is_told_once(caplog):
    b, model, optimizer, net, _, x = run("bf16")
    train(b, model, optimizer, x)
    assert not caplog.records
    for _ in range(3):
        net(x)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.name.startswith("booster")
    assert "the Sequential that was given to boost() was called in training" in record.message
    assert "model, optimizer, *_ = b.boost(model, optimizer)" in record.message


def test_the_users_own_model_is_free_in_evaluation_without_gradients_and_inside_the_boosted_one(caplog):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 1)

        def forward(self, x, again=True):
            return self.layer(x) + (self(x, again=False) if again else 0)

        def energy(self, x):
            return self(x).sum()

    b, model, optimizer, net, _, x = run("bf16", net=Net())
    train(b, model, optimizer, x)
    model.energy(x).detach()
    with torch.no_grad():
        net(x)
    net.eval()
    net(x)
    net.train().requires_grad_(False)
    net(x)
    assert not caplog.records


@pytest.mark.parametrize("recomputed", [None, True, False])
@pytest.mark.parametrize("has_optimizer", [True, False])
def test_a_boosted_model_inside_another_boosted_one_is_called_as_it_should(caplog, has_optimizer, recomputed):
    class Whole(nn.Module):
        def __init__(self, encoder):
            super().__init__()
            self.encoder, self.head = encoder, nn.Linear(8, 1)

        def forward(self, x):
            if recomputed is None:
                return self.head(self.encoder(x))
            return self.head(checkpoint(self.encoder, x, use_reentrant=recomputed))

    b, encoder, optimizer, net, _, x = run("bf16", net=nn.Linear(8, 8))
    whole = Whole(net)
    several = torch.optim.SGD(whole.head.parameters(), lr=1e-2) if has_optimizer else None
    boosted, *_ = b.boost(whole, several)
    train(b, boosted, optimizer, x.requires_grad_())
    assert not caplog.records
    net(x)
    assert len(caplog.records) == 1


def test_the_users_own_model_is_told_after_a_forward_pass_that_raised(caplog):
    b, model, optimizer, net, _, x = run("bf16")
    with pytest.raises(RuntimeError, match="shapes"):
        model(x[:, :3])
    net(x)
    assert len(caplog.records) == 1


def test_what_watches_the_users_model_leaves_after_100_steps():
    b, model, optimizer, net, _, x = run("fp32")
    assert len(net._forward_pre_hooks) == 1
    train(b, model, optimizer, x, 99)
    assert len(net._forward_pre_hooks) == 1
    train(b, model, optimizer, x)
    assert not net._forward_pre_hooks


def test_a_copy_and_a_pickle_of_the_users_model_are_not_watched(caplog):
    b, model, optimizer, net, _, x = run("bf16")
    train(b, model, optimizer, x)
    copy.deepcopy(net)(x)
    pickle.loads(pickle.dumps(net))(x)  # noqa: S301 - made here
    twin = copy.deepcopy(model)
    twin(x)
    twin.unwrap()(x)
    assert not caplog.records
    net(x)
    assert len(caplog.records) == 1


def test_the_users_model_can_be_exported_at_any_time_and_scripted_when_it_was_asked_for():
    b, model, optimizer, net, _, x = run("fp32")
    train(b, model, optimizer, x)
    assert torch.equal(torch.export.export(net, (x,)).module()(x), net.eval()(x))
    assert b.unwrap(model) is net
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit")
        assert torch.equal(torch.jit.script(net)(x), net(x))
        assert torch.equal(torch.jit.trace(net, (x,))(x), net(x))


# ---------------------------------------------------------------------- gradients between backward and step


def scale_warnings(caplog):
    return [record.message for record in caplog.records if "multiplied by the loss scale" in record.message]


TOUCHES = {
    "torch's clip": lambda model, loss: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "another tensor": lambda model, loss: setattr(model[0].weight, "grad", torch.ones_like(model[0].weight)),
    "in place": lambda model, loss: model[0].weight.grad.add_(1.0),
}


@pytest.mark.crossed
@pytest.mark.parametrize("touch", TOUCHES.values(), ids=TOUCHES)
@pytest.mark.parametrize("precision", ["fp16", "fp16_naive"])
@pytest.mark.parametrize("then", ["step", "clip_grad_by_norm", "clip_grad_by_value", "unscale_grads", "backward"])
def test_scaled_gradients_that_somebody_else_changes_are_told_once(caplog, precision, touch, then):
    b, model, optimizer, _, _, x = run(precision)
    loss = lambda: model(x).square().mean()  # noqa: E731
    for _ in range(3):
        b.backward(loss(), optimizer)
        touch(model, loss)
        if then == "backward":
            b.backward(loss(), optimizer)
        elif then != "step":
            getattr(optimizer, then)(*[100.0] * then.startswith("clip"))
        optimizer.step()
        optimizer.zero_grad()
    (message,) = scale_warnings(caplog)
    assert all(text in message for text in ("0.weight", "clip_grad_by_norm", "unscale_grads()"))


@pytest.mark.parametrize("precision", ["fp16", "fp16_naive"])
@pytest.mark.parametrize("then", ["step", "clip_grad_by_norm", "clip_grad_by_value", "unscale_grads", "backward"])
def test_a_plain_backward_after_a_scaled_one_is_refused_by_what_comes_next(precision, then):
    b, model, optimizer, _, _, x = run(precision)
    b.backward(model(x).square().mean(), optimizer)
    model(x).square().mean().backward()
    with pytest.raises(RuntimeError, match="has a part of a bare loss.backward"):
        if then == "backward":
            b.backward(model(x).square().mean(), optimizer)
        else:
            getattr(optimizer, then)(*[100.0] * then.startswith("clip"))


@pytest.mark.parametrize("precision", ["fp16", "fp16_naive"])
def test_scaled_gradients_that_are_set_to_zero_are_not_told(caplog, precision):
    b, model, optimizer, _, _, x = run(precision)
    for _ in range(2):
        b.backward(model(x).square().mean(), optimizer)
        model.zero_grad(set_to_none=False)
        b.backward(model(x).square().mean(), optimizer)
        assert optimizer.step().applied
    assert not caplog.records


@pytest.mark.parametrize("precision", [*PRECISIONS, "fp16_apex"])
def test_gradients_that_only_the_booster_changes_are_not_told(caplog, precision):
    b, model, optimizer, net, _, x = run(precision)
    for _ in range(3):
        for _ in range(2):
            b.backward(model(x).square().mean(), optimizer)
        optimizer.clip_grad_by_value(100.0)
        optimizer.clip_grad_by_norm(100.0)
        b.backward(model(x).square().mean(), optimizer)
        optimizer.unscale_grads()
        net[0].weight.grad.mul_(0.5)  # true numbers, which everybody may change
        optimizer.step()
        optimizer.zero_grad()
    assert not scale_warnings(caplog)


def test_scaled_gradients_are_compared_in_the_first_two_steps_and_in_every_hundredth(caplog):
    b, model, optimizer, _, _, x = run("fp16")
    train(b, model, optimizer, x, 2)
    for number in range(3, 102):
        assert not scale_warnings(caplog), number
        b.backward(model(x).square().mean(), optimizer)
        model[0].weight.grad.mul_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert scale_warnings(caplog)


# ---------------------------------------------------------------------- clips that come too early, weights made half


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16_naive"])
@pytest.mark.parametrize("clip", ["clip_grad_by_norm", "clip_grad_by_value"])
def test_a_clip_where_there_are_no_gradients_says_where_it_belongs(precision, clip):
    b, model, optimizer, _, _, x = run(precision)
    with pytest.raises(RuntimeError, match=rf"{clip}\(\) came before b.backward.*between backward and step"):
        getattr(optimizer, clip)(1.0)
    train(b, model, optimizer, x)
    with pytest.raises(RuntimeError, match=rf"{clip}\(\) came before"):
        getattr(optimizer, clip)(1.0)
    b.backward(model(x).square().mean(), optimizer)
    getattr(optimizer, clip)(1.0)


def test_a_booster_that_clips_by_itself_takes_a_step_without_gradients():
    _, _, optimizer, *_ = run("bf16", clip_grad_norm=1.0)
    assert optimizer.step().applied


def test_a_backward_pass_that_brought_nothing_may_be_clipped():
    b, model, optimizer, net, _, x = run("bf16")
    extra = torch.zeros((), requires_grad=True)
    b.backward(extra * 1.0, optimizer)
    assert optimizer.clip_grad_by_norm(1.0) == 0.0


@pytest.mark.parametrize("make_half", [lambda net, model: net.half(), lambda net, model: model.to(torch.bfloat16)])
@pytest.mark.parametrize("options", [{}, {"release_gradients": "exact"}])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_weights_made_half_after_boost_are_refused(precision, make_half, options):
    b, model, optimizer, net, _, x = run(precision, **options)
    make_half(net, model)
    loss = model(x).square().mean()
    with pytest.raises(
        RuntimeError, match=r"0.weight was float32 at boost\(\) and is torch\.b?float16 now.*fp16_naive"
    ):
        b.backward(loss, optimizer)
        optimizer.step()


@pytest.mark.parametrize("options", [{}, {"release_gradients": "exact"}])
def test_weights_that_were_frozen_may_be_made_half_after_boost(options):
    b, model, optimizer, net, _, x = run("bf16", **options)
    train(b, model, optimizer, x)
    net[0].requires_grad_(False).bfloat16()
    train(b, model, optimizer, x)
    assert optimizer.num_applied == 2


@pytest.mark.parametrize("precision", ["fp16_naive", "bf16_naive"])
def test_half_weights_with_masters_and_half_models_in_fp32_train_on(precision):
    b, model, optimizer, net, _, x = run(precision)
    train(b, model, optimizer, x)
    b, model, optimizer, net, _, x = run("fp32", net=nn.Sequential(nn.Linear(8, 1)).bfloat16())
    train(b, model, optimizer, x.bfloat16())


# ---------------------------------------------------------------------- a launched job without a process group


def test_several_processes_without_a_launch_and_without_a_plugin_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"WORLD_SIZE=2.*booster.launch_from_torch\(\) first.*TorchDDPPlugin\(\)"):
        Booster("cpu", "bf16")
    Booster("cpu", "bf16", SingleDevice())  # each by itself, as was asked for
    monkeypatch.setenv("WORLD_SIZE", "1")
    Booster("cpu", "bf16")


@pytest.mark.parametrize("compiled_first", [True, False])
def test_a_compiled_model_stays_one_graph_under_the_guards(compiled_first):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    compiled = lambda model: torch.compile(model, backend=backend, fullgraph=True)  # noqa: E731
    b = Booster("cpu", "bf16")
    own = torch.optim.SGD(net.parameters(), lr=1e-2)
    model, optimizer, *_ = b.boost(compiled(net) if compiled_first else net, own)
    train(b, model if compiled_first else compiled(model), optimizer, torch.randn(4, 8), 3)
    assert len(graphs) == 1


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16_naive", "fp16_naive"])
def test_a_step_without_a_gradient_names_parameters_that_came_into_the_model_after_boost_and_have_one(precision):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    b = Booster("cpu", precision)
    model, optimizer, *_ = b.boost(net, torch.optim.AdamW(net.parameters()))
    assert optimizer.step().applied  # nothing has a gradient
    for layer in net:
        layer.weight, layer.bias = (nn.Parameter(p.detach().clone()) for p in (layer.weight, layer.bias))
    b.backward(model(torch.ones(3, 4)).float().square().mean(), optimizer)
    with pytest.raises(
        RuntimeError, match=r"no parameter .* a gradient, and 0\.weight, 0\.bias, 1\.weight .* after boost"
    ):
        optimizer.step()
