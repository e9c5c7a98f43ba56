"""`Booster.switch`: a run goes over to another precision as if it had been saved, built anew in it, and loaded."""

import logging
import re
from pathlib import Path

import pytest
import torch
from switching import PRECISIONS, Job, Net, compared, differences
from torch import nn

from booster import Booster
from booster.memory.measured_memory import StorageTracker
from booster.mixed_precision import (
    BF16MixedPrecision,
    FP16ApexMixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
    MixedPrecision,
    NVFP4MixedPrecision,
)
from booster.plugin import Plugin


@pytest.fixture(autouse=True)
def _no_warnings_of_rehearsals():
    before = logging.getLogger("booster").level
    logging.getLogger("booster").setLevel(logging.ERROR)
    yield
    logging.getLogger("booster").setLevel(before)


@pytest.mark.slow_cases("int8-nvfp4", "fp8-mxfp8")
@pytest.mark.crossed
@pytest.mark.parametrize("new", PRECISIONS)
@pytest.mark.parametrize("old", PRECISIONS)
def test_a_switch_is_a_load_into_the_other_precision(old, new, tmp_path):
    job = Job(old)
    job.steps(0, 3)
    assert compared(job, tmp_path, new) == []


OTHERS = {
    "momentum": {"make": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9)},
    "torch's loop": {"make": lambda params, lr: torch.optim.AdamW(params, lr=lr, foreach=False)},
    "whole tensors": {"make": torch.optim.Adafactor},
    "not fused": {"fused_optimizer": False},
    "clipped": {"clip_grad_norm": 0.5},
    "8 bit": {"states": "8bit"},
    "released": {"release_gradients": "exact"},
    "offloaded": {"offload_states": True},
}


@pytest.mark.slow_cases("momentum", "offloaded")
@pytest.mark.crossed
@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize(("old", "new"), [("fp16", "bf16_naive"), ("fp16_naive", "fp32"), ("bf16_naive", "fp16_naive")])
def test_it_is_one_with_other_optimizers_and_options_too(old, new, options, tmp_path):
    job = Job(old, **options)
    job.steps(0, 3)
    assert compared(job, tmp_path, new, **options) == []


