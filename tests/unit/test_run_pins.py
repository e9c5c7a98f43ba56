"""`keep_fp32="auto"`: a module that overflows again and again computes in float32 from then on."""

import logging

import pytest
import torch
from torch import nn

from booster import Booster
from booster.checkpoint import CheckpointError
from booster.interface.model import extras_of
from booster.mixed_precision import (
    BF16MixedPrecision,
    BF16NaiveMixedPrecision,
    FP8MixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
    KeptModules,
)
from booster.mixed_precision.keep_fp32 import SKIPS, WINDOW, RunPins
from booster.numerics import Diagnosis
from booster.numerics.diagnosis.skips import blamed_module
from booster.plugin import Plugin

torch.manual_seed(0)
X, Y = torch.randn(16, 8), torch.randint(0, 4, (16,))


class Block(nn.Module):
    """Its own product, that `factor` lets overflow float16, and no module inside is to blame."""

    def __init__(self):
        super().__init__()
        self.inner, self.mix, self.factor = nn.Linear(8, 8), nn.Parameter(torch.eye(8)), 1.0

    def forward(self, x):
        return x + torch.matmul(self.inner(x), self.mix) * self.factor / self.factor


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Run:
    def __init__(self, keep_fp32="auto", wrap=lambda model: model, **options):
        torch.manual_seed(1)
        self.raw = Model()
        self.booster = Booster("cpu", FP16TorchMixedPrecision(init_scale=128.0, keep_fp32=keep_fp32), **options)
        optimizer = torch.optim.SGD(self.raw.parameters(), lr=0.1, momentum=0.9)
        self.model, self.optimizer, self.criterion, *_ = self.booster.boost(
            wrap(self.raw), optimizer, nn.CrossEntropyLoss()
        )

    def steps(self, count):
        applied = []
        for _ in range(count):
            self.booster.backward(self.criterion(self.model(X), Y), self.optimizer)
            applied.append(self.optimizer.step().applied)
            self.optimizer.zero_grad()
        return applied

    def overflow(self, *places):
        for place in places:
            self.raw.blocks[place].factor = 1e6

    @property
    def pinned(self):
        return extras_of(self.model).pins.names


def test_a_module_that_overflows_twice_is_pinned_with_a_warning_and_training_goes_on(caplog):
    run = Run()
    assert run.steps(2) == [True, True]
    run.overflow(1)
    with caplog.at_level(logging.WARNING, "booster.numerics"):
        assert run.steps(4) == [False, False, True, True]
    assert run.pinned == ["blocks.1"]
    (said,) = [record.message for record in caplog.records if "from now on" in record.message]
    assert "blocks.1 computes in float32 from now on (keep_fp32='auto'): 2 skipped steps within 100" in said
    assert "keep_fp32=['blocks.1', 'auto']" in said
    assert [found.module for found in run.booster.diagnoses] == ["blocks.1", "blocks.1"]


def test_modules_that_overflow_together_are_pinned_one_after_the_other():
    run = Run()
    run.overflow(0, 2)
    assert run.steps(6) == [False, False, False, False, True, True]
    assert run.pinned == ["blocks.0", "blocks.2"]


def test_a_pinned_run_is_that_of_a_run_with_these_pins_from_the_start():
    found, given = Run(), Run(keep_fp32="blocks.1")
    for run in (found, given):
        run.overflow(1)
    assert found.steps(4) == [False, False, True, True]
    given.optimizer._update.gradients.scaler.load_state_dict(
        {**given.optimizer._update.gradients.scaler.state_dict(), "scale": 32.0}
    )
    given.steps(2)
    assert all(torch.equal(a, b) for a, b in zip(found.raw.parameters(), given.raw.parameters(), strict=True))


def test_others_may_be_kept_from_the_start_beside_auto():
    run = Run(keep_fp32=["head", "auto"])
    run.overflow(1)
    run.steps(3)
    assert run.pinned == ["blocks.1"]
    assert type(run.raw.head.forward).__name__ == "Float32Forward"


def test_a_loss_scale_that_is_too_large_pins_nothing():
    run = Run()
    run.optimizer._update.gradients.scaler.load_state_dict(
        {**run.optimizer._update.gradients.scaler.state_dict(), "scale": 2.0**28}
    )
    applied = run.steps(30)
    assert applied.count(False) >= 2
    assert applied[-1]
    assert run.pinned == []
    assert {found.kind for found in run.booster.diagnoses} == {"loss_scale"}


def test_bad_data_pins_nothing():
    run = Run()
    bad = X.clone()
    bad[3, 2] = float("nan")
    for _ in range(3):
        run.booster.backward(run.criterion(run.model(bad), Y), run.optimizer)
        assert not run.optimizer.step().applied
        run.optimizer.zero_grad()
    assert run.pinned == []


def test_a_model_that_is_compiled_is_pinned_too():
    run = Run(wrap=lambda model: torch.compile(model, backend="eager"))
    run.overflow(1)
    assert run.steps(3) == [False, False, True]
    assert run.pinned == ["blocks.1"]


# ---- what counts ----


def diagnosis(kind, module="a.b", modules=("Model", "a", "a.b"), remedies=()):
    return Diagnosis(kind=kind, module=module, modules=modules, remedies=remedies)


