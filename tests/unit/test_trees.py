"""Tensors in containers of every kind, at every place that looks for them."""

import collections
import types

import pytest
import torch
from containers import CONTAINERS, Record, TaggedDict, leaves, type_after
from torch import nn

from booster import Booster
from booster.data import to_device
from booster.mixed_precision import FP16ApexMixedPrecision, NaiveAMPModel, set_fp32_attr_to_module
from booster.plugin import TorchDDPPlugin
from booster.plugin.fsdp.forward_hooks import outputs_without_views
from booster.tensors.cast_regions import cast_floats
from booster.tensors.trees import divide, form, join, map_tensors, tensors, with_leaves
from booster.tensors.trees import leaves as all_leaves

META = torch.device("meta")


class Returning(nn.Module):
    """Returns what it is given, and notes it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, given):
        self.seen = given
        return given


def through_cast(tree):
    return cast_floats(tree, torch.float16)


def through_outputs(tree):
    precision = FP16ApexMixedPrecision("O0", verbosity=0, cast_model_outputs=torch.float16)
    return Booster("cpu", precision).boost(Returning())[0](tree)


def through_inputs(tree):
    net = Returning()
    NaiveAMPModel(net, output_to_fp32=False)(tree)
    return net.seen


def through_pinned(tree):
    net = nn.Sequential(Returning())
    set_fp32_attr_to_module(net[0])
    NaiveAMPModel(net)[0](cast_floats(tree, torch.float16))
    return cast_floats(net[0].seen, torch.float16)


def through_loader(tree):
    return to_device(tree, META)


def through_own_outputs(tree):
    return outputs_without_views(nn.Identity(), (), tree)


REPLACING = {
    "cast": (through_cast, lambda new, old: new.dtype == torch.float16),
    "outputs": (through_outputs, lambda new, old: new.dtype == torch.float16),
    "inputs": (through_inputs, lambda new, old: new.dtype == torch.float16),
    "pinned module": (through_pinned, lambda new, old: new.dtype == torch.float16),
    "loader": (through_loader, lambda new, old: new.device == META),
    "outputs of sharded modules": (through_own_outputs, lambda new, old: not new._is_view()),
}


@pytest.mark.crossed
@pytest.mark.parametrize("kind", CONTAINERS)
@pytest.mark.parametrize("place", REPLACING)
def test_every_tensor_is_replaced_and_every_container_stays_what_it_is(place, kind):
    replace, is_replaced = REPLACING[place]
    x = torch.ones(2, 3, requires_grad=True).clone().view(3, 2)
    before = CONTAINERS[kind](x)
    after = replace(before)
    assert type(after) is type_after(kind, before)
    assert getattr(after, "tag", None) == getattr(before, "tag", None)
    assert getattr(after, "maxlen", None) == getattr(before, "maxlen", None)
    assert all(leaf is x for leaf in leaves(before) if isinstance(leaf, torch.Tensor))
    for new, old in zip(leaves(after), leaves(before), strict=True):
        assert is_replaced(new, old) if isinstance(old, torch.Tensor) else new is old


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_container_in_which_nothing_is_replaced_is_the_same_object(kind):
    tree = CONTAINERS[kind](torch.ones(2))
    assert map_tensors(lambda tensor: tensor, tree) is tree
    assert [id(tensor) for tensor in tensors(tree)] == [
        id(leaf) for leaf in leaves(tree) if isinstance(leaf, torch.Tensor)
    ]


@pytest.mark.parametrize("kind", CONTAINERS)
@pytest.mark.parametrize("with_target", [False, True])
def test_every_tensor_of_a_batch_is_divided(kind, with_target):
    x = torch.arange(12.0).view(6, 2)
    tree = CONTAINERS[kind](x)
    parts = divide(
        (tree, torch.zeros(6)) if with_target or kind == "object in a tuple" else [tree, tree], lambda size: 3
    )
    assert len(parts) == 3
    for number, part in enumerate(parts):
        given = part.args[0]
        assert type(given) is type_after(kind, tree)
        for leaf, whole in zip(leaves(given), leaves(tree), strict=True):
            if isinstance(whole, torch.Tensor):
                assert torch.equal(leaf, x[2 * number : 2 * number + 2])
            else:
                assert leaf is whole


@pytest.mark.parametrize("kind", CONTAINERS)
def test_outputs_of_micro_batches_are_joined_to_those_of_the_batch(kind):
    x = torch.arange(12.0).view(6, 2)
    parts = [CONTAINERS[kind](part) for part in x.split(2)]
    joined = join(parts)
    if kind in ("set", "frozen set"):
        assert joined == parts
        return
    whole = CONTAINERS[kind](x)
    assert type(joined) is type_after(kind, whole)
    assert getattr(joined, "tag", None) == getattr(whole, "tag", None)
    for leaf in leaves(joined):
        if isinstance(leaf, torch.Tensor):
            assert torch.equal(leaf, x)
    assert len(list(tensors(joined))) == len(list(tensors(whole)))


def test_numbers_and_zero_dims_are_joined_to_what_they_are_for_each_micro_batch():
    assert torch.equal(join([torch.tensor(1.0), torch.tensor(2.0)]), torch.tensor([1.0, 2.0]))
    assert join([{"n": 1, "none": None}, {"n": 2, "none": None}]) == {"n": [1, 2], "none": None}


class Net(nn.Module):
    """Takes and returns a container, and notes how many rows it saw."""

    def __init__(self, kind):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.kind, self.rows = kind, []

    def forward(self, *args, **kwargs):
        x = next(tensors((args, kwargs)))
        self.rows.append(len(x))
        return CONTAINERS[self.kind](self.linear(x))


class InThree(TorchDDPPlugin):
    def num_micro_batches(self, batch_size):
        return 3


@pytest.mark.crossed
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", CONTAINERS)
def test_execute_pipeline_divides_and_joins_every_container(kind, precision):
    torch.manual_seed(0)
    x = torch.randn(6, 2)
    tree = CONTAINERS[kind](x)
    net = Net(kind)
    booster = Booster("cpu", precision, InThree())
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    result = booster.execute_pipeline(
        iter([(tree, torch.ones(6, 2))]),
        model,
        lambda output, target: (next(tensors(output)) - target).square().mean(),
        optimizer,
        return_outputs=True,
    )
    assert net.rows == [2, 2, 2]
    found = list(tensors(result["outputs"]))
    if kind in ("set", "frozen set"):
        found = [torch.cat(found)]
    with torch.no_grad():
        expected = next(tensors(model(tree)))
    assert all(tensor.shape == (6, 2) and not tensor.requires_grad for tensor in found)
    torch.testing.assert_close(found[0], expected, atol=0.05, rtol=0)


def test_a_read_only_mapping_goes_to_the_model_by_keyword_in_parts():
    parts = divide(CONTAINERS["read-only mapping"](torch.ones(4, 1)), lambda size: 2)
    assert [list(part.kwargs) for part in parts] == [["x", "text"]] * 2
    assert [len(part.kwargs["x"]) for part in parts] == [2, 2]


@pytest.mark.parametrize("hold", [lambda x: x, lambda x: [1, x], lambda x: {"x": x}])
def test_an_object_that_is_no_container_and_has_the_batch_is_refused(hold):
    batch = types.SimpleNamespace(name="text", inputs=hold(torch.ones(4, 1))), torch.zeros(4)
    with pytest.raises(TypeError, match=r"object of SimpleNamespace, its attribute 'inputs' has the 4 samples"):
        divide(batch, lambda size: 2)
    assert divide(batch, lambda size: 1)[0].args[0] is batch[0]
    kept = types.SimpleNamespace(weights=torch.ones(3), layer=nn.Linear(4, 4)), torch.zeros(4), nn.Linear(4, 4)
    assert divide((*kept, torch.zeros(4)), lambda size: 2)[0].args[0] is kept[0]


def test_a_copied_container_is_a_new_one_also_where_nothing_changes():
    batch = {
        "x": torch.ones(1),
        "list": [1],
        "tuple": (1,),
        "record": Record(torch.ones(1)),
        "own": TaggedDict("t", a=1),
    }
    copied = map_tensors(lambda tensor: tensor, batch, copy_containers=True)
    assert copied is not batch
    for name in ("list", "record", "own"):
        assert copied[name] is not batch[name]
    assert copied["tuple"] is batch["tuple"]
    assert copied["own"].tag == "t"


def test_model_outputs_of_transformers_are_containers(transformers):
    from transformers.modeling_outputs import BaseModelOutput

    output = BaseModelOutput(last_hidden_state=torch.ones(2, 3))
    half = map_tensors(torch.Tensor.half, output)
    assert type(half) is BaseModelOutput
    assert half.last_hidden_state.dtype == half["last_hidden_state"].dtype == half[0].dtype == torch.float16
    assert output.last_hidden_state.dtype == torch.float32
    assert join([output, output]).last_hidden_state.shape == (4, 3)


def test_keys_of_the_first_mapping_decide_the_order():
    joined = join(
        [collections.OrderedDict(a=torch.ones(1), b=torch.zeros(1)), {"b": torch.zeros(1), "a": torch.ones(1)}]
    )
    assert list(joined) == ["a", "b"]
    assert torch.equal(joined["a"], torch.ones(2))


@pytest.mark.parametrize("kind", [kind for kind in CONTAINERS if kind not in ("set", "frozen set")])
def test_leaves_are_replaced_in_order_in_containers_of_the_same_form(kind):
    tree = CONTAINERS[kind](torch.arange(3.0))
    before = all_leaves(tree)
    new = with_leaves(tree, [leaf + 1 if isinstance(leaf, torch.Tensor) else leaf for leaf in before])
    assert type(new) is type_after(kind, tree)
    assert all(a is b for a, b in zip(all_leaves(tree), before, strict=True))
    for after, leaf in zip(all_leaves(new), before, strict=True):
        assert torch.equal(after, leaf + 1) if isinstance(leaf, torch.Tensor) else after == leaf
    assert form(CONTAINERS[kind](torch.ones(5))) == form(tree)
    assert form(CONTAINERS[kind](torch.ones(5))) != form([tree])
    assert hash(form(tree)) == hash(form(tree))