def test_there_and_back_nothing_is_lost():
    job, straight = Job("fp32"), Job("fp32")
    for each in (job, straight):
        torch.manual_seed(0)
        each.steps(0, 3)
    for each in ("bf16_naive", "nvfp4", "fp16_naive", "fp32"):
        job.booster.switch(PRECISIONS[each]())
    assert torch.equal(dict(job.model.named_buffers())["blocks.0.frequencies"], torch.linspace(0, 1, 64) / 3)
    for one, two in zip(job.model.parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(one, two)
    assert differences(dict(job.optimizer.state_dict()["state"]), dict(straight.optimizer.state_dict()["state"])) == []


def test_parameters_layers_and_hooks_of_the_user_are_the_same_objects():
    job = Job("fp32")
    params, called = list(job.model.parameters()), []
    job.model.blocks[0].up.register_forward_hook(lambda *_: called.append("hook"))
    for each in ("mxfp8", "bf16_naive", "fp32"):
        job.booster.switch(PRECISIONS[each]())
        assert all(one is two for one, two in zip(job.model.parameters(), params, strict=True))
        job.steps(0, 1)
    assert called == ["hook"] * 3
    assert type(job.model.blocks[0].up) is nn.Linear


def test_a_loss_scale_goes_on_where_there_is_one_of_its_kind():
    job = Job(FP16TorchMixedPrecision(init_scale=2.0**12))
    job.steps(0, 2)
    job.booster.switch(FP16NaiveMixedPrecision())
    assert job.optimizer.loss_scale == 2.0**12
    job.booster.switch("bf16")
    assert job.optimizer.loss_scale == 1.0
    job.booster.switch("fp16")
    assert job.optimizer.loss_scale == 2.0**16
    assert job.optimizer.num_applied == 2


def test_all_models_of_a_booster_go_over():
    booster, jobs = Booster("cpu", "fp32"), []
    for _ in range(2):
        model = Net()
        jobs.append(booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    booster.switch("bf16_naive")
    assert {param.dtype for model, *_ in jobs for param in model.out.parameters()} == {torch.bfloat16}
    assert "BF16Naive" in repr(booster.precision)


def test_what_the_checkpoint_says_of_the_run_is_the_precision_of_now(tmp_path):
    job = Job("fp32")
    job.booster.switch("bf16")
    job.booster.save(tmp_path, *job.parts)
    assert "BF16MixedPrecision" in next(tmp_path.rglob("state.json")).read_text()


@pytest.mark.parametrize(("old", "new"), [("fp32", "bf16_naive"), ("bf16_naive", "fp32"), ("bf16_naive", "fp16_naive")])
def test_states_and_masters_are_at_no_time_there_twice(old, new):
    """AdamW's states are 8 bytes a parameter. A bucket is an eighth of the parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(512, 512) for _ in range(8))
    )  # so many that a bucket is not the least that is worth a call
    optimizer = torch.optim.AdamW(model.parameters())
    size = sum(param.numel() for param in model.parameters())
    booster = Booster("cpu", old)
    model, optimizer, *_ = booster.boost(model, optimizer)
    booster.backward(model(torch.randn(4, 512)).square().mean(), optimizer)
    optimizer.step()
    optimizer.zero_grad()
    known = [*model.parameters(), *optimizer._update.optimizer_state.master_tensors()]
    known += [
        each for own in optimizer.optimizer.state.values() for each in own.values() if isinstance(each, torch.Tensor)
    ]
    tracker = Held(known)
    del known  # which would keep what the move lets go
    before = tracker.now
    with tracker:
        booster.switch(new)
    # The weights in both dtypes, a bucket in both places, and its scratch.
    assert (tracker.highest - before) / size < 5.0, (
        f"{before / size:.2f} before, {tracker.highest / size:.2f} at the highest"
    )
    documented = {
        ("fp32", "bf16_naive"): (12.0, 16.3),
        ("bf16_naive", "fp32"): (12.0, 15.3),
    }  # by docs/guides/switch.md
    if (old, new) in documented:
        page = re.sub(r"\s+", " ", (Path(__file__).parents[2] / "docs/guides/switch.md").read_text())
        assert "rises from 12.0 to 16.3 bytes a parameter during the move; back, from 12.0 to 15.3 (8 layers" in page
        assert (before / size, tracker.highest / size) == pytest.approx(documented[old, new], abs=0.05)


class Held(StorageTracker):
    """Counts what was there before, too."""

    def __init__(self, known):
        super().__init__()
        for tensor in known:
            self._track(tensor, counts=True)

    def _track(self, tensor, *, counts):
        super()._track(tensor, counts=counts and not tensor.is_meta)


@pytest.mark.parametrize("new", ["bf16_naive", "fp8"])
def test_what_is_made_where_nothing_can_be_trained_is_trained_all_the_same(new):
    job = Job("bf16")
    job.steps(0, 1)
    with torch.inference_mode():
        job.booster.switch(PRECISIONS[new]())
        assert torch.is_inference_mode_enabled()
    job.steps(1, 2)


class Headed(nn.Module):
    def __init__(self, trunk):
        super().__init__()
        self.trunk, self.head = trunk, nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4))

    def forward(self, x):
        return self.head(torch.tanh(self.trunk(x)))


class Shared:
    """Two models with one trunk, which the optimizer of the model number `owner` steps."""

    def __init__(self, precision, owner):
        torch.manual_seed(0)
        trunk = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64))
        self.booster, self.models, self.optimizers = Booster("cpu", PRECISIONS[precision]()), [], []
        for model in (models := [Headed(trunk), Headed(trunk)]):
            params = model.parameters() if model is models[owner] else model.head.parameters()
            model, optimizer, *_ = self.booster.boost(model, torch.optim.AdamW(params, lr=1e-2))
            self.models.append(model)
            self.optimizers.append(optimizer)

    def steps(self, first, last):
        for number in range(first, last):
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(number))
            for model, optimizer in zip(self.models, self.optimizers, strict=True):
                self.booster.backward(model(x).square().mean(), optimizer)
                optimizer.step()
            for optimizer in self.optimizers:
                optimizer.zero_grad()

    def state(self):
        return [each.state_dict() for each in (*self.models, *self.optimizers)]


@pytest.mark.crossed
@pytest.mark.parametrize("owner", [0, 1])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("fp32", "bf16_naive"),
        ("bf16_naive", "fp32"),
        ("bf16_naive", "fp16_naive"),
        ("fp32", "fp8"),
        ("fp8", "bf16_naive"),
    ],
)
def test_models_that_share_a_trunk_go_over_as_one_loads_them(old, new, owner, tmp_path):
    job, loaded = Shared(old, owner), Shared(new, owner)
    job.steps(0, 3)
    job.booster.save(tmp_path, job.models, job.optimizers)
    loaded.booster.load(tmp_path, loaded.models, loaded.optimizers)
    job.booster.switch(PRECISIONS[new]())
    assert differences(job.state(), loaded.state()) == []
    for each in (job, loaded):
        each.steps(3, 5)
    assert differences(job.state(), loaded.state()) == []
    assert job.models[0].trunk[2].weight is job.models[1].trunk[2].weight


# ---------------------------------------------------------------------- refused


def unchanged(job, action, error, match):
    """`action` raises, and the run goes on as if nothing had asked."""
    before, precision = job.state(), job.booster.precision
    layers = list(job.model.modules())
    with pytest.raises(error, match=match):
        action()
    assert differences(job.state(), before) == []
    assert job.booster.precision is precision
    assert all(one is two for one, two in zip(job.model.modules(), layers, strict=True))


class Own(MixedPrecision):
    def convert(self, model):
        return model


REFUSED = {
    "levels of apex": (FP16ApexMixedPrecision("O2"), ValueError, "because the levels of apex"),
    "half weights given": ("fp99", ValueError, "mixed_precision='fp99' is unknown"),
    "a convert alone": (Own(), ValueError, "has no revert"),
    "a pattern of nothing": (BF16MixedPrecision(keep_fp32="nothing"), ValueError, "selects no module"),
    "nothing to convert": (NVFP4MixedPrecision(emulate=True, keep=nn.Linear), ValueError, "finds no linear layer"),
    "pins of the run": (FP16TorchMixedPrecision(keep_fp32="auto"), ValueError, "keep_fp32='auto'"),
}


@pytest.mark.crossed
@pytest.mark.parametrize("old", ["fp16", "fp16_naive"])
@pytest.mark.parametrize(("new", "error", "match"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_gone_over_to_is_refused_and_nothing_changes(old, new, error, match):
    job, other = Job(old), Job(old)
    for each in (job, other):
        torch.manual_seed(1)
        each.steps(0, 2)
    unchanged(job, lambda: job.booster.switch(new), error, match)
    torch.manual_seed(2)
    losses = job.steps(2, 4)
    torch.manual_seed(2)
    assert losses == other.steps(2, 4)


def test_between_backward_and_step_it_is_refused():
    job = Job("fp16")
    job.booster.backward(job.criterion(job.model(torch.randn(8, 32)), torch.zeros(8, dtype=torch.long)), job.optimizer)
    unchanged(job, lambda: job.booster.switch("bf16"), RuntimeError, "between backward and step")


def test_inside_a_group_of_micro_batches_it_is_refused():
    job = Job("fp16")
    with job.booster.accumulate(job.model, job.optimizer, 2):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="inside accumulate"):
                job.booster.switch("bf16")
            loss = job.criterion(job.model(torch.randn(8, 32)), torch.zeros(8, dtype=torch.long))
            job.booster.backward(loss, job.optimizer)
    job.optimizer.step()
    job.booster.switch("bf16")


def test_a_compiled_model_is_refused():
    job = Job("bf16")
    job.model.blocks[0].compile(backend="eager")
    unchanged(job, lambda: job.booster.switch("fp32"), RuntimeError, "was compiled")


def test_from_the_levels_of_apex_it_is_refused():
    booster, model = Booster("cpu", FP16ApexMixedPrecision("O2", verbosity=0)), Net()
    model, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="because the levels of apex"):
        booster.switch("fp32")


def test_a_model_that_was_built_in_half_goes_between_half_precisions_alone():
    model = Net(nn.LayerNorm).to(torch.bfloat16)
    booster = Booster("cpu", "bf16_naive")
    model, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"half precision"):
        booster.switch("fp32")
    booster.switch("fp16_naive")
    assert model.out.weight.dtype == torch.float16


class Elsewhere(Plugin):
    def place(self, module, policy, device):
        return module


def test_a_plugin_that_does_not_say_how_is_refused():
    job = Job("fp32", Elsewhere())
    unchanged(job, lambda: job.booster.switch("bf16"), RuntimeError, "Elsewhere does not say how")
