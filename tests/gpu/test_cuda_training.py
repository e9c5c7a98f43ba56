"""On a CUDA device: the same numbers as hand-written torch.amp, and no wait for the device inside a step."""

import pytest
import torch
from cuda_syncs import syncs_forbidden
from torch import nn

from booster import Booster
from booster.mixed_precision import BF16NaiveMixedPrecision, FP16NaiveMixedPrecision

pytestmark = pytest.mark.gpu

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
CLOSE = {"fp16": 1e-3, "bf16": 2e-2}  # of the largest weight; on an H100 1.1e-2 was seen with bf16
OVERFLOW_AT = 7  # not the first step, after which torch's own fused SGD would be unsound
FUSED = {
    "Adam": (torch.optim.Adam, {"lr": 1e-3}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3}),
    "SGD": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8))


def make_batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, 32, generator=generator).cuda(), torch.randint(0, 8, (16,), generator=generator).cuda())
        for _ in range(count)
    ]


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("precision", DTYPES)
def test_twenty_steps_equal_the_hand_written_loop(precision: str, name: str) -> None:
    optimizer_class, options = FUSED[name]
    batches = make_batches(20)

    reference = make_model().cuda()
    raw = optimizer_class(reference.parameters(), fused=True, **options)
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")
    criterion = nn.CrossEntropyLoss()
    for index, (x, y) in enumerate(batches):
        with torch.autocast("cuda", DTYPES[precision]):
            loss = criterion(reference(x), y)
        if precision == "fp16" and index == OVERFLOW_AT:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(raw)
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        scaler.step(raw)
        scaler.update()
        raw.zero_grad()

    booster = Booster("cuda", precision)
    model = make_model()
    model, optimizer, boosted_criterion, *_ = booster.boost(
        model, optimizer_class(model.parameters(), **options), nn.CrossEntropyLoss()
    )
    assert optimizer._update.decision.on_device
    for index, (x, y) in enumerate(batches):
        loss = boosted_criterion(model(x), y)
        if precision == "fp16" and index == OVERFLOW_AT:
            loss = loss * float("inf")
        booster.backward(loss, optimizer)
        optimizer.clip_grad_by_norm(0.5)
        optimizer.step()
        optimizer.zero_grad()

    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert (ours - theirs).abs().max() <= CLOSE[precision] * theirs.abs().max()
    assert optimizer.loss_scale == (scaler.get_scale() if precision == "fp16" else 1.0)


PACKED = {"master_weights": "split24", "states": "8bit"}
UNWAITED = {
    **{name: name for name in ("fp32", "bf16", "fp16", "fp16_naive", "bf16_naive")},
    "fp16_naive split": FP16NaiveMixedPrecision(master_weights="split"),
    "fp16_naive kahan": FP16NaiveMixedPrecision(master_weights="none", rounding="kahan"),
    "bf16_naive stochastic": BF16NaiveMixedPrecision(master_weights="none", rounding="stochastic"),
    "bf16_naive 8bit": BF16NaiveMixedPrecision(**PACKED),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("precision", UNWAITED)
def test_a_step_does_not_wait_for_the_device_until_its_result_is_read(precision: str) -> None:
    booster = Booster("cuda", UNWAITED[precision])
    model = make_model()
    raw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(raw, 1, 0.5)
    model, optimizer, criterion, _, scheduler = booster.boost(model, raw, nn.CrossEntropyLoss(), None, scheduler)
    batches = make_batches(3)
    for x, y in batches[:2]:  # the first steps allocate and initialise
        booster.backward(criterion(model(x), y), optimizer)
        optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    x, y = batches[2]
    optimizer.sync()
    with syncs_forbidden():
        booster.backward(criterion(model(x), y), optimizer)
        optimizer.clip_grad_by_norm(1.0)
        result = optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert result.applied
    assert result.grad_norm is not None
    assert scheduler.get_last_lr() == [1e-3 * 0.5**3]


@pytest.mark.parametrize("name", FUSED)
def test_an_overflow_in_the_first_step_leaves_a_fused_optimizer_sound(name: str) -> None:
    optimizer_class, options = FUSED[name]
    booster = Booster("cuda", "fp16")
    model = make_model()
    model, optimizer, *_ = booster.boost(model, optimizer_class(model.parameters(), **options))
    before = [param.detach().clone() for param in model.parameters()]
    for index, (x, _) in enumerate(make_batches(3)):
        loss = model(x).square().mean()
        booster.backward(loss * float("inf") if index == 0 else loss, optimizer)
        result = optimizer.step()
        optimizer.zero_grad()
        assert result.applied == (index > 0)
        if index == 0:
            assert result.skipped_reason == "nonfinite_loss"
            assert result.culprit == tuple(name for name, _ in model.named_parameters())
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all((a - b).abs().max() < 0.1 for a, b in zip(before, model.parameters(), strict=True))


def test_optimizer_state_made_on_the_cpu_follows_the_model() -> None:
    model = make_model()
    raw = torch.optim.Adagrad(model.parameters(), lr=1e-2)  # makes its state in the constructor
    model, optimizer, *_ = Booster("cuda", "fp16").boost(model, raw)
    booster = Booster("cuda", "fp16")
    assert {param.device.type for param in model.parameters()} == {"cuda"}
    assert {state["sum"].device.type for state in optimizer.state.values()} == {"cuda"}
    x, _ = make_batches(1)[0]
    booster.backward(model(x).square().mean(), optimizer)
    assert optimizer.step().applied
