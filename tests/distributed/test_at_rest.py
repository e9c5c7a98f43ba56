"""Between passes a model holds its own parameters, and inside forward they show the dtype that is computed in."""

from itertools import product

import pytest
import torch
from choices import precisions
from comparing import flat
from torch import nn
from torch.distributed.tensor import DTensor

from booster import Booster
from booster.mixed_precision import FP8MixedPrecision, FP16ApexMixedPrecision
from booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

DIM = 16
TP_PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
PLUGINS = {
    "single": lambda: None,
    "ddp": TorchDDPPlugin,
    "zero1": LowLevelZeroPlugin,
    "zero2": lambda: LowLevelZeroPlugin(stage=2),
    "fsdp": TorchFSDPPlugin,
    "fsdp kept": lambda: TorchFSDPPlugin(reshard_after_forward=False),
    "dp": lambda: HybridParallelPlugin(1, 1),
    "dp zero": lambda: HybridParallelPlugin(1, 1, zero_stage=1),
    "tp": lambda: HybridParallelPlugin(2, 1, tp_plan=TP_PLAN),
}
SHARDED = ["fsdp", "fsdp kept", "dp", "dp zero", "tp"]
PRECISIONS = {
    **precisions("fp32", "bf16", "bf16_naive", "bf16_naive split"),
    "fp8 gathered": lambda: FP8MixedPrecision(gather_in_fp8=True, emulate=True, keep=(), convert="all"),
    "fp16_apex O2": lambda: FP16ApexMixedPrecision("O2", loss_scale=128.0, verbosity=0),
}


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError("in backward")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.fails = ""

    def forward(self, x):
        hidden = self.up(x)
        if self.fails == "forward":
            raise ZeroDivisionError("in forward")
        hidden = Failing.apply(hidden) if self.fails == "backward" else hidden.relu()
        return x + self.down(hidden)


class Net(nn.Module):
    """Asks its weights which dtype they have, those that lie sharded among them."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.seen = set()

    def forward(self, x):
        x = x.to(self.blocks[0].up.weight.dtype)
        for index, block in enumerate(self.blocks):
            x = block(x.to(block.down.bias.dtype)) + 0 * torch.zeros((), dtype=self.blocks[index - 1].up.weight.dtype)
        self.seen |= {param.dtype for param in self.parameters()}
        assert all(isinstance(param, nn.Parameter) and param.is_floating_point() for param in self.parameters())
        return self.head(x)

    def generate(self, x, steps):
        for _ in range(steps):
            x = self(x)
        return x


def built(plugin, precision):
    torch.manual_seed(5)
    booster = Booster("cpu", PRECISIONS[precision](), PLUGINS[plugin]())
    model = Net()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return booster, model, optimizer


def batch(step, booster):
    draw = torch.Generator().manual_seed(step)
    size, place = booster.plugin.data_parallel_size, booster.plugin.data_parallel_rank
    return torch.randn(8, DIM, generator=draw).chunk(size)[place]


def one_step(parts, step):
    booster, model, optimizer = parts
    booster.backward(model(batch(step, booster)).float().square().mean(), optimizer)
    optimizer.step()
    optimizer.zero_grad()


def failing(parts, where):
    booster, model, optimizer = parts
    model.blocks[1].fails = where
    with pytest.raises(ZeroDivisionError):
        booster.backward(model(batch(9, booster)).float().square().mean(), optimizer)
    model.blocks[1].fails = ""


def evaluate(parts):
    booster, model, _ = parts
    model.eval()
    with torch.no_grad():
        model(batch(9, booster))
    model.train()


def without_grad(parts):
    with torch.no_grad():
        parts[1](batch(9, parts[0]))


def in_inference_mode(parts):
    with torch.inference_mode():
        parts[1](batch(9, parts[0]))


def generate(parts):
    with torch.no_grad():
        parts[1].generate(batch(9, parts[0]), steps=3)


EVENTS = {
    "nothing": lambda parts: None,
    "eval": evaluate,
    "no_grad": without_grad,
    "inference mode": in_inference_mode,
    "generate": generate,
    "forward raised": lambda parts: failing(parts, "forward"),
    "backward raised": lambda parts: failing(parts, "backward"),
}


def held(model, optimizer):
    """Whether the model's parameters are those of the optimizer."""
    own = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return {id(param) for param in model.parameters()} == own


