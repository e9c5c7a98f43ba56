"""`Booster.from_config`: the dicts of the older interface mean what their documentation says."""

import copy

import pytest
import torch
from torch import nn

import booster
from booster import AMP_TYPE, Booster
from booster.facade.foreign_names import translate
from booster.loss_scaler import DynamicScale
from booster.mixed_precision import FP32, FP16ApexMixedPrecision, FP16NaiveMixedPrecision, FP16TorchMixedPrecision
from booster.plugin import SingleDevice, TorchDDPPlugin

NAIVE_DEFAULTS = {
    "scale": 2.0**32,
    "min_scale": 1.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 1000,
    "hysteresis": 2,
    "max_scale": 2.0**32,
}
TORCH_DEFAULTS = {
    "scale": 2.0**16,
    "min_scale": None,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "hysteresis": 1,
    "max_scale": None,
}


def scaler_fields(fp16):
    scaler = translate(fp16)[0].make_scaler()
    assert isinstance(scaler, DynamicScale)
    return {name: getattr(scaler, name) for name in NAIVE_DEFAULTS}


def trained(booster_, *, steps=1, scale_loss=1.0):
    """A boosted net after `steps` steps of SGD at lr 1, the result of the last, and the weights before."""
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    before = copy.deepcopy(net.state_dict())
    model, optimizer, *_ = booster_.boost(net, torch.optim.SGD(net.parameters(), lr=1.0))
    x = torch.randn(8, 4)
    for _ in range(steps):
        optimizer.zero_grad()
        booster_.backward(model(x).pow(2).mean() * scale_loss, optimizer)
        result = optimizer.step()
    return net, result, before


def moved(net, before):
    return float(torch.stack([(p.detach().float() - before[n]).norm() for n, p in net.named_parameters()]).norm())


# ---- modes ----


@pytest.mark.parametrize(
    ("mode", "strategy"),
    [
        (AMP_TYPE.TORCH, FP16TorchMixedPrecision),
        ("torch", FP16TorchMixedPrecision),
        (AMP_TYPE.NAIVE, FP16NaiveMixedPrecision),
        ("naive", FP16NaiveMixedPrecision),
        (AMP_TYPE.PARALLEL, FP16NaiveMixedPrecision),
        ("parallel", FP16NaiveMixedPrecision),
    ],
)
def test_a_mode_is_an_amp_type_or_its_string(mode, strategy):
    assert type(Booster.from_config(fp16={"mode": mode}, device="cpu").precision) is strategy


def test_parallel_is_the_older_name_of_naive():
    assert AMP_TYPE.PARALLEL is AMP_TYPE.NAIVE
    assert AMP_TYPE("parallel") is AMP_TYPE.NAIVE
    assert booster.AMP_TYPE is AMP_TYPE


@pytest.mark.parametrize("fp16", [None, {}, {"mode": "torch", "enabled": False}, {"mode": "naive", "enabled": False}])
def test_no_dict_or_a_disabled_one_means_float32(fp16):
    assert type(Booster.from_config(fp16=fp16, device="cpu").precision) is FP32


def test_a_disabled_apex_dict_means_float32_too():
    assert type(translate({"mode": AMP_TYPE.APEX, "opt_level": "O2", "enabled": False})[0]) is FP32


def test_enabled_true_changes_nothing():
    assert type(translate({"mode": "torch", "enabled": True})[0]) is FP16TorchMixedPrecision


def test_apex_fields_are_those_of_its_initialize_and_keep_its_defaults():
    precision = translate({"mode": AMP_TYPE.APEX, "verbosity": 0})[0]
    assert type(precision) is FP16ApexMixedPrecision
    assert (precision.options.opt_level, precision.options.loss_scale, len(precision.scales)) == ("O1", "dynamic", 1)
    fields = {"mode": "apex", "opt_level": "O2", "loss_scale": "128.0", "num_losses": 2, "keep_batchnorm_fp32": "False"}
    with_fields = Booster.from_config(fp16={**fields, "clip_grad_norm": 1.0}, device="cpu")
    options = with_fields.precision.options
    assert (options.opt_level, options.loss_scale, options.keep_batchnorm_fp32) == ("O2", 128.0, False)
    assert [with_fields.precision.scales[i].scale for i in range(2)] == [128.0, 128.0]


