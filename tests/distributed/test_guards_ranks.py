"""What a user may still hold besides the boosted objects, on several ranks: see tests/unit/test_guards.py."""

import contextlib
import copy
import io
import logging
import warnings

import pytest
import torch
from choices import plugins
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import register_fsdp_forward_method

from booster import Booster
from booster.mixed_precision import FP16NaiveMixedPrecision, FP16TorchMixedPrecision
from booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

PLUGINS = plugins(
    "ddp",
    "zero1",
    "zero2",
    "zero2 overlapping",
    "fsdp",
    "tp",
    "pp",
    tp_plan={"0": "colwise", "2": "rowwise"},
    num_microbatches=2,
)
PRECISIONS = {
    "fp16": lambda: FP16TorchMixedPrecision(init_scale=2.0**10),
    "fp16_naive": lambda: FP16NaiveMixedPrecision(initial_scale=2.0**10),
}


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        if record.levelno >= logging.WARNING:
            self.messages.append(record.getMessage())


@contextlib.contextmanager
def warnings_kept():
    handler, logger = Kept(), logging.getLogger("booster")
    logger.addHandler(handler)
    try:
        yield handler.messages
    finally:
        logger.removeHandler(handler)


def boosted(precision, plugin):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    b = Booster("cpu", precision, PLUGINS[plugin]())
    own = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model, optimizer, *_ = b.boost(net, own)
    return b, model, optimizer, net, own


def backward(b, model, optimizer, plugin):
    x = torch.randn(4, 8)
    if plugin == "pp":
        b.execute_pipeline(iter([(x, x[:, :4])]), model, nn.functional.mse_loss, optimizer)
    else:
        b.backward(model(x).square().mean(), optimizer)


def guarded(rank, world_size, precision, plugin):
    b, model, optimizer, net, own = boosted(PRECISIONS[precision](), plugin)
    with warnings_kept() as messages:
        for number in range(3):
            backward(b, model, optimizer, plugin)
            if plugin != "pp" and number:
                with b.accumulate(model, optimizer, 2):
                    backward(b, model, optimizer, plugin)
                    backward(b, model, optimizer, plugin)
            if number == 2:
                optimizer.clip_grad_by_norm(0.1)
            assert optimizer.step().applied
            optimizer.zero_grad()
        assert not messages, messages
        with pytest.raises(RuntimeError, match="this AdamW was given to boost"):
            own.step()
        if plugin != "pp":  # its layers call no whole model
            with pytest.raises(RuntimeError, match="the .*Sequential that was given to boost.*drift apart"):
                net(torch.randn(4, 8))
        scaler = torch.amp.GradScaler("cpu")
        backward(b, model, optimizer, plugin)
        with pytest.raises(RuntimeError, match="a GradScaler stepped the boosted optimizer"):
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
        optimizer.zero_grad()


@pytest.mark.slow_cases("fp16")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_guards_hold_on_every_plugin_and_say_nothing_of_plain_training(ranks2, precision):
    for plugin in PLUGINS:
        ranks2(guarded, precision, plugin)


def touched(rank, world_size, precision, plugin):
    b, model, optimizer, _, _ = boosted(PRECISIONS[precision](), plugin)
    with warnings_kept() as messages:
        backward(b, model, optimizer, plugin)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return sum("multiplied by the loss scale" in message for message in messages)


@pytest.mark.parametrize("plugin", ["ddp", "zero1", "fsdp"])
def test_torchs_clip_of_scaled_gradients_is_told_on_every_rank(ranks2, plugin):
    assert ranks2(touched, "fp16", plugin) == [1, 1]


def bare_beside_scaled(rank, world_size, precision, plugin):
    for passes in ("pb", "bp", "bpb"):
        b, model, optimizer, _, own = boosted(PRECISIONS[precision](), plugin)
        backward(b, model, optimizer, plugin)
        assert optimizer.step().applied
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="has a part of a bare loss.backward"):
            for each in passes:
                if each == "b":
                    backward(b, model, optimizer, plugin)
                else:
                    model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        optimizer.zero_grad()
        backward(b, model, optimizer, plugin)
        assert optimizer.step().applied
    with pytest.raises(RuntimeError, match=r"take no optimizer that ranks share; save optimizer.state_dict\(\)"):
        torch.save(optimizer, io.BytesIO())
    if plugin != "ddp" or precision == "fp16_naive":
        state = optimizer.state_dict()
        for call in (own.state_dict, lambda: own.load_state_dict(state)):
            with pytest.raises(RuntimeError, match=r"state_dict\(\) of the AdamW that was given to boost"):
                call()
        optimizer.load_state_dict(state)


