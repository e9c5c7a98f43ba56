"""What newcomers write first, from other libraries or by guess: the message says what to write instead."""

import copy
import inspect
import re
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from booster import Booster
from booster.checkpoint.objects import Loaded


def pair():
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


# ---------------------------------------------------------------------- what boost returns


def test_what_boost_returns_is_a_tuple():
    net, own = pair()
    result = Booster("cpu").boost(net, own)
    model, optimizer, criterion, loader, schedule = result
    first, *rest = result
    first_again, second, *_ = result
    assert isinstance(result, tuple)
    assert len(result) == 5
    assert list(result) == [model, optimizer, None, None, None] == [first, *rest]
    assert (first_again, second) == result[:2]
    assert result[0] is model
    assert [each for each in result][1] is optimizer  # noqa: C416
    assert dict(zip("ab", result, strict=False)) == {"a": model, "b": optimizer}
    a, b = list(result)[:2]
    (c, d) = (lambda *five: five[:2])(*result)
    assert a is c is model
    assert b is d is optimizer


def test_what_boost_returns_used_as_a_model_says_the_line_to_write():
    result = Booster("cpu").boost(*pair())
    with pytest.raises(AttributeError, match=r"no attribute 'parameters'.*model, optimizer, \*_ ="):
        result.parameters()


# ---------------------------------------------------------------------- names of others


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("bf16-mixed", "bf16"),
        ("16-mixed", "fp16"),
        ("no", "fp32"),
        ("32-true", "fp32"),
        ("bf16-true", "bf16_naive"),
        ("16-true", "fp16_naive"),
    ],
)
def test_precisions_of_fabric_and_accelerate_are_answered_with_ours(theirs, ours):
    with pytest.raises(ValueError, match=re.escape(f"mixed_precision={ours!r}")):
        Booster("cpu", theirs)


def test_precision_as_a_keyword_names_mixed_precision():
    with pytest.raises(TypeError, match=r"'precision': it is called mixed_precision: .*mixed_precision='bf16'"):
        Booster("cpu", precision="bf16-mixed")
    with pytest.raises(TypeError, match=r"mixed_precision='fp16'"):
        Booster("cpu", precision="fp16")
    with pytest.raises(TypeError, match=r"'strategy': a parallelism is a plugin"):
        Booster("cpu", strategy="ddp")
    with pytest.raises(
        TypeError, match=r"'keep_fp32': legal are device, mixed_precision, plugin, .*half_products; options of"
    ):
        Booster("cpu", keep_fp32=())


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("prepare", "model, optimizer, *_ = b.boost(model, optimizer)"),
        ("setup", "model, optimizer, *_ = b.boost(model, optimizer)"),
        ("clip_grad_norm_", "optimizer.clip_grad_by_norm(max_norm)"),
        ("unwrap_model", "b.unwrap(model)"),
        ("save_state", "b.save(folder, model, optimizer)"),
    ],
)
def test_methods_of_accelerate_and_fabric_are_answered_with_ours(theirs, ours):
    with pytest.raises(AttributeError, match=f"'Booster' object has no attribute {theirs!r}; it .*{re.escape(ours)}"):
        getattr(Booster("cpu"), theirs)


def test_other_names_are_missing_as_anywhere():
    b = Booster("cpu")
    assert not hasattr(b, "nothing")
    assert copy.copy(b).precision is b.precision


def test_a_scheduler_loader_or_optimizer_in_third_place_says_the_keyword():
    net, own = pair()
    b = Booster("cpu")
    wrong = {
        "lr_scheduler": torch.optim.lr_scheduler.StepLR(own, 1),
        "dataloader": DataLoader(TensorDataset(torch.zeros(4, 4))),
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
    }
    for keyword, value in wrong.items():
        with pytest.raises(TypeError, match=f"criterion must be callable, got .*pass {keyword} by name"):
            b.boost(net, own, value)


