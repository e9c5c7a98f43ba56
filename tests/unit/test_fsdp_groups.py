"""Which modules TorchFSDPPlugin gathers together, what it refuses, and what it does without a process group."""

import pytest
import torch
from torch import nn

from booster import Booster
from booster.mixed_precision import FP16NaiveMixedPrecision
from booster.model.modules import check_meta, materialise
from booster.plugin import TorchFSDPPlugin
from booster.plugin.fsdp.groups import block_names, plan_groups


class Block(nn.Module):
    def __init__(self, dim=4):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(dim), nn.Linear(dim, dim)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(dim, dim)) for _ in range(2))

    def forward(self, x):
        return self.linear(self.norm(x))


class Net(nn.Module):
    def __init__(self, num_blocks=3):
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(4, 100)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


# ---- blocks ----


def test_blocks_are_the_outermost_repeated_modules_by_default():
    assert block_names(Net(), None) == BLOCKS
    assert block_names(Net(1), None) == ["blocks.0.experts.0", "blocks.0.experts.1"]
    assert block_names(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), None) == []
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 2, enable_nested_tensor=False)
    assert block_names(encoder, None) == ["layers.0", "layers.1"]


def test_a_transformers_model_names_its_blocks():
    model = Net()
    model._no_split_modules = ["Linear"]
    assert "blocks.0.linear" in block_names(model, None)
    assert "blocks.0" not in block_names(model, None)


@pytest.mark.parametrize(
    ("wrap_policy", "names"),
    [
        (Block, BLOCKS),
        ("blocks.*", BLOCKS),
        ("blocks.1", ["blocks.1"]),
        ("**.norm", ["blocks.0.norm", "blocks.1.norm", "blocks.2.norm"]),
        ([Block, "head"], [*BLOCKS, "head"]),
        (lambda name, module: isinstance(module, nn.Linear) and module.out_features > 4, ["head"]),
        (300, ["head"]),
        (60, [*BLOCKS, "head"]),  # 68 parameters each, no part of it above 60
        (10**6, []),
    ],
)
def test_blocks_are_chosen_by_class_name_predicate_or_size(wrap_policy, names):
    assert sorted(block_names(Net(), wrap_policy)) == sorted(names)


@pytest.mark.parametrize("wrap_policy", [nn.Linear, [nn.Linear]])
def test_a_class_that_is_the_models_own_selects_no_block_of_it(wrap_policy):
    assert block_names(nn.Linear(2, 2), wrap_policy) == []


def test_by_size_inner_modules_come_first_and_attention_stays_whole():
    assert block_names(Net(1), 20) == [
        "embed",
        "blocks.0.linear",
        "blocks.0.experts.0.0",
        "blocks.0.experts.1.0",
        "head",
    ]
    layer = nn.Sequential(nn.TransformerEncoderLayer(8, 2, dim_feedforward=8))
    assert "0.self_attn" in block_names(layer, 50)
    assert not [name for name in block_names(layer, 50) if name.startswith("0.self_attn.")]


def test_a_class_or_pattern_that_selects_nothing_raises_with_what_there_is():
    with pytest.raises(
        ValueError, match=r"'layers.\*', which selects no module of Net; .* \['embed', 'blocks', 'head'\]"
    ):
        block_names(Net(), "layers.*")
    with pytest.raises(ValueError, match="'Conv2d'.*'Block', 'LayerNorm', 'Linear'"):
        block_names(Net(), [Block, nn.Conv2d])


# ---- groups ----


def groups(model, blocks=BLOCKS, pinned=(), dtype_of=lambda param, pinned: param.dtype):
    names = {id(module): name for name, module in model.named_modules()}
    plan = plan_groups(model, blocks=blocks, pinned=pinned, dtype_of=dtype_of)
    held = [name for group in plan for module in group.members for name in [names[id(module)]]]
    assert sorted(held) == sorted(names.values()), "every module is in exactly one group"
    return [([names[id(module)] for module in group.modules], group.pinned) for group in plan]