def after_events(rank, world_size, plugin, precision, events):
    """By event: are parameters those at rest, and how far is a run with it from one without."""
    found, plain = {}, None
    for name in events:
        parts = built(plugin, precision)
        _, model, optimizer = parts
        at_rest = []
        one_step(parts, 0)
        at_rest.append(held(model, optimizer))
        EVENTS[name](parts)
        at_rest.append(held(model, optimizer))
        optimizer.zero_grad()
        with torch.no_grad():  # an average of weights, or a decay by hand
            for param in model.parameters():
                param.mul_(0.5)
        one_step(parts, 1)
        one_step(parts, 2)
        at_rest.append(held(model, optimizer))
        final = flat(model)
        plain = final if plain is None else plain
        found[name] = at_rest, float((final - plain).abs().max())
    return found


@pytest.mark.slow_cases("fsdp kept", "dp")
@pytest.mark.crossed
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_naive"])
@pytest.mark.parametrize("plugin", [name for name in PLUGINS if name not in ("ddp", "zero1", "single")])
def test_after_whatever_happened_parameters_are_the_models_own(ranks2, plugin, precision):
    for found in ranks2(after_events, plugin, precision, list(EVENTS)):
        assert found == {name: ([True] * 3, 0.0) for name in EVENTS}


def evaluated_in_inference_mode(rank, world_size, plugin, precision):
    """How far weights are from those of a run without, after an evaluation before all training and one amid each pass."""
    found = []
    for evaluates in (False, True):
        parts = booster, model, optimizer = built(plugin, precision)
        if evaluates:
            in_inference_mode(parts)
        for step in range(3):
            loss = model(batch(step, booster)).float().square().mean()
            if evaluates:
                in_inference_mode(parts)
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        found.append(flat(model))
    return float((found[0] - found[1]).abs().max())


@pytest.mark.parametrize(
    ("plugin", "precision"), [("fsdp", "bf16_naive"), ("fsdp", "fp8 gathered"), ("dp", "fp32"), ("tp", "bf16")]
)
def test_an_evaluation_in_inference_mode_leaves_what_can_be_trained(ranks2, plugin, precision):
    assert ranks2(evaluated_in_inference_mode, plugin, precision) == [0.0, 0.0]


@pytest.mark.parametrize("plugin", ["ddp", "zero1"])
def test_ddp_goes_on_after_all_but_a_backward_pass_that_raised(ranks2, plugin):
    events = [name for name in EVENTS if name != "backward raised"]  # after which torch refuses the next forward pass
    for found in ranks2(after_events, plugin, "bf16_naive", events):
        assert found == {name: ([True] * 3, 0.0) for name in events}


def halved(model, how):
    with torch.no_grad():
        for param in model.parameters():
            (param.data if how == "data" else param).mul_(0.5)


NEXT = {
    "a pass": lambda parts: one_step(parts, 1),
    "the step": lambda parts: parts[2].step(),
    "a state dict": lambda parts: parts[1].state_dict(),
}


def written_between_passes(rank, world_size, plugin, precision):
    """By way of writing, and what comes next: the distance from a run in which no forward pass came before the writing."""

    def run(how, then, idle):
        parts = built(plugin, precision)
        booster, model, optimizer = parts
        one_step(parts, 0)
        if then == "the step":
            booster.backward(model(batch(1, booster)).float().square().mean(), optimizer)
        if idle:
            model(batch(9, booster))
        halved(model, how)
        NEXT[then](parts)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        one_step(parts, 2)
        return flat(model)

    plain = {then: run("in place", then, idle=False) for then in NEXT}
    ways = product(("in place", "data"), NEXT)
    return {(how, then): float((run(how, then, idle=True) - plain[then]).abs().max()) for how, then in ways}


