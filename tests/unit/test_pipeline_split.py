"""Where models are cut into pipeline stages, and what each stage keeps of them."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from booster.plugin.pipeline import PipelinePlan, find_split
from booster.plugin.pipeline.split import holders, owners


class Block(nn.Module):
    def __init__(self, num_experts=0):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(num_experts))

    def forward(self, x):
        for expert in self.experts:
            x = x + expert(x)
        return self.linear(x)


class Trunk(nn.Module):
    def __init__(self, num_blocks, num_experts):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.token = nn.Parameter(torch.zeros(4))
        self.layers = nn.ModuleList(Block(num_experts) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(4)
        self.dropout = nn.Dropout()

    def forward(self, x):
        x = self.stem(x) + self.token
        for layer in self.layers:
            x = layer(x)
        return self.dropout(self.norm(x))


class Model(nn.Module):
    def __init__(self, num_blocks=4, num_experts=0):
        super().__init__()
        self.scale = nn.Buffer(torch.ones(()))
        self.trunk = Trunk(num_blocks, num_experts)
        self.head = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))

    def forward(self, x):
        return self.head(self.trunk(x) * self.scale)


def blocks_of(split):
    bounds = [0, *split.starts, len(split.children)]
    return [end - begin for begin, end in zip(bounds, bounds[1:], strict=False)]


@pytest.mark.parametrize(
    ("num_blocks", "num_stages", "sizes"),
    [(4, 2, [2, 2]), (5, 2, [3, 2]), (7, 4, [2, 2, 2, 1]), (6, 4, [2, 2, 1, 1]), (3, 1, [3])],
)
def test_blocks_are_divided_evenly_and_the_first_stages_take_what_is_left(num_blocks, num_stages, sizes):
    split = find_split(Model(num_blocks), num_stages)
    assert split.container == "trunk.layers"
    assert blocks_of(split) == sizes


def test_rows_inside_blocks_are_not_the_blocks():
    assert find_split(Model(3, num_experts=8), 3).container == "trunk.layers"


def test_rows_that_are_too_short_give_way_to_longer_ones_inside_them():
    swin = nn.ModuleList(nn.Sequential(*(Block() for _ in range(depth))) for depth in (2, 6))
    assert find_split(nn.ModuleDict({"stages": swin}), 2).container == "stages"
    assert find_split(nn.ModuleDict({"stages": swin}), 3).container == "stages.1"


def test_a_row_of_one_class_is_found_among_other_modules():
    model = nn.Sequential(nn.Embedding(5, 4), *(Block() for _ in range(5)), nn.LayerNorm(4), nn.Linear(4, 4))
    split = find_split(model, 2)
    assert (split.container, split.starts) == ("", (4,))


def test_split_points_name_the_modules_that_begin_stages():
    assert blocks_of(find_split(Model(), 3, ["trunk.layers.1", "trunk.layers.2"])) == [1, 1, 2]
    split = find_split(Model(), 2, ["head.2"])
    assert (split.container, split.starts) == ("head", (2,))
    assert find_split(Model(), 2, ["trunk.norm"]).container == "trunk"


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (
            ["trunk.layer.1", "trunk.layers.2"],
            r"no module named \['trunk.layer.1'\].*'trunk.layers.1', 'trunk.layers.2'",
        ),
        (["trunk.layers.1", "head.2"], r"several modules, \['head', 'trunk.layers'\].*'trunk.layers.1'"),
        (["trunk.layers.1"], "make 2 stages, but there are 3; name 2 modules"),
        (["trunk.layers.2", "trunk.layers.1"], "in the order of the model"),
        (["trunk.layers.0", "trunk.layers.1"], "leave something to the first stage"),
        (["head.1", "head.2"], r"\['head.1'\], which have no parameters"),
    ],
)
def test_split_points_that_are_not_legal_raise(points, message):
    with pytest.raises(ValueError, match=message):
        find_split(Model(), 3, points)


def test_fewer_blocks_than_stages_raise():
    with pytest.raises(
        ValueError, match="into 5 pipeline stages.*the longest row is trunk.layers with 4; use fewer stages"
    ):
        find_split(Model(), 5)
    with pytest.raises(ValueError, match="there is no row; use fewer stages"):
        find_split(nn.Linear(2, 2), 2)


def test_what_is_registered_before_the_blocks_is_on_the_first_stage_and_after_them_on_the_last():
    model = Model()
    split = find_split(model, 2)
    assert owners(model, split) == {
        "trunk.stem": 0,
        "trunk.norm": 1,
        "head": 1,
        **{f"trunk.layers.{number}": number // 2 for number in range(4)},
    }
    assert holders(model, owners(model, split))["trunk.token"] == [("trunk.token", 0)]


class Shuffled(nn.Module):
    """Registered in another order than it is used in, as the decoder of OPT is."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.both = nn.Linear(4, 4)
        self.unnamed = nn.ModuleDict({"x": nn.Linear(4, 4)})
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.stem = nn.Linear(4, 4)
        self.late = nn.Linear(4, 4)

    def forward(self, x):
        x = self.both(self.enter(x))
        for layer in self.layers:
            x = layer(x)
        if self.norm is not None:
            x = self.norm(x)
        return self.both(self.late(x))

    def enter(self, x):
        return self.stem(x)


class Decorated(Shuffled):
    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)