def test_pinned_modules_come_first_as_one_list_and_the_model_last():
    plan = groups(Net(), pinned=["blocks.0.norm", "blocks.1.norm"])
    assert plan[0] == (["blocks.0.norm", "blocks.1.norm"], True)
    assert plan[1:] == [(["blocks.0"], False), (["blocks.1"], False), (["blocks.2"], False), ([""], False)]


def test_blocks_inside_a_pinned_module_are_pinned_groups_of_their_own():
    model = nn.ModuleDict({"encoder": Net(), "head": nn.Linear(4, 4)})
    model.forward = lambda x: x
    plan = groups(model, [f"encoder.{name}" for name in BLOCKS], pinned=["encoder"])
    assert [pinned for _, pinned in plan] == [True, True, True, True, False]
    assert plan[3] == (["encoder"], True)


class Owner(nn.Module):
    """Parameters of its own around a layer that is called and a module with a projection that is read."""

    def __init__(self):
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2)


@pytest.mark.parametrize(
    "products", [("linear", "attention", "attention.out_proj"), ("attention", "attention.out_proj")]
)
def test_a_module_that_stays_with_what_is_not_gathered_in_half_leaves_it_layers_without_children_alone(products):
    model = Owner()
    groups = plan_groups(model, blocks=(), pinned=(), dtype_of=lambda param, pinned: param.dtype, gathered=products)
    found = [(group.modules, group.gathered) for group in groups]
    assert found == [([model.linear], True)] * ("linear" in products) + [([model], False)]
    assert model.attention in groups[-1].members


def test_a_block_that_shares_a_parameter_joins_the_group_around_it():
    model = Net()
    model.blocks[1].linear.weight = model.embed.weight
    assert [modules for modules, _ in groups(model)] == [["blocks.0"], ["blocks.2"], [""]]
    model = Net()
    model.blocks[1].linear = model.blocks[2].linear  # a module in two places
    assert [modules for modules, _ in groups(model)] == [["blocks.0"], [""]]
    model = Net()
    model.blocks.append(model.blocks[0])  # a block that runs twice is one block
    assert [modules for modules, _ in groups(model)] == [["blocks.0"], ["blocks.1"], ["blocks.2"], [""]]


def test_a_parameter_that_is_pinned_and_not_is_refused():
    model = Net()
    model.blocks[1].linear.weight = model.embed.weight
    with pytest.raises(
        ValueError, match="blocks.1.linear.weight is in a module that is kept in float32, .* embed.weight"
    ):
        groups(model, pinned=["blocks.1.linear"])
    model.blocks[1].linear = model.embed
    with pytest.raises(ValueError, match="kept in float32"):
        groups(model, pinned=["blocks.1"])


def test_trainable_parameters_of_another_dtype_are_grouped_apart_and_frozen_ones_are_not():
    model = Net()
    model.blocks[0].linear.bfloat16()
    model.blocks[1].linear.bfloat16().requires_grad_(False)
    assert [modules for modules, _ in groups(model)] == [
        ["blocks.0.linear"],
        ["blocks.0"],
        ["blocks.1"],
        ["blocks.2"],
        [""],
    ]


# ---- the meta device ----


def test_modules_without_reset_parameters_are_named():
    with torch.device("meta"):
        model = Net()
        model.blocks[1].table = nn.Parameter(torch.ones(3))
        model.register_buffer("mask", torch.ones(3))
    with pytest.raises(ValueError, match=r"no reset_parameters\(\) that would give them values: Net, blocks.1\."):
        check_meta(model)
    check_meta(Net())


def test_materialised_parameters_are_those_of_a_constructor_and_stay_tied():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.MultiheadAttention(4, 2), nn.Linear(3, 3))
        model[3].weight = model[0].weight
        model[3].weight.requires_grad_(False)
    torch.manual_seed(0)
    materialise([model[0], model[1], model[2].out_proj, model[2], model[3]], torch.device("cpu"))
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert model[3].weight is model[0].weight
    assert not model[0].weight.requires_grad
    assert torch.equal(model[1].running_var, torch.ones(3))
    assert torch.equal(model[2].out_proj.bias, torch.zeros(4)), "children come first, as in constructors"


# ---- the plugin ----