@pytest.mark.slow_cases("fsdp kept", "dp")
@pytest.mark.crossed
@pytest.mark.parametrize(("precision", "allowed"), [("fp32", 0.0), ("bf16", 2e-3)])
@pytest.mark.parametrize("plugin", ["zero2", *SHARDED])
def test_what_is_written_after_a_forward_pass_without_a_backward_stays_written(ranks2, plugin, precision, allowed):
    # In half the user sees, and writes, rounded weights. Weights are below 1/2.
    for found in ranks2(written_between_passes, plugin, precision):
        assert max(found.values()) <= allowed, found


def written_to_the_optimizers(rank, world_size, plugin):
    runs = []
    for idle in (False, True):
        parts = built(plugin, "fp32")
        booster, model, optimizer = parts
        if idle:
            model(batch(9, booster))
        with torch.no_grad():
            for group in optimizer.param_groups:
                for param in group["params"]:
                    param.mul_(0.5)
        one_step(parts, 0)
        runs.append(flat(model))
    return float((runs[1] - runs[0]).abs().max())


@pytest.mark.slow_cases("fsdp kept", "dp")
@pytest.mark.parametrize("plugin", SHARDED)
def test_what_is_written_to_the_parameters_of_the_optimizer_counts_in_the_next_pass(ranks2, plugin):
    assert ranks2(written_to_the_optimizers, plugin) == [0.0, 0.0]


def dtypes(rank, world_size, precision):
    """What each plugin's weights showed inside forward, and the distance of its weights from those of one process."""
    shown, distance, expected = {}, {}, torch.zeros(0)
    for plugin in PLUGINS:
        parts = built(plugin, precision)
        for step in range(2):
            one_step(parts, step)
        shown[plugin] = {str(dtype) for dtype in parts[1].unwrap().seen}
        expected = flat(parts[1]) if plugin == "single" else expected
        distance[plugin] = float((flat(parts[1]) - expected).abs().max())
    return shown, distance


@pytest.mark.slow_cases("bf16", "bf16_naive split")
@pytest.mark.parametrize("precision", [name for name in PRECISIONS if name != "fp8 gathered"])
def test_inside_forward_a_weight_shows_the_dtype_it_computes_in(ranks2, precision):
    computed = {"fp32": "torch.float32", "bf16": "torch.float32", "fp16_apex O2": "torch.float16"}.get(
        precision, "torch.bfloat16"
    )
    for shown, distance in ranks2(dtypes, precision):
        assert shown == {plugin: {computed} for plugin in PLUGINS}
        assert max(distance.values()) < (1e-6 if precision == "fp32" else 2e-2)


def operations(rank, world_size):
    """A sharded weight that shows another dtype still is the shard: operations see its values and bring it gradients."""
    _, model, _ = parts = built("fsdp", "bf16_naive")
    found = {}

    def look(module, args, output):
        weight = module.blocks[0].up.weight
        found.update(
            dtype=weight.dtype,
            like=torch.ones(1).type_as(weight).dtype,
            to=torch.ones(1).to(weight).dtype,
            shape=tuple(weight.shape),
            device=weight.device.type,
            norm=float((weight**2).sum().full_tensor().detach()),
            listed=isinstance(torch.stack([weight, weight]), DTensor),
        )
        (weight**2).sum().full_tensor().backward()
        return output

    model.unwrap().register_forward_hook(look, prepend=True)
    values = float((model.blocks[0].up.weight.detach().full_tensor() ** 2).sum())
    model(batch(0, parts[0]))
    grad = model.blocks[0].up.weight.grad
    return found, values, torch.equal(grad.full_tensor(), 2 * model.blocks[0].up.weight.full_tensor())