@pytest.mark.parametrize(
    ("found", "name"),
    [
        (diagnosis("overflow"), "a.b"),
        (diagnosis("overflow", remedies=("finite with keep_fp32='a'",)), "a"),
        (diagnosis("operation", remedies=("finite with keep_fp32='a.b'",)), "a.b"),
        (diagnosis("operation"), ""),
        (diagnosis("loss_scale", remedies=("finite at scale 2**3", "finite with keep_fp32='a.b'")), ""),
        (diagnosis("data"), ""),
        (diagnosis("weights"), ""),
        (diagnosis(None), ""),
    ],
)
def test_the_culprit_is_the_module_that_float32_helps(found, name):
    assert blamed_module(found) == name


def test_skips_count_within_the_window_and_by_module():
    pins = RunPins(Model(), "cpu")
    assert SKIPS == 2
    assert not pins.count_skip("blocks.0", 1)
    assert not pins.count_skip("blocks.1", 2)
    assert not pins.count_skip("blocks.0", 1 + WINDOW)
    assert pins.count_skip("blocks.0", 2 * WINDOW)
    assert pins.names == ["blocks.0"]


def test_what_is_pinned_or_no_module_of_the_model_does_not_count():
    model = Model()
    pins = RunPins(model, "cpu")
    for name in ("", "Model", "criterion", "nothing"):
        assert not pins.count_skip(name, 1)
        assert not pins.count_skip(name, 2)
    pins.count_skip("blocks.0", 1), pins.count_skip("blocks.0", 2)
    assert not pins.count_skip("blocks.0.inner", 3)
    assert not pins.count_skip("blocks.0.inner", 4)
    assert pins.names == ["blocks.0"]


def test_a_state_without_a_pin_takes_it_back():
    model = Model()
    own = model.blocks[1].forward = lambda x: x
    pins = RunPins(model, "cpu")
    pins.load_state_dict({"names": ["blocks.0", "blocks.1"], "skips": {"head": [3]}})
    assert pins.count_skip("head", 4)
    assert pins.state_dict() == {"names": ["blocks.0", "blocks.1", "head"], "skips": {}}
    pins.load_state_dict({})
    assert "forward" not in model.blocks[0].__dict__
    assert model.blocks[1].forward is own
    assert pins.names == []


# ---- checkpoints ----


def test_a_checkpoint_keeps_the_pins_and_the_run_goes_on_to_the_bit(tmp_path):
    whole = Run()
    whole.overflow(1)
    whole.steps(1)
    whole.booster.save(tmp_path / "one", whole.model, whole.optimizer)
    whole.steps(2)
    whole.booster.save(tmp_path / "three", whole.model, whole.optimizer)
    assert whole.steps(3) == [True] * 3
    for folder, left in (("one", 5), ("three", 3)):
        again = Run()
        again.overflow(1)
        again.booster.load(tmp_path / folder, again.model, again.optimizer)
        assert again.pinned == (["blocks.1"] if folder == "three" else [])
        again.steps(left)
        assert again.pinned == ["blocks.1"]
        assert all(torch.equal(a, b) for a, b in zip(whole.raw.parameters(), again.raw.parameters(), strict=True)), (
            folder
        )
    again.booster.load(tmp_path / "one", again.model, again.optimizer)
    assert again.pinned == []


def test_a_job_that_pins_nothing_is_told_of_the_pins_of_a_checkpoint(tmp_path, caplog):
    run = Run()
    run.overflow(1)
    run.steps(2)
    run.booster.save(tmp_path, run.model, run.optimizer)
    other = Run(keep_fp32=())
    with caplog.at_level(logging.WARNING):
        other.booster.load(tmp_path, other.model, other.optimizer)
    assert "modules ['blocks.1'] were pinned to float32 in the run that was saved, and are not here" in caplog.text


def test_a_checkpoint_with_pins_of_another_model_is_refused(tmp_path):
    run, other = Run(), Run()
    run.raw.softmax = nn.Identity()
    extras_of(run.model).pins.load_state_dict({"names": ["softmax"]})
    run.booster.save(tmp_path, run.model, run.optimizer)
    with pytest.raises(
        CheckpointError, match=r"models '0': it has no modules \['softmax'\], which were pinned to float32"
    ):
        other.booster.load(tmp_path, other.model, other.optimizer)


# ---- where it cannot be ----


@pytest.mark.parametrize(
    "make",
    [
        lambda: BF16MixedPrecision(keep_fp32="auto"),
        lambda: FP16NaiveMixedPrecision(keep_fp32="auto"),
        lambda: BF16NaiveMixedPrecision(keep_fp32=["auto"]),
        lambda: FP8MixedPrecision(emulate=True, keep_fp32="auto"),
        lambda: FP8MixedPrecision(emulate=True, keep="auto"),
        lambda: KeptModules(Model(), "auto"),
    ],
)
def test_where_nothing_can_be_pinned_during_the_run_it_is_refused(make):
    with pytest.raises(ValueError, match=r"='auto' is for 'fp16' alone.*auto_pins"):
        make()


class Divides(Plugin):
    is_whole = False

    def place(self, module, policy, device):
        return module


def test_plugins_that_divide_models_are_refused():
    with pytest.raises(
        ValueError, match="keep_fp32='auto' needs models that are whole on every rank, and Divides divides"
    ):
        Booster("cpu", FP16TorchMixedPrecision(keep_fp32="auto"), Divides())


def test_fewer_diagnoses_than_all_are_refused():
    with pytest.raises(ValueError, match="diagnose='first' is not legal with keep_fp32='auto'"):
        Run(diagnose="first")
    assert Run(diagnose="every").steps(1) == [True]


def test_two_models_of_one_class_in_one_booster_are_refused():
    run = Run()
    with pytest.raises(ValueError, match="use a Booster for each"):
        run.booster.boost(Model())