class Comprehended(Shuffled):
    def forward(self, x):
        x = [self.both(part) for part in (self.stem(x),)][0]
        for layer in self.layers:
            x = layer(x)
        return self.both(self.late((lambda y: self.norm(y))(x)))


@pytest.mark.parametrize("model", [Shuffled(), Comprehended()], ids=lambda model: type(model).__name__)
def test_modules_go_where_the_forward_uses_them_whatever_they_are_registered_before(model):
    assert owners(model, find_split(model, 2)) == {
        "norm": 1,
        "both": 0,  # before and after: as registered
        "unnamed": 0,
        "layers.0": 0,
        "layers.1": 0,
        "layers.2": 1,
        "layers.3": 1,
        "stem": 0,
        "late": 1,
    }


def test_a_forward_that_does_not_tell_leaves_modules_where_they_are_registered():
    model = Decorated()  # names no module
    assert {name: stage for name, stage in owners(model, find_split(model, 2)).items() if "." not in name} == {
        "norm": 0,
        "both": 0,
        "unnamed": 0,
        "stem": 1,
        "late": 1,
    }
    model.forward = torch.nn.functional.relu  # nor has this one a body
    assert owners(model, find_split(model, 2))["norm"] == 0
    shuffled = Shuffled()
    shuffled.forward = torch.no_grad()(shuffled.forward)
    assert owners(shuffled, find_split(shuffled, 2))["norm"] == 1


def test_a_tied_weight_has_every_stage_that_uses_it():
    model = Model()
    model.head[2] = nn.Linear(4, 4)
    model.head[2].weight = model.trunk.stem.weight
    assert holders(model, owners(model, find_split(model, 2)))["trunk.stem.weight"] == [
        ("trunk.stem.weight", 0),
        ("head.2.weight", 1),
    ]


@pytest.mark.slow_cases("options1")
@pytest.mark.parametrize(
    "options", [{"style": "1f1b"}, {"style": "interleaved", "num_model_chunks": 2}, {"style": "zbv"}]
)
def test_a_rank_keeps_its_own_parameters_under_their_names_and_frees_the_others(options):
    names, states = [], set()
    whole = Model()
    for rank in range(2):
        model = copy.deepcopy(whole)
        alive = {name: weakref.ref(param) for name, param in model.named_parameters()}
        plan = PipelinePlan(model, pp_size=2, **options)
        stages = plan.cut(rank)
        gc.collect()
        own = dict(model.named_parameters())
        assert {name for name, param in alive.items() if param() is not None} == set(own)
        assert sorted(own) == sorted(name for stage in stages for name, _ in stage.named_parameters())
        assert all(torch.equal(param, whole.get_parameter(name)) for name, param in own.items())
        assert set(model.state_dict()) == {*own, "scale"}
        names += own
        states |= set(model.state_dict())
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())
    assert states == set(whole.state_dict())


def test_a_plan_changes_nothing_and_shares_nothing():
    model = Model()
    before = copy.deepcopy(model.state_dict())
    plan = PipelinePlan(model, pp_size=2)
    assert not list(plan.meta_model.module.parameters())
    assert not plan.meta_model.module.state_dict()
    assert model(torch.ones(2, 4)).shape == (2, 3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_parts_of_other_stages_keep_their_class_and_attributes():
    model = Model()
    PipelinePlan(model, pp_size=2).cut(1)
    assert isinstance(model.trunk.stem, nn.Linear)
    assert model.trunk.stem.in_features == 4
    assert model.trunk.stem.weight.shape == (4, 4)
    assert [type(layer) for layer in model.trunk.layers] == [Block] * 4
    assert not isinstance(model.trunk.token, nn.Parameter)


def test_a_cut_model_that_is_called_says_how_to_run_it():
    for options in ({}, {"style": "zbv"}):
        model = Model()
        plan = PipelinePlan(model, pp_size=2, **options)
        plan.cut(0)
        with pytest.raises(RuntimeError, match="b.execute_pipeline"):
            model(torch.ones(2, 4))
        with pytest.raises(RuntimeError, match="trunk.layers.3 is on another|b.execute_pipeline"):
            model.trunk.layers[3 if not options else 1](torch.ones(2, 4))
        with pytest.raises(RuntimeError, match="carried out already"):
            plan.cut(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"style": "dualpipe"}, "style='dualpipe' is not legal; choose one of"),
        ({"style": "1f1b", "num_model_chunks": 2}, "num_model_chunks=2 needs style='interleaved' or 'zbv', got '1f1b'"),
        ({"style": "interleaved"}, "style='interleaved' puts several stages on each rank, and num_model_chunks is 1"),
        ({"style": "zbv", "num_model_chunks": 3}, "zbv' has 2 model chunks"),
        ({"pp_size": 0}, "must be at least 1"),
    ],
)
def test_schedules_that_do_not_exist_raise(options, message):
    with pytest.raises(ValueError, match=message):
        PipelinePlan(Model(), **{"pp_size": 2, **options})


def test_a_model_that_is_compiled_as_a_whole_raises():
    model = nn.Module()
    model._orig_mod = Model()
    with pytest.raises(ValueError, match="compile its blocks instead"):
        PipelinePlan(model, pp_size=2)


def test_a_model_that_does_not_copy_raises():
    model = Model()
    model.progress = (number for number in range(3))
    with pytest.raises(ValueError, match="cannot be copied"):
        PipelinePlan(model, pp_size=2)