def test_apex_fields_include_those_that_its_initialize_lacks():
    scale = translate({"mode": "apex", "verbosity": 0, "scale_window": 1, "backend": "native"})[0].scales[0]
    scale.update(False)
    assert scale.scale == 2.0**17
    with pytest.raises(ValueError, match="backend='nvidia'"):
        translate({"mode": "apex", "backend": "nvidia"})


# ---- fields ----


@pytest.mark.parametrize(("mode", "defaults"), [("naive", NAIVE_DEFAULTS), ("torch", TORCH_DEFAULTS)])
def test_the_documented_defaults_of_a_mode(mode, defaults):
    assert scaler_fields({"mode": mode}) == defaults


@pytest.mark.parametrize("mode", ["naive", "torch"])
@pytest.mark.parametrize(
    ("field", "value"),
    [("growth_factor", 4.0), ("backoff_factor", 0.25), ("growth_interval", 7)],
)
def test_fields_that_both_modes_have_reach_the_loss_scale(mode, field, value):
    assert scaler_fields({"mode": mode, field: value})[field] == value


@pytest.mark.parametrize(("field", "value"), [("min_scale", 4.0), ("hysteresis", 5), ("max_scale", 2.0**33)])
def test_fields_of_the_naive_mode_reach_the_loss_scale(field, value):
    assert scaler_fields({"mode": "naive", field: value}) == {**NAIVE_DEFAULTS, field: value}


@pytest.mark.parametrize(("mode", "field"), [("naive", "initial_scale"), ("torch", "init_scale")])
def test_the_first_scale_has_a_name_of_its_own_in_each_mode(mode, field):
    assert scaler_fields({"mode": mode, field: 2.0**10})["scale"] == 2.0**10


def test_a_scale_that_is_not_dynamic_stays():
    scaler = translate({"mode": "naive", "initial_scale": 8.0, "dynamic_grad_scale": False})[0].make_scaler()
    for found_inf in [True, True, True] + [False] * 1000:
        scaler.update(found_inf)
    assert scaler.scale == 8.0


def test_zeros_in_gradients_are_counted_when_asked():
    counting = {"mode": "naive", "log_num_zeros_in_grad": True, "initial_scale": 8.0}
    silent = {"mode": "naive", "initial_scale": 8.0}
    _, result, _ = trained(Booster.from_config(fp16=counting, device="cpu"), scale_loss=0.0)
    assert result.num_zeros_in_grad == 10  # 4 x 2 weights and 2 biases
    _, result, _ = trained(Booster.from_config(fp16=silent, device="cpu"), scale_loss=0.0)
    assert result.num_zeros_in_grad is None


def test_verbose_is_accepted_and_logs_the_scale(caplog):
    caplog.set_level("INFO")
    fp16 = {"mode": "naive", "verbose": True, "initial_scale": 2.0**32, "hysteresis": 1}
    _, result, _ = trained(Booster.from_config(fp16=fp16, device="cpu"))
    assert not result.applied
    assert "loss scale" in caplog.text


@pytest.mark.parametrize(
    ("fp16", "nearest"),
    [
        ({"mode": "naive", "initial_scal": 8}, "initial_scale"),
        ({"mode": "naive", "hysteresys": 2}, "hysteresis"),
        ({"mode": "naive", "init_scale": 8}, "initial_scale"),
        ({"mode": "torch", "initial_scale": 8}, "init_scale"),
        ({"mode": "torch", "growth_intervall": 8}, "growth_interval"),
        ({"mode": "torch", "enable": True}, "enabled"),
        ({"mode": "apex", "opt_lvl": "O1"}, "opt_level"),
        ({"mode": "naive", "clip_grad_nrom": 1.0}, "clip_grad_norm"),
    ],
)
def test_an_unknown_field_raises_with_the_nearest_legal_one(fp16, nearest):
    with pytest.raises(ValueError, match=f"did you mean '{nearest}'"):
        translate(fp16)