def test_a_weight_that_shows_another_dtype_is_the_shard_itself(ranks2):
    for found, norm, brought_gradient in ranks2(operations):
        assert found == {
            "dtype": torch.bfloat16,
            "like": torch.bfloat16,
            "to": torch.bfloat16,
            "shape": (2 * DIM, DIM),
            "device": "cpu",
            "norm": pytest.approx(norm),
            "listed": True,
        }
        assert brought_gradient


def frozen_between_passes(rank, world_size, plugin, precision):
    """By what is asked of a block between a forward and the next pass: its flags, and whether it moved."""
    found = {}
    for trains in (False, True):
        parts = built(plugin, precision)
        booster, model, optimizer = parts
        block = model.blocks[1]
        for param in block.parameters():
            param.requires_grad_(not trains)
        one_step(parts, 0)
        before = flat(block)
        model(batch(9, booster))
        for param in block.parameters():
            param.requires_grad_(trains)
        one_step(parts, 1)
        found[trains] = {param.requires_grad for param in block.parameters()}, not torch.equal(flat(block), before)
    return found


@pytest.mark.slow_cases("fsdp kept", "dp")
@pytest.mark.crossed
@pytest.mark.parametrize("precision", ["fp32", "bf16_naive", "fp16_apex O2"])
@pytest.mark.parametrize("plugin", SHARDED)
def test_what_is_frozen_or_unfrozen_after_a_forward_pass_without_a_backward_stays_so(ranks2, plugin, precision):
    for found in ranks2(frozen_between_passes, plugin, precision):
        assert found == {False: ({False}, False), True: ({True}, True)}


def joins_between_passes(rank, world_size, plugin, precision):
    """A block joins the optimizer after a forward pass without a backward: how far from a run without the pass."""
    runs = []
    for idle in (False, True):
        torch.manual_seed(5)
        booster = Booster("cpu", PRECISIONS[precision](), PLUGINS[plugin]())
        model = Net()
        early = [param for name, param in model.named_parameters() if not name.startswith("blocks.1.")]
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(early, lr=0.1))
        if idle:
            model(batch(9, booster))
        optimizer.add_param_group({"params": list(model.blocks[1].parameters())})
        before = flat(model.blocks[1])
        one_step((booster, model, optimizer), 1)
        runs.append(flat(model))
    return float((runs[1] - runs[0]).abs().max()), not torch.equal(flat(model.blocks[1]), before)


@pytest.mark.slow_cases("fsdp kept", "dp")
@pytest.mark.parametrize("plugin", SHARDED)
def test_a_group_that_is_added_after_a_forward_pass_without_a_backward_trains(ranks2, plugin):
    assert ranks2(joins_between_passes, plugin, "fp32") == [(0.0, True)] * 2


def zeroed(rank, world_size, plugin, precision, set_to_none):
    """How far a run is off if gradients are cleared while old ones wait, compared with one in which there were none."""
    found = {}
    for name in ("before forward", "between forward and backward", "of a pass in no_sync"):
        runs = []
        for old in (True, False):
            booster, model, optimizer = parts = built(plugin, precision)
            one_step(parts, 0)
            if name == "of a pass in no_sync":
                if old:
                    with booster.no_sync(model, optimizer):
                        booster.backward(model(batch(1, booster)).float().square().mean(), optimizer)
            elif old:
                booster.backward(model(batch(1, booster)).float().square().mean(), optimizer)
            if name != "between forward and backward":
                model.zero_grad(set_to_none)
            output = model(batch(2, booster))
            if name == "between forward and backward":
                model.zero_grad(set_to_none)
            booster.backward(output.float().square().mean(), optimizer)
            optimizer.step()
            runs.append(flat(model))
        found[name] = float((runs[0] - runs[1]).abs().max())
    return found


@pytest.mark.slow_cases("fsdp kept", "dp")
@pytest.mark.crossed
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("plugin", ["fsdp", "fsdp kept", "dp", "zero2"])
def test_zero_grad_of_a_model_clears_all_gradients_whatever_the_model_shows(ranks2, plugin, set_to_none):
    for found in ranks2(zeroed, plugin, "bf16", set_to_none):
        assert found == dict.fromkeys(found, 0.0)