@pytest.mark.parametrize("place", ["criterion", "dataloader", "lr_scheduler"])
@pytest.mark.parametrize("kind", ["optimizer", "dataloader", "lr_scheduler"])
def test_what_is_saved_in_the_place_of_another_says_the_keyword(place, kind, tmp_path):
    b, (net, own) = Booster("cpu"), pair()
    loader = DataLoader(TensorDataset(torch.zeros(4, 4)))
    schedule = torch.optim.lr_scheduler.StepLR(own, 1)
    net, own, _, loader, schedule = b.boost(net, own, None, loader, schedule)
    given = {"optimizer": own, "dataloader": loader, "lr_scheduler": schedule}[kind]
    if place == kind:
        assert b.save(tmp_path / "right", net, own, **{place: given}).exists()
        return
    for call in (b.save, b.load):
        with pytest.raises(TypeError, match=f"{place} .*pass it by name, {kind}="):
            call(tmp_path / "wrong", net, own, **{place: given})
    assert not (tmp_path / "wrong").exists()


# ---------------------------------------------------------------------- what is shown


def test_a_booster_shows_device_precision_and_plugin():
    shown = repr(Booster("cpu", "bf16"))
    assert shown == "Booster(device='cpu', mixed_precision=BF16MixedPrecision(device='cpu'), plugin=SingleDevice())"


def test_what_a_load_returns_shows_no_tensors():
    loaded = Loaded(3, {"ema": torch.zeros(1000, 2), "epoch": 2, "more": [torch.ones(1), object()]}, None)
    extra = "{'ema': tensor(float32, [1000, 2]), 'epoch': 2, 'more': [tensor(float32, [1]), object]}"
    assert repr(loaded) == f"Loaded(step=3, path=None, extra={extra})"


# ---------------------------------------------------------------------- LoRA with half weights


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_weights_that_arrive_under_lora_are_not_told_to_widen_the_frozen_base(precision):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 2)).bfloat16()
    make = lambda: torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)  # noqa: E731
    with pytest.raises(ValueError, match="Most weights are frozen, as under LoRA") as error:
        Booster("cpu", precision).boost(net, make())
    assert "model.float()" not in str(error.value)
    line = "for p in filter(lambda p: p.requires_grad, model.parameters()): p.data = p.data.float()"
    assert line in str(error.value)
    for p in filter(lambda p: p.requires_grad, net.parameters()):
        p.data = p.data.float()
    assert net[0].weight.dtype == torch.bfloat16
    model, optimizer, *_ = (b := Booster("cpu", precision)).boost(net, make())
    b.backward(model(torch.randn(4, 64)).mean(), optimizer)
    assert optimizer.step().applied


# ---------------------------------------------------------------------- the boosted model


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        return self.layer(input_ids)


@pytest.mark.parametrize("options", [{}, {"diagnose": "first"}])
def test_forward_of_a_boosted_model_has_the_signature_of_the_users(options):
    net = Named()
    model, *_ = Booster("cpu", "bf16", clip_grad_norm=1.0, **options).boost(net)
    assert inspect.signature(model.forward) == inspect.signature(net.forward)
    assert list(inspect.signature(copy.deepcopy(model).forward).parameters) == ["input_ids", "labels"]
    assert torch.equal(model.forward(torch.ones(1, 4)), model(input_ids=torch.ones(1, 4)))


def test_a_trace_by_torch_jit_says_what_to_trace():
    net = Named()
    b = Booster("cpu", "bf16")
    model, *_ = b.boost(net)
    x = torch.ones(1, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)  # what torch 2.15 makes of it
        with pytest.raises(RuntimeError, match=r"torch.jit.trace\(b.unwrap\(model\).eval\(\), inputs\)"):
            torch.jit.trace(model, (x,))
        assert torch.equal(torch.jit.trace(b.unwrap(model).eval(), (x,))(x), net(x))
    assert torch.equal(torch.export.export(model, (x,)).module()(x), model(x))