@pytest.mark.parametrize(
    ("error", "says", "fp16"),
    [
        (ValueError, "did you mean 'init_scale'", {"mode": "torch", "enabled": False, "init_scal": 1}),
        (ValueError, "backoff_factor", {"mode": "naive", "backoff_factor": 2.0}),
        (TypeError, "enabled", {"mode": "torch", "enabled": 0}),
        (RuntimeError, "use master_weights with O1", {"mode": "apex", "opt_level": "O1", "master_weights": True}),
    ],
)
def test_an_illegal_field_raises_also_when_disabled_and_as_the_strategy_does(error, says, fp16):
    with pytest.raises(error, match=says):
        translate(fp16)


@pytest.mark.parametrize("mode", ["amp", None, "NAIVE", 3])
def test_an_unknown_mode_raises_with_the_legal_ones(mode):
    with pytest.raises(ValueError, match=r"'apex', 'torch', 'naive', 'parallel'"):
        translate({"mode": mode})


def test_a_missing_mode_raises_and_knows_a_typo_of_it():
    with pytest.raises(ValueError, match="no field 'mode'"):
        translate({"init_scale": 8})
    with pytest.raises(ValueError, match="is 'moed' meant to be it"):
        translate({"moed": "torch"})


def test_the_dict_itself_is_not_changed():
    fp16 = {"mode": AMP_TYPE.NAIVE, "clip_grad": 1.0, "enabled": True, "initial_scale": 4.0}
    before = dict(fp16)
    translate(fp16)
    assert fp16 == before


# ---- clipping ----

PRECISIONS = [None, {"mode": "torch"}, {"mode": "naive", "initial_scale": 2.0**10}]


@pytest.mark.parametrize("fp16", PRECISIONS, ids=["fp32", "torch", "naive"])
def test_step_clips_to_the_norm_in_every_mode(fp16):
    free, result, before = trained(Booster.from_config(fp16=fp16, device="cpu"))
    distance = moved(free, before)
    assert distance > 0.5
    net, result, before = trained(Booster.from_config(fp16=fp16, clip_grad_norm=0.125, device="cpu"))
    assert moved(net, before) == pytest.approx(0.125, rel=2e-3)
    assert result.grad_norm == pytest.approx(distance, rel=2e-3)  # the true norm, before the clip


@pytest.mark.parametrize("fp16", PRECISIONS[1:], ids=["torch", "naive"])
@pytest.mark.parametrize("name", ["clip_grad", "clip_grad_norm"])
def test_the_norm_may_stand_in_the_dict_under_either_name(fp16, name):
    net, _, before = trained(Booster.from_config(fp16={**fp16, name: 0.125}, device="cpu"))
    assert moved(net, before) == pytest.approx(0.125, rel=2e-3)


def test_a_gradient_below_the_norm_is_left_alone():
    free, _, _ = trained(Booster.from_config(device="cpu"))
    net, _, _ = trained(Booster.from_config(clip_grad_norm=1000.0, device="cpu"))
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), free.parameters(), strict=True))


def test_every_step_clips_and_an_optimizer_with_a_closure_too():
    booster_ = Booster.from_config(clip_grad_norm=0.125, device="cpu")
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    before = copy.deepcopy(net.state_dict())
    model, optimizer, *_ = booster_.boost(net, torch.optim.SGD(net.parameters(), lr=1.0))
    x = torch.randn(8, 4)

    def closure():
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        booster_.backward(loss, optimizer)
        return loss

    optimizer.step(closure)
    assert moved(net, before) == pytest.approx(0.125, rel=1e-4)
    middle = copy.deepcopy(net.state_dict())
    optimizer.step(closure)
    assert moved(net, middle) == pytest.approx(0.125, rel=1e-4)


