"""Experts of a ModuleList, stacked: as the user's loop on one device, and dealt to ranks."""

import copy

import pytest
import torch
from comparing import weights
from experts import batches, steps
from test_experts_ranks import EPS, ON_FOUR, PLACEMENTS, PRECISIONS, apart, sgd
from torch import nn

from booster import Booster
from booster.nn import StackedExperts, stack_experts
from booster.plugin import SingleDevice, TorchFSDPPlugin

WIDTH, EXPERTS, TOP_K = 16, 8, 2


class Expert(nn.Module):
    """Gated, with a bias, and a norm of its own."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.0)
        self.w1, self.w3 = nn.Linear(WIDTH, 24, bias=False), nn.Linear(WIDTH, 24, bias=False)
        self.w2 = nn.Linear(24, WIDTH)

    def forward(self, x):
        x = self.norm(x)
        return self.drop(self.w2(torch.nn.functional.silu(self.w1(x)) * self.w3(x)))


class Moe(nn.Module):
    """As many are written: a loop over the experts that have tokens."""

    def __init__(self, chosen):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList([Expert() for _ in range(EXPERTS)])
        self.chosen = chosen

    def route(self, tokens):
        scores = self.gate(tokens).float().softmax(-1)
        # By place in a sample of five tokens, so that rounding changes no choice.
        places = torch.arange(5 * TOP_K, dtype=torch.int64).view(-1, TOP_K).repeat(len(tokens) // 5, 1)
        index = torch.tensor(self.chosen, dtype=torch.int64)[places * 3 % len(self.chosen)]
        return index, scores.gather(1, index).to(tokens.dtype)

    def forward(self, x):
        tokens = x.flatten(0, 1)
        index, scores = self.route(tokens)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(index == number)
            if len(token):
                out = out.index_add(0, token, expert(tokens[token]) * scores[token, place, None])
        return x + out.view_as(x)


def dealt(moe, x):
    tokens = x.flatten(0, 1)
    return x + moe.experts(tokens, *moe.route(tokens)).view_as(x)


PLAN = {"*.experts": dealt}


def network(chosen=range(EXPERTS)):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Moe(list(chosen)), Moe(list(chosen)), nn.Linear(WIDTH, WIDTH))


def made(plugin, precision="fp32", stacked=True, **options):
    model = network(**options)
    assert not stacked or stack_experts(model, PLAN) == ["1.experts", "2.experts"]
    booster = Booster("cpu", precision, plugin)
    return booster, *booster.boost(model, sgd(model.parameters(), 0.1), nn.MSELoss())[:3]


def results(plugin, precision="fp32", given=None, **options):
    parts = made(plugin, precision, **options)
    return *steps(parts, batches(3) if given is None else given), weights(parts[1])


def by_number(params):
    """Weights of stacked experts, by the names that they have in the list."""
    found = {}
    for name, value in params.items():
        holder, _, own = name.rpartition(".")
        parts = enumerate(value) if holder.endswith("experts") else ()
        found |= {f"{holder}.{number}.{own.replace('-', '.')}": part for number, part in parts} or {name: value}
    return found


@pytest.mark.parametrize("chosen", [range(EXPERTS), [1, 2]], ids=str)
def test_stacked_experts_compute_what_the_loop_over_them_does(chosen):
    alone = results(SingleDevice(), stacked=False, chosen=chosen)
    found = results(SingleDevice(), chosen=chosen)
    assert apart((*found[:3], by_number(found[3])), alone) < 16 * EPS["fp32"]


def compared(rank, world_size, names, precision, options):
    alone = results(SingleDevice(), PRECISIONS[precision](), **options)
    plugins = ON_FOUR if world_size == 4 else PLACEMENTS
    return {name: apart(results(plugins[name](), PRECISIONS[precision](), **options), alone) for name in names}


SLOW = pytest.mark.slow


@pytest.mark.parametrize("precision", ["fp32", *(pytest.param(name, marks=SLOW) for name in EPS if name != "fp32")])
def test_they_train_as_on_one_device(ranks2, precision):
    for found in ranks2(compared, list(PLACEMENTS), precision, {}):
        assert max(found.values()) < 16 * EPS[precision], found


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [range(EXPERTS), [7], range(4)], ids=str)
def test_they_do_on_four_ranks_also_where_ranks_have_no_tokens(ranks4, chosen):
    for found in ranks4(compared, list(ON_FOUR), "fp32", {"chosen": chosen}):
        assert max(found.values()) < 16 * EPS["fp32"], found


def written(rank, world_size, folder):
    parts = made(TorchFSDPPlugin(ep_size=world_size))
    steps(parts, batches(2))
    parts[0].save(f"{folder}/run", *parts[1:3])
    parts[0].save_model(parts[1], f"{folder}/model.safetensors")
    sent = {name: value.clone() for name, value in parts[0].sync_weights(parts[1])}
    return weights(parts[1]), sent, steps(parts, batches(2, seed=2))[0]


def read(rank, world_size, folder, ep_size):
    plugin = SingleDevice() if world_size == 1 else TorchFSDPPlugin(ep_size=ep_size)
    there = made(plugin)
    there[0].load_model(there[1], f"{folder}/model.safetensors")
    loaded = weights(there[1])
    there[0].load(f"{folder}/run", *there[1:3])
    return loaded, weights(there[1]), steps(there, batches(2, seed=2))[0]


@pytest.mark.parametrize("layouts", ["some", pytest.param("all", marks=SLOW)])
def test_files_have_the_names_of_the_list_and_load_into_any_number_of_ranks(ranks2, request, tmp_path, layouts):
    ranks4 = request.getfixturevalue("ranks4") if layouts == "all" else None
    params, sent, losses = ranks2(written, str(tmp_path))[0]
    single = by_number(params)
    assert {name: value.shape for name, value in sent.items()} == {name: value.shape for name, value in single.items()}
    plain = network()
    plain.load_state_dict(sent)
    there = made(SingleDevice(), stacked=False)
    there[0].load_model(there[1], str(tmp_path / "model.safetensors"))
    for name, value in there[1].named_parameters():
        assert torch.equal(value, single[name]), name
    runs = [ranks2(read, str(tmp_path), 2), [read(0, 1, str(tmp_path), 1)]]
    if layouts == "all":
        runs += [ranks2(read, str(tmp_path), 1), ranks4(read, str(tmp_path), 2), ranks4(read, str(tmp_path), 4)]
    for again in runs:
        for loaded, resumed, found in again:
            assert all(
                torch.equal(loaded[name], value) and torch.equal(resumed[name], value) for name, value in params.items()
            )
            assert found == pytest.approx(losses, rel=1e-6)


def test_a_file_that_lacks_an_expert_is_refused_by_name(tmp_path):
    state = network().state_dict()
    del state["1.experts.3.w1.weight"]
    torch.save(state, tmp_path / "weights.pt")
    booster, model, *_ = made(SingleDevice())
    with pytest.raises(RuntimeError, match=r"1\.experts\.3\.w1\.weight are not in the file"):
        booster.load_model(model, str(tmp_path / "weights.pt"))


def wide(expert):
    expert.w1 = nn.Linear(WIDTH, 30, bias=False)


MISFITS = {
    "differs from expert 0 in 'w1.weight'": lambda experts: wide(experts[3]),
    "has buffers, \\['count'\\]": lambda experts: experts[2].register_buffer("count", torch.zeros(1)),
    "share parameters": lambda experts: setattr(experts[1], "w1", experts[0].w1),
    "differs from expert 0 in 'module drop'": lambda experts: setattr(experts[5].drop, "p", 0.5),
    "differs from expert 0 in 'module'": lambda experts: setattr(experts[5], "scale", 2.0),
    "trained: False": lambda experts: experts[4].w2.bias.requires_grad_(False),
    "two or more": lambda experts: [experts.pop(0) for _ in range(7)],
}


@pytest.mark.parametrize("error", MISFITS)
def test_experts_that_cannot_be_stacked_are_refused_with_nothing_changed(error):
    model = network()
    MISFITS[error](model[2].experts)
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match=error):
        stack_experts(model, PLAN)
    assert str(model) == str(before)
    assert "forward" not in vars(model[1])


def test_ties_with_the_rest_and_plans_that_find_nothing_are_refused():
    model = network()
    model[3].weight = model[1].experts[0].w2.weight = nn.Parameter(torch.zeros(WIDTH, 24))
    with pytest.raises(ValueError, match="'3.weight' is a parameter of an expert"):
        stack_experts(model, PLAN)
    with pytest.raises(ValueError, match="no ModuleList of Sequential is called so"):
        stack_experts(model, {"*.expert": dealt})


class Pair(nn.Linear):
    def forward(self, x):
        return super().forward(x), None


def test_what_experts_must_return():
    experts = StackedExperts(Pair(WIDTH, WIDTH) for _ in range(2))
    with pytest.raises(ValueError, match="must return a tensor of a row for each; it returned tuple"):
        experts(torch.ones(3, WIDTH), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))


def test_copies_and_modes_reach_the_experts():
    model = network()
    for each in (*model[1].experts, *model[2].experts):
        each.drop.p = 0.5
    stack_experts(model, PLAN)
    model = copy.deepcopy(model)
    x = batches(1)[0][0]
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))
    with torch.no_grad():
        model[1].experts.get_parameter("w2-weight").zero_()
    assert torch.isfinite(model(x)).all()