@pytest.mark.slow_cases("fp16")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_bare_backward_beside_scaled_ones_and_states_of_the_own_optimizer_are_refused(ranks2, precision):
    for plugin in PLUGINS.keys() - {"pp"}:
        ranks2(bare_beside_scaled, precision, plugin)


# ---------------------------------------------------------------------- weights that are divided


class Wrapped(nn.Module):
    """As peft's models: `generate` calls a model inside, and not the root."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def forward(self, x):
        return self.inner(x)

    def generate(self, x):
        return self.inner(x)

    def save_pretrained(self, path):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of storages, which safetensors reads
            save_file(self.state_dict(), path)


def divided(rank, world_size, folder):
    torch.manual_seed(0)
    b = Booster("cpu", "bf16", TorchFSDPPlugin())
    net = Wrapped()
    model, _, *_ = b.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with warnings_kept() as messages:
        get_model_state_dict(model)
        assert not messages, messages
        assert sum(value.to_local().numel() for value in model.state_dict().values()) * world_size == 2 * (64 + 8)
        model.state_dict()
        assert len(messages) == 1
        assert "b.save_model(model, path)" in messages[0]
        b.save_model(model, f"{folder}/whole.safetensors")
        assert len(messages) == 1
    x = torch.randn(4, 8)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match=r"model.generate\(\).*register_fsdp_forward_method\(.*'generate'\)"):
            model.generate(x)
        with pytest.raises(RuntimeError, match=r"model.save_pretrained\(\).*b.save_model\(model, folder, shard=True\)"):
            model.save_pretrained(f"{folder}/theirs-{rank}")
        register_fsdp_forward_method(b.unwrap(model), "generate")
        assert torch.equal(model.generate(x), model(x))


def test_parts_of_weights_are_told_and_methods_that_meet_them_say_what_to_call(ranks2, tmp_path):
    ranks2(divided, str(tmp_path))


class MeetsParts(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.first, self.second = how, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        own = self.second.weight
        made = {
            "new_zeros": lambda: x + own.new_zeros(x.shape),
            "average": lambda: x @ (own + self.first.weight) / 2,
        }[self.how]()
        return self.second(self.first(made))


class SparseByFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, 4))

    def forward(self, index):
        return nn.functional.embedding(index, self.table, sparse=True)


def meets(rank, world_size):
    torch.manual_seed(0)
    for how in ("new_zeros", "average"):
        model, *_ = Booster("cpu", "bf16", TorchFSDPPlugin(wrap_policy=nn.Linear)).boost(MeetsParts(how))
        parts = r"test_guards_ranks.py:\d+ in .*own \(the parameter 'second.weight'\).*x.new_zeros"
        with pytest.raises(RuntimeError, match=parts):
            model(torch.randn(4, 8))
    with pytest.raises(RuntimeError, match=r"whole weights with b.save_model\(model, path\)"):
        torch.save(model, io.BytesIO())
    with pytest.raises(RuntimeError, match="Copy it before boost, and boost the copy too"):
        copy.deepcopy(model)
    for plugin in (TorchFSDPPlugin(), TorchDDPPlugin(), LowLevelZeroPlugin(stage=2)):
        b = Booster("cpu", "bf16", plugin)
        model, optimizer, *_ = b.boost(table := SparseByFunction(), torch.optim.SGD(table.parameters()))
        with pytest.raises(RuntimeError, match="sparse=False"):
            b.backward(model(torch.tensor([1, 2])).sum(), optimizer)
    with pytest.raises(RuntimeError, match=r"whole weights with b.save_model\(model, path\)"):
        torch.save(model, io.BytesIO())  # ZeRO-2's wrapper keeps gradients
    for kind in (TorchFSDPPlugin, lambda: HybridParallelPlugin(1, 1)):
        table = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
        with pytest.raises(ValueError, match="sparse=True of 0 in Sequential makes sparse gradients"):
            Booster("cpu", "bf16", kind()).boost(table, torch.optim.SGD(table.parameters()))


def test_what_forward_computes_with_parts_of_weights_is_named_and_pickles_and_sparse_tables_are_refused(ranks2):
    ranks2(meets)


def wrapped_before(rank, world_size):
    net = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"pass its .module, and plugin=TorchDDPPlugin\(...\)"):
        Booster("cpu", plugin=TorchDDPPlugin()).boost(net)


def test_a_model_that_is_distributed_already_is_refused(ranks2):
    ranks2(wrapped_before)


def with_max_norm(rank, world_size):
    for plugin in (TorchDDPPlugin(), LowLevelZeroPlugin(stage=2), TorchFSDPPlugin()):
        model = nn.Sequential(nn.Embedding(8, 4, max_norm=1.0), nn.Linear(4, 2))
        with pytest.raises(
            ValueError, match=r"0 is an Embedding with max_norm=1.0, which writes to its weight in forward"
        ):
            Booster("cpu", "fp32", plugin).boost(model, torch.optim.SGD(model.parameters(), 0.1))
    return True


def test_an_embedding_that_writes_to_its_weight_in_forward_is_refused_on_several_ranks(ranks2):
    assert ranks2(with_max_norm) == [True] * 2


def refused_strangers(rank, world_size):
    """Of each case whether the step raised, and whether a step of what `boost` knew passed before; parameters are replaced."""
    found = {}
    for plugin, options in STRANGERS:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        b = Booster("cpu", "bf16_naive", PLUGINS[plugin](), **options)
        model, optimizer, *_ = b.boost(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
        b.backward(model(torch.ones(4, 8)).float().square().mean(), optimizer)
        applied = optimizer.step().applied
        optimizer.zero_grad()
        for layer in (net[0], net[2]):
            layer.weight, layer.bias = (nn.Parameter(p.detach().clone()) for p in (layer.weight, layer.bias))
        try:
            b.backward(model(torch.ones(4, 8)).float().square().mean(), optimizer)
            optimizer.step()
            found[(plugin, *options)] = "it stepped"
        except RuntimeError as error:
            found[(plugin, *options)] = applied and str(error)
    return found


STRANGERS = [("ddp", {}), ("zero1", {}), ("zero2", {}), ("zero2", {"release_gradients": "exact"}), ("tp", {})]


def test_a_step_names_parameters_that_came_into_the_model_after_boost_on_every_placement(ranks2):
    for found in ranks2(refused_strangers):
        for case, said in found.items():
            assert "no parameter of the optimizer has a gradient, and 0.weight, 0.bias, 2.weight" in said, (case, said)


UNLIKE = {
    "frozen": r"0\.weight is \(8, 8\) torch\.float32 on rank 0 and \(8, 8\) torch\.float32 frozen on rank 1",
    "shape": r"2\.weight is \(4, 8\) torch\.float32 on rank 0 and \(5, 8\) torch\.float32, 2\.bias is .* on rank 1",
    "missing": r"2\.bias is \(4,\) torch\.float32 on rank 0 and missing on rank 1",
    "order": "parameters in another order on rank 1",
    "precision": "mixed_precision is FP32 on rank 0 and BF16MixedPrecision on rank 1",
}


def boosts_unlike(rank, world_size, plugin):
    found = {}
    for what in UNLIKE:
        other = what if rank == 1 else ""
        net = nn.Sequential(
            nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5 if other == "shape" else 4, bias=other != "missing")
        )
        net[0].weight.requires_grad_(other != "frozen")
        if other == "order":
            net[2]._parameters = dict(reversed(net[2]._parameters.items()))
        booster = Booster("cpu", "bf16" if other == "precision" else "fp32", PLUGINS[plugin]())
        with pytest.raises(ValueError, match=f"ranks boost unlike models: {UNLIKE[what]}"):
            booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
        found[what] = any(type(param) is not nn.Parameter for param in net.parameters())
    return found


@pytest.mark.parametrize("plugin", ["ddp", "zero2", "fsdp", "tp"])
def test_models_that_are_not_alike_on_ranks_are_refused_before_anything_is_placed(ranks2, plugin):
    assert [set(found.values()) for found in ranks2(boosts_unlike, plugin)] == [{False}] * 2
