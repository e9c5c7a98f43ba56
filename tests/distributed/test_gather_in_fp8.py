"""gather_in_fp8: weights of fp8 layers travel as one byte a number, and training does not change by a bit."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from comparing import whole
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from booster import Booster
from booster.common.torch_internals.fsdp_internals import fsdp_groups, gather_of
from booster.mixed_precision import FP8MixedPrecision
from booster.mixed_precision.low_precision import linear, operands
from booster.mixed_precision.low_precision.linear import LowPrecisionLinear
from booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from booster.shards import fp8_gather

DIM, CLASSES, BATCH = 16, 6, 32


class Block(nn.Module):
    def __init__(self, frozen):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        if frozen:
            self.up.requires_grad_(False)
            self.down.weight.requires_grad_(False).data = self.down.weight.data.bfloat16()

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, *, frozen=False, tied=False, checkpointed=False):
        super().__init__()
        self.checkpointed = checkpointed
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block(frozen) for _ in range(3))
        if tied:  # with each other, and with what reads it wide
            self.blocks[1].up.weight = self.blocks[0].up.weight
            self.blocks[2].down.weight = nn.Parameter(torch.randn(DIM, 4 * DIM) / 8)
            self.table = nn.Embedding(DIM, 4 * DIM)
            self.table.weight = self.blocks[2].down.weight
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x):
        y = self.first(x)
        for block in self.blocks:
            y = torch.utils.checkpoint.checkpoint(block, y, use_reentrant=False) if self.checkpointed else block(y)
        y = y if getattr(self, "table", None) is None else y + self.table(x[:, 0].abs().long())[:, :DIM]
        return self.head(y)


class Bytes(TorchDispatchMode):
    """Adds up the bytes that all-gathers make on this rank, and counts all-reduces."""

    gathered = reduced = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.gathered += args[0].nbytes if name == "_allgather_base_" else 0
        self.reduced += name == "allreduce_"
        return func(*args, **(kwargs or {}))


def data(step, share=1, index=0):
    x = torch.randn(BATCH, DIM, generator=torch.Generator().manual_seed(step))
    return [part.chunk(share)[index] for part in (x, x[:, :CLASSES].argmax(1))]


def boosted(gather_in_fp8, plugin=None, model_options=None, **options):
    torch.manual_seed(3)
    precision = FP8MixedPrecision(gather_in_fp8=gather_in_fp8, emulate=True, **options)
    booster = Booster("cpu", precision, plugin or TorchFSDPPlugin())
    raw = Model(**(model_options or {}))
    with torch.no_grad():  # weights with different scales, so that one of another weight would be seen
        for index, param in enumerate(raw.parameters()):
            param.mul_(1 + 0.37 * index)
    trained = [param for param in raw.parameters() if param.requires_grad]
    model, optimizer, *_ = booster.boost(raw, torch.optim.SGD(trained, lr=0.05, momentum=0.9))
    return booster, model, optimizer


def train(booster, model, optimizer, accumulated=1, steps=4):
    """Losses with one of an evaluation after each step, weights, bytes gathered by a step and all-reduces of one forward."""
    losses, gathered = [], 0
    share, index = booster.plugin.data_parallel_size, booster.plugin.data_parallel_rank
    for step in range(steps):
        x, y = data(step, share, index)
        with Bytes() as counted, booster.accumulate(model, optimizer, num_micro_batches=accumulated):
            for part, target in zip(x.chunk(accumulated), y.chunk(accumulated), strict=True):
                loss = F.cross_entropy(model(part), target)
                booster.backward(loss, optimizer)
                losses.append(loss.detach())
        gathered = counted.gathered
        optimizer.clip_grad_by_norm(0.5)
        assert optimizer.step().applied
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            losses.append(F.cross_entropy(model(x), y))
        model.train()
    return torch.stack(losses), [*map(whole, model.parameters())], gathered


# model, precision, plugin, micro-batches
CASES = {
    "clipped": ({}, {}, {}, 1),
    "accumulated": ({}, {}, {}, 2),
    "checkpointed": ({"checkpointed": True}, {}, {}, 1),
    "tied": ({"tied": True}, {"keep": "first"}, {}, 1),
    "frozen": ({"frozen": True}, {}, {}, 1),
    "kept": ({}, {"keep": ("first", "head", "blocks.1")}, {}, 1),
    "not resharded": ({}, {}, {"reshard_after_forward": False}, 1),
    "offloaded": ({}, {}, {"cpu_offload": True}, 1),
    "half weights": ({}, {"weights": "bf16"}, {}, 1),
    "wide": ({}, {"compute_dtype": torch.float32}, {}, 1),
}


def compare(rank, world_size, cases, plugin_options):
    counted = {}
    for case in cases:
        model_options, options, plugin, accumulated = CASES[case]
        found = []
        for gather_in_fp8 in (False, True):
            made = boosted(gather_in_fp8, TorchFSDPPlugin(**plugin, **plugin_options), model_options, **options)
            found.append(train(*made, accumulated, steps=2))
        (losses, weights, wide), (own_losses, own_weights, low) = found
        assert torch.equal(own_losses, losses), case
        assert all(torch.equal(a, b) for a, b in zip(own_weights, weights, strict=True)), case
        counted[case] = wide, low
    return counted


def passes(case):
    """How often a step gathers a block: in each forward, and in backward where it was freed."""
    _, _, plugin, accumulated = CASES[case]
    return accumulated * (1 if plugin.get("reshard_after_forward") is False else 2)


def saved_bytes(case):
    """What one byte a number saves in a step, by the shapes; the weights are divided evenly."""
    width = 2 if case == "half weights" else 4
    each = 4 * DIM * DIM
    if case == "tied":  # all blocks lie with the model, two share a weight, and the one that a table reads stays wide
        return 4 * each * (width - 1)
    if case == "frozen":  # half of them are bfloat16 at rest
        return passes(case) * 3 * (each * 3 + each * 1)
    return passes(case) * (4 if case == "kept" else 6) * each * (width - 1)


QUICK = ["accumulated", "tied", "frozen", "half weights"]


@pytest.mark.parametrize(
    "cases",
    [QUICK, pytest.param([case for case in CASES if case not in QUICK], marks=pytest.mark.slow)],
    ids=["some", "rest"],
)
def test_training_is_the_same_to_the_bit_and_a_number_is_one_byte(ranks2, cases):
    for counted in ranks2(compare, cases, {}):
        assert {case: wide - low for case, (wide, low) in counted.items()} == {
            case: saved_bytes(case) for case in cases
        }


@pytest.mark.slow
def test_so_it_is_where_copies_are_sharded(ranks4):
    for counted in ranks4(compare, ["accumulated"], {"replicate_size": 2}):
        wide, low = counted["accumulated"]
        assert wide - low == saved_bytes("accumulated")


# ---- what arrives is what layers multiply with

ROWS = 24  # no weight has as many rows or columns
# model, precision, plugin, weights that are gathered wide, forward and backward passes of a layer in a step and an evaluation
HANDED = {
    "trained": ({}, {}, {}, 0, 3),
    "checkpointed": ({"checkpointed": True}, {}, {}, 0, 4),
    "tied": ({"tied": True}, {"keep": "first"}, {}, 1, 3),
    "frozen": ({"frozen": True}, {}, {}, 0, 3),
    "half weights": ({}, {"weights": "bf16"}, {}, 0, 3),
    "not resharded": ({}, {}, {"reshard_after_forward": False}, 0, 3),
}


class QuantizedWeights:
    """While entered, counts the weights that layers round."""

    def __enter__(self):
        self.count, right = 0, operands.quantized

        def quantized(x, *how):
            self.count += ROWS not in x.shape
            return right(x, *how)

        self.patch = pytest.MonkeyPatch()
        for module in (operands, linear):
            self.patch.setattr(module, "quantized", quantized)
        return self

    def __exit__(self, *raised):
        self.patch.undo()


def arrived_in(model):
    """The bytes that are kept of gathered weights."""
    gathers = [gather_of(group) for group in fsdp_groups(m for m in model.modules() if isinstance(m, FSDPModule))]
    found = [made for each in gathers if isinstance(each, fp8_gather.FP8Gather) for made, _ in each._arrived.values()]
    return sum(made.values.untyped_storage().nbytes() for made in found)


def stepped_and_evaluated(model, booster, optimizer):
    x, y = (each[:ROWS] for each in data(0))
    loss = F.cross_entropy(model(x), y)
    booster.backward(loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model.eval()(x)
    model.train()


def handed(rank, world_size, cases, plugin=None):
    for case in cases:
        model_options, options, plugin_options, wide, passes = HANDED[case]
        for gather_in_fp8 in (True, False):
            made = TorchFSDPPlugin(**plugin_options) if plugin is None else HybridParallelPlugin(**plugin)
            booster, model, optimizer = boosted(gather_in_fp8, made, model_options, **options)
            layers = sum(isinstance(module, LowPrecisionLinear) for module in model.modules())
            for _ in range(2):
                with QuantizedWeights() as quantized:
                    stepped_and_evaluated(model, booster, optimizer)
                if case != "frozen" or gather_in_fp8:
                    assert quantized.count == passes * (wide if gather_in_fp8 else layers), case
                assert arrived_in(model) == 0, "bytes are freed with the weights"


def test_a_layer_rounds_no_weight_that_arrived_in_bytes(ranks2):
    ranks2(handed, ["trained", "tied"])


@pytest.mark.slow
def test_so_it_is_in_all_passes_of_all_models(ranks2):
    ranks2(handed, [case for case in HANDED if case not in ("trained", "tied")])


@pytest.mark.slow
def test_parts_of_tensor_parallelism_are_handed_over_too(ranks4):
    plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    ranks4(handed, ["trained"], {"tp_size": 2, "pp_size": 1, "zero_stage": 2, "tp_plan": plan})


# ---- scales


def scales(rank, world_size):
    """All-reduces of a forward pass; and that a layer called by itself after a step reads what the step wrote."""
    booster, model, optimizer = boosted(True)
    x, y = data(0)
    found = []
    with torch.no_grad():
        for _ in range(4):  # in the first passes ranks compare what they gather
            model(x)
    for _ in range(2):
        with Bytes() as counted:
            loss = F.cross_entropy(model(x), y)
        found.append(counted.reduced)
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        alone = model.unwrap().blocks[1](x)
    _, other, _ = boosted(False)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(alone, other.unwrap().blocks[1](x))
    return found


def test_one_small_message_a_forward_pass_makes_the_scales(ranks2):
    assert ranks2(scales) == [[1, 1]] * 2


def overflown(rank, world_size):
    """An inf or a NaN in one number, on one rank: all of that product is NaN on every rank, as without gathering."""
    for bad in (torch.inf, torch.nan):
        found = []
        for gather_in_fp8 in (False, True):
            _, model, _ = boosted(gather_in_fp8)
            with torch.no_grad():
                local = model.unwrap().blocks[1].up.weight.to_local()
                if rank == 1:
                    local[0, 0] = bad
                found.append(model(data(0)[0]))
        assert all(output.isnan().all() for output in found)


def test_what_is_not_finite_on_one_rank_is_so_on_all(ranks2):
    ranks2(overflown)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_nan_outlives_a_maximum_over_ranks_that_prefers_numbers(monkeypatch, bad):
    """As NCCL's may, which compares by fmax; gloo's keeps NaN, so a stand-in is the other rank."""
    monkeypatch.setattr(fp8_gather, "reduced", lambda mine, op, group: torch.fmax(mine, torch.ones_like(mine)))
    weights = [torch.tensor([0.5, bad]), torch.tensor([3.0, -4.0]), torch.zeros(0)]
    records = [nn.ParameterDict({"sharded_param": nn.Parameter(weight)}) for weight in weights]
    largest = fp8_gather.WeightScales(records, group=None).of(records)
    assert not largest[0].isfinite()
    assert [float(size) for size in largest[1:]] == [4, 1]


# ---- between passes


def left(rank, world_size):
    """After a forward pass without backward, weights are what they were; what is written to them counts."""
    booster, model, optimizer = boosted(True, TorchFSDPPlugin(wrap_policy=lambda name, module: False))
    before = [*map(whole, model.parameters())]
    x, y = data(0)
    model(x)  # gathered weights stay for a backward pass that never comes
    shown = model.unwrap().blocks[0].up.weight.detach().clone()
    names = list(model.state_dict())
    place = names.index("blocks.0.up.weight")
    assert shown.shape == before[place].shape
    assert not torch.equal(shown, before[place])  # what products read
    state = {name: getattr(v, "full_tensor", lambda v=v: v)() for name, v in model.state_dict().items()}
    assert all(torch.equal(a, b) for a, b in zip(state.values(), before, strict=True))
    model(x)
    with torch.no_grad():
        dict(model.named_parameters())["blocks.0.up.weight"][3, 5] = 9.0
    after = whole_after(model, x)
    changed = [index for index, (a, b) in enumerate(zip(after, before, strict=True)) if not torch.equal(a, b)]
    assert len(changed) == 1
    expected = before[changed[0]].clone()
    expected[3, 5] = 9.0
    assert torch.equal(after[changed[0]], expected)


def whole_after(model, x):
    with torch.no_grad():
        model(x)
    return [*map(whole, model.parameters())]


def test_master_weights_are_never_rounded(ranks2):
    ranks2(left)


def checkpointed(rank, world_size, folder):
    booster, model, optimizer = boosted(True)
    train(booster, model, optimizer, steps=1)
    booster.save(folder, model, optimizer)
    on = train(booster, model, optimizer, steps=1)
    results = []
    for gather_in_fp8 in (True, False):
        booster, model, optimizer = boosted(gather_in_fp8)
        train(booster, model, optimizer, steps=1)
        booster.load(folder, model, optimizer)
        results.append(train(booster, model, optimizer, steps=1))
    for losses, weights, _ in results:
        assert torch.equal(losses, on[0])
        assert all(torch.equal(a, b) for a, b in zip(weights, on[1], strict=True))
    assert {str(value.dtype) for value in model.state_dict().values()} == {"torch.float32"}
    assert list(model.state_dict()) == list(Model().state_dict())


@pytest.mark.slow
def test_a_checkpoint_has_ordinary_names_and_dtypes_and_goes_on_to_the_bit(ranks2, tmp_path):
    ranks2(checkpointed, str(tmp_path / "checkpoint"))


# ---- other placements


def hybrid(rank, world_size):
    plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    found = []
    for gather_in_fp8 in (False, True):
        plugin = HybridParallelPlugin(tp_size=2, pp_size=1, zero_stage=2, tp_plan=plan)
        found.append(train(*boosted(gather_in_fp8, plugin), steps=2))
    (losses, weights, wide), (own_losses, own_weights, low) = found
    assert torch.equal(own_losses, losses)
    assert all(torch.equal(a, b) for a, b in zip(own_weights, weights, strict=True))
    assert low < wide


@pytest.mark.slow
def test_layers_that_tensor_parallelism_divides_too_gather_their_parts(ranks4):
    ranks4(hybrid)


def others(rank, world_size):
    with pytest.raises(ValueError, match=r"keeps what it gathered, so gather_in_fp8=True.*TorchFSDPPlugin"):
        boosted(True, LowLevelZeroPlugin())
    found = [train(*boosted(gather_in_fp8, TorchDDPPlugin()), steps=1)[0] for gather_in_fp8 in (False, True)]
    assert torch.equal(*found)


def test_who_keeps_what_it_gathers_refuses_and_who_gathers_nothing_does_the_same(ranks2):
    ranks2(others)


def regrouped(rank, world_size):
    with pytest.raises(ValueError, match=r"reshard_after_forward=2 .* leave gather_in_fp8 False"):
        boosted(True, TorchFSDPPlugin(reshard_after_forward=2))


def test_weights_that_stay_divided_over_fewer_ranks_are_refused(ranks4):
    ranks4(regrouped)


def test_a_world_of_one_gathers_nothing(run_on_ranks):
    run_on_ranks(alone, 1)


def alone(rank, world_size):
    assert dist.get_world_size() == 1
    called = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8_gather.FP8Gather, "__call__", lambda *a, **k: called.append(a))
        found = [train(*boosted(gather_in_fp8), steps=1) for gather_in_fp8 in (False, True)]
    assert torch.equal(found[0][0], found[1][0])
    assert not called


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_a_recipe_of_which_one_byte_serves_not_both_passes_is_refused(recipe):
    with pytest.raises(ValueError, match=f"gather_in_fp8=True goes with recipe='tensorwise': '{recipe}' rounds"):
        FP8MixedPrecision(recipe, gather_in_fp8=True, emulate=True)