@pytest.mark.parametrize(
    ("error", "options", "match"),
    [
        (
            ValueError,
            {"wrap_policy": 0},
            "wrap_policy=0 is not legal; it must be a whole number of at least 1, of parameters",
        ),
        (ValueError, {"wrap_policy": []}, "wrap_policy is empty"),
        (
            TypeError,
            {"wrap_policy": int},
            "wrap_policy=<class 'int'> is not legal; pass a module class, a name pattern",
        ),
        (TypeError, {"wrap_policy": nn.Linear(2, 2)}, r"is a module object \(Linear\); pass its class"),
        (RuntimeError, {"cpu_offload": True}, "cpu_offload=True needs a process group"),
        (ValueError, {"reduce_dtype": torch.int8}, "reduce_dtype=torch.int8 is not legal; choose one of"),
        (ValueError, {"replicate_size": 2}, "replicate_size=2 is not legal; .* the world size, which is 1"),
        (ValueError, {"reshard_after_forward": 2}, "reshard_after_forward=2 is not legal"),
        (TypeError, {"mixed_precision": "fp16"}, "precision belongs to Booster alone"),
    ],
    ids=str,
)
def test_wrong_options_raise_at_construction(error, options, match):
    with pytest.raises(error, match=match):
        TorchFSDPPlugin(**options)


def test_a_launched_job_without_a_process_group_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"call booster.launch_from_torch\(\) before TorchFSDPPlugin\(\)"):
        TorchFSDPPlugin()


def train(plugin, precision):
    torch.manual_seed(0)
    model = Net()
    booster = Booster("cpu", precision, plugin)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for _ in range(4):
        loss = model(torch.ones(2, 4)).square().mean()
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, booster, model


def test_without_a_process_group_training_is_that_of_a_single_device():
    for precision in ("fp32", lambda: FP16NaiveMixedPrecision(initial_scale=16.0)):
        make = precision if callable(precision) else lambda precision=precision: precision
        losses, booster, model = train(TorchFSDPPlugin(), make())
        assert losses == train(None, make())[0]
        assert booster.plugin.group is None
        assert booster.plugin.data_parallel_size == 1
        with booster.no_sync(model):
            pass
        with torch.device("meta"):
            model = Net()
        booster.boost(model)
        assert not any(param.is_meta for param in model.parameters())


class Partly(nn.Module):
    """Its constructor computes what its reset_parameters() leaves out: `left`."""

    def __init__(self, left):
        super().__init__()
        self.left = left
        self.weight = nn.Parameter(torch.empty(4, 4))
        self.register_buffer("angles", torch.linspace(1, 2, 4), persistent=False)
        self.register_buffer("order", torch.arange(4))
        self.register_buffer("mask", torch.ones(4, 4).tril().bool())
        self.register_buffer("low", torch.ones(4).to(torch.float8_e4m3fn))
        self.reset_parameters()

    def reset_parameters(self):
        values = {
            "angles": torch.linspace(1, 2, 4),
            "order": torch.arange(4),
            "mask": torch.ones(4, 4).tril().bool(),
            "low": torch.ones(4).to(torch.float8_e4m3fn),
            "weight": torch.eye(4),
        }
        for name, value in values.items():
            if name != self.left:
                getattr(self, name).data.copy_(value)
        if self.left == "half of weight":
            self.weight.data[2:] = torch.nan


@pytest.mark.parametrize("left", ["angles", "order", "mask", "low", "weight", "half of weight"])
def test_what_reset_parameters_leaves_without_values_is_named(left):
    with torch.device("meta"):
        model = nn.Sequential(Partly(left))
    with pytest.raises(ValueError, match=rf"without values: {left.split()[-1]} of Partly\."):
        materialise(reversed(list(model.modules())), torch.device("cpu"))


def test_what_reset_parameters_sets_is_what_the_constructor_sets():
    with torch.device("meta"):
        model = nn.Sequential(Partly(None), nn.BatchNorm1d(4), nn.Linear(4, 4))
    materialise(reversed(list(model.modules())), torch.device("cpu"))
    for name, tensor in Partly(None).state_dict().items():
        assert torch.equal(model[0].state_dict()[name].float(), tensor.float())
    assert model[0].angles.tolist() == torch.linspace(1, 2, 4).tolist()