def test_a_step_without_gradients_is_no_error_under_a_clip():
    net = nn.Linear(2, 2)
    booster_ = Booster.from_config(clip_grad_norm=1.0, device="cpu")
    _, optimizer, *_ = booster_.boost(net, torch.optim.SGD(net.parameters(), lr=1.0))
    assert optimizer.step().applied


def test_the_booster_itself_takes_the_norm():
    net, _, before = trained(Booster(device="cpu", clip_grad_norm=0.125))
    assert moved(net, before) == pytest.approx(0.125, rel=1e-4)


@pytest.mark.parametrize("clip", [-1.0, float("inf"), float("nan"), True])
def test_an_illegal_norm_raises(clip):
    with pytest.raises(ValueError, match="clip_grad_norm"):
        Booster.from_config(clip_grad_norm=clip)
    with pytest.raises(ValueError, match="clip_grad"):
        Booster.from_config(fp16={"mode": "naive", "clip_grad": clip})


@pytest.mark.parametrize(
    ("fp16", "clip"),
    [
        ({"mode": "naive", "clip_grad": 1.0}, 2.0),
        ({"mode": "naive", "clip_grad": 1.0, "clip_grad_norm": 2.0}, None),
        ({"mode": "torch", "clip_grad_norm": 0}, 2.0),
    ],
)
def test_the_norm_given_twice_with_different_values_raises(fp16, clip):
    with pytest.raises(ValueError, match="given twice with different values"):
        Booster.from_config(fp16=fp16, clip_grad_norm=clip)


def test_the_norm_given_twice_with_the_same_value_is_fine():
    assert translate({"mode": "naive", "clip_grad": 1, "clip_grad_norm": 1.0}, 1.0)[1] == 1.0


# ---- the rest of the Booster ----


def test_device_plugin_and_options_reach_the_booster():
    plugin = TorchDDPPlugin()
    made = Booster.from_config(device="cpu", plugin=plugin, max_consecutive_skips=1, fp16={"mode": "torch"})
    assert made.plugin is plugin
    assert made.device == torch.device("cpu")
    with pytest.raises(booster.LossScaleError):
        trained(made, scale_loss=float("inf"))
    assert isinstance(Booster.from_config(device="cpu").plugin, SingleDevice)


def test_a_whole_config_file_as_keywords_and_a_typo_in_it():
    config = {"fp16": {"mode": AMP_TYPE.TORCH}, "clip_grad_norm": 1.0}
    assert type(Booster.from_config(**config).precision) is FP16TorchMixedPrecision
    with pytest.raises(TypeError, match="fp61"):
        Booster.from_config(fp61=config["fp16"])


def test_a_naive_config_trains():
    fp16 = {"mode": AMP_TYPE.PARALLEL, "initial_scale": 2.0**32, "hysteresis": 1}
    net, result, before = trained(Booster.from_config(fp16=fp16, clip_grad_norm=1.0, device="cpu"), steps=30)
    assert result.applied
    assert result.loss_scale < 2.0**32  # the documented start overflows first
    assert next(net.parameters()).dtype == torch.float16
    assert moved(net, before) > 0.1


@pytest.mark.parametrize("fp16", [None, {"mode": "torch"}, {"mode": "naive", "initial_scale": 2.0**10}])
def test_optimizers_that_share_a_backward_each_clip_their_own(fp16):
    booster_ = Booster.from_config(fp16=fp16, clip_grad_norm=0.125, device="cpu")
    torch.manual_seed(0)
    nets = [nn.Linear(4, 4), nn.Linear(4, 2)]
    before = [copy.deepcopy(net.state_dict()) for net in nets]
    boosted = [booster_.boost(net, torch.optim.SGD(net.parameters(), lr=1.0))[:2] for net in nets]
    (first, optimizer_a), (second, optimizer_b) = boosted
    booster_.backward(second(first(torch.randn(8, 4))).pow(2).mean(), [optimizer_a, optimizer_b])
    assert optimizer_a.step().applied
    assert optimizer_b.step().applied
    for net, weights in zip(nets, before, strict=True):
        assert moved(net, weights) == pytest.approx(0.125, rel=2e-2)
