"""What crosses between pipeline stages is known before anything is computed, and what cannot work raises then."""

import pytest
import torch
from torch import nn

from booster.plugin.pipeline import PipelinePlan
from booster.plugin.pipeline.shape_inference import infer_shapes

DIM = 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x, *others):
        return x + self.linear(x)


class Model(nn.Module):
    """`use` says what the forward does besides running its blocks."""

    def __init__(self, use=None):
        super().__init__()
        self.use = use
        self.stem = nn.Linear(DIM, DIM)
        self.token = nn.Parameter(torch.zeros(DIM))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.late = nn.Linear(DIM, DIM)
        self.norm = nn.BatchNorm1d(DIM)
        self.dropout = nn.Dropout()

    def forward(self, x):
        use = self.use
        first = x = self.stem(x)
        if use == "late module early":
            x = self.late(x)
        mask = torch.ones(len(x), 1)
        if use == "value":
            mask = mask * (2 if x.sum() > 0 else 1)
        if use == "write":
            written = torch.zeros(len(x), DIM)
            written[:, :2] = x[:, :2]
            x = written
        if use == "random":
            mask = mask * torch.rand(1)
        if use == "values known":
            mask = mask * (2 if mask.sum() > 0 else 1)
        blocks = list(self.blocks)
        if use == "order":
            blocks = blocks[::-1]
        if use == "twice":
            blocks = [*blocks, blocks[-1]]
        if use == "skipped":
            blocks = blocks[:2]
        for block in blocks:
            x = block(x, first) if use == "passed on" else block(x, mask) if use != "keyword" else block(x=x)
        if use == "first value":
            x = x + first
        if use == "token":
            x = x + self.token[None]
        if use == "skipped":
            return x
        if use == "output":
            return x, first
        if use == "value at the end" and x.sum() > 0:
            return x
        return self.dropout(self.norm(self.late(x)))


class Extra(nn.Module):
    """Two layers in parallel."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, x):
        return self.layers[0](x) + self.layers[1](x)


def route(model, *args, num_stages=2, **options):
    plan = PipelinePlan(model, pp_size=num_stages, **options)
    return infer_shapes(plan.meta_model, plan.split, args or (torch.ones(3, DIM),), {})


def crossing(found):
    return [[(spec.shape, spec.dtype, spec.requires_grad) for spec in b.specs] for b in found.boundaries]


@pytest.mark.parametrize("use", [None, "keyword", "random", "values known", "value at the end"])
def test_what_depends_on_parameters_crosses_and_nothing_else(use):
    assert crossing(route(Model(use), num_stages=4)) == [[((3, DIM), torch.float32, True)]] * 3


def test_every_argument_of_blocks_that_depends_on_parameters_crosses():
    found = route(Model("passed on"), num_stages=3)
    assert crossing(found) == [[((3, DIM), torch.float32, True)] * 2] * 2
    assert [boundary.relays for boundary in found.boundaries] == [(None, None), (None, 1)]


def test_it_is_found_under_the_precision_and_grad_mode_at_hand():
    with torch.autocast("cpu", torch.bfloat16):
        assert crossing(route(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))))) == [
            [((3, 4), torch.bfloat16, True)]
        ]
    half = route(Model(), torch.ones(3, DIM, dtype=torch.float16), prepare=lambda copy: copy.half())
    assert crossing(half) == [[((3, DIM), torch.float16, True)]]
    with torch.no_grad():
        assert crossing(route(Model())) == [[((3, DIM), torch.float32, False)]]


def test_nothing_of_the_model_is_touched():
    model = Model("random")
    model.stem.register_forward_hook(lambda module, args, output: output.item())  # fails on what has no values
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = torch.get_rng_state()
    route(model)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_model_may_be_planned_on_the_meta_device_or_for_another_one():
    with torch.device("meta"):
        model = Model()
    assert crossing(route(model, device=torch.device("cpu"))) == [[((3, DIM), torch.float32, True)]]


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (
            "first value",
            r"stage 1 of the pipeline uses (blocks.1|stem.bias, stem.weight), or what was computed from it",
        ),
        ("token", "stage 1 of the pipeline uses token, or"),
        ("output", "stage 1 of the pipeline uses .*stem"),
        (
            "late module early",
            r"stage 0 of the pipeline uses late.bias, late.weight, .*register what is needed before the blocks",
        ),
        ("value", "reads values of activations in Python"),
        ("write", "__setitem__ writes what depends on parameters into a tensor that was made without any, of shape"),
        ("order", "blocks.3 is called before blocks.2"),
        ("twice", "blocks.3 is called twice in one forward"),
        ("skipped", "returned without calling blocks.2, which begins stage 1"),
    ],
)
def test_a_forward_that_stages_cannot_run_raises_and_says_what_it_used(use, message):
    with pytest.raises(RuntimeError, match=message):
        route(Model(use))


def test_a_stage_that_begins_where_nothing_comes_in_raises():
    with pytest.raises(RuntimeError, match="layers.1 gets no tensor that depends on what comes before"):
        route(Extra())
