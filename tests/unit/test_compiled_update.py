"""fused_optimizer="compile": the same updates, compiled, for any optimizer; a warning where nothing compiles."""

import copy
import logging
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from booster import Booster
from booster.update.application import Application
from booster.update.choice import CompiledApplication, can_compile

OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-2}),
    "SGD": (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9}),
}

pytestmark = [
    # Torch's compiler warns about its own use of deprecated functions.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def compiler() -> None:
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(1))
    except Exception as error:
        pytest.skip(f"torch.compile finds no working compiler: {error}")


def train(fused_optimizer: bool | str, name: str, precision: str) -> tuple[list[torch.Tensor], list[bool], object]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer_class, options = OPTIMIZERS[name]
    raw = optimizer_class(model.parameters(), **options)
    scheduler = torch.optim.lr_scheduler.StepLR(raw, 1, 0.9)
    booster = Booster("cpu", mixed_precision=precision, fused_optimizer=fused_optimizer)
    model, optimizer, _, _, scheduler = booster.boost(model, raw, lr_scheduler=scheduler)
    applied = []
    for index, x in enumerate(torch.randn(8, 32, 8)):
        loss = model(x).square().mean()
        booster.backward(loss * float("inf") if index == 4 else loss, optimizer)
        optimizer.clip_grad_by_norm(0.1)
        applied.append(optimizer.step().applied)
        scheduler.step()
        optimizer.zero_grad()
    assert isinstance(raw.param_groups[0]["lr"], float)
    return [param.detach() for param in model.parameters()], applied, optimizer._update


@pytest.mark.parametrize("name", [n if n == "AdamW" else pytest.param(n, marks=pytest.mark.slow) for n in OPTIMIZERS])
def test_a_compiled_update_takes_the_steps_of_an_eager_one(compiler: None, name: str) -> None:
    eager, eager_applied, _ = train(False, name, "fp32")
    compiled, applied, update = train("compile", name, "fp32")
    assert type(update.decision.application) is CompiledApplication
    assert applied == eager_applied == [True] * 4 + [False] + [True] * 3
    for ours, theirs in zip(compiled, eager, strict=True):
        # Seven updates of a handful of float32 operations each, in another order.
        assert (ours - theirs).abs().max() <= 7 * 8 * torch.finfo(torch.float32).eps * theirs.abs().max()


LAST = torch.channels_last


def laid_otherwise(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=LAST) if tensor.dim() == 4 else tensor


def train_in_other_layouts(fused_optimizer: bool | str) -> list[torch.Tensor]:
    """Steps of a convolution between which gradients, loaded states and the model change their order in memory."""
    torch.manual_seed(0)
    booster = Booster("cpu", "fp32", fused_optimizer=fused_optimizer)
    net = nn.Conv2d(3, 6, 3)
    model, optimizer, *_ = booster.boost(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    draw = torch.Generator().manual_seed(1)
    for step, x in enumerate(torch.randn(7, 2, 3, 6, 6, generator=draw)):
        optimizer.zero_grad()
        booster.backward(model(x).square().mean(), optimizer)
        if step == 2:
            net.weight.grad = laid_otherwise(net.weight.grad)
        if step == 3:
            state = copy.deepcopy(optimizer.state_dict())
            state["state"] = {
                key: {name: laid_otherwise(value) for name, value in own.items()} for key, own in state["state"].items()
            }
            optimizer.load_state_dict(state)
        if step in (4, 5):
            net.to(memory_format={4: LAST, 5: torch.contiguous_format}[step])
        assert optimizer.step()
    return [param.detach() for param in model.parameters()]


@pytest.mark.slow
def test_what_lies_otherwise_in_memory_is_stepped_as_by_an_eager_update(
    compiler: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "booster"):
        eager, compiled = train_in_other_layouts(False), train_in_other_layouts("compile")
    # torch's compiler has its own warnings, once in a process.
    ours = [record for record in caplog.records if record.name.startswith("booster")]
    assert [record.message.split(";")[0] for record in ours] == [
        "AdamW: a parameter of shape (6, 3, 3, 3) has another memory format than when its step was compiled, as after "
        "model.to(memory_format=...)"
    ]
    for compiled_param, eager_param in zip(compiled, eager, strict=True):
        torch.testing.assert_close(compiled_param, eager_param, rtol=1e-4, atol=1e-5)


def test_a_schedule_does_not_recompile(compiler: None) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    train("compile", "SGD", "fp16")
    # One graph for the norms, one for the step: eight learning rates would otherwise be eight.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4


def test_step_hooks_see_unscaled_gradients_under_a_compiled_update(compiler: None) -> None:
    model = nn.Linear(2, 1, bias=False)
    raw = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    booster = Booster("cpu", mixed_precision="fp16", fused_optimizer="compile")
    model, optimizer, *_ = booster.boost(model, raw)
    seen = []
    raw.register_step_pre_hook(lambda *_: seen.append(model.weight.grad.clone()))
    for _ in range(2):
        optimizer.zero_grad()
        booster.backward(model(torch.ones(1, 2)).sum() / 2, optimizer)
        optimizer.step()
    assert [grad.tolist() for grad in seen] == [[[0.5, 0.5]], [[0.5, 0.5]]]


def test_without_a_compiler_one_warning_says_so_and_the_default_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(torch, "compile", broken)
    model = nn.Linear(2, 1)
    with caplog.at_level(logging.WARNING, "booster"):
        _, optimizer, *_ = Booster("cpu", fused_optimizer="compile").boost(model, torch.optim.AdamW(model.parameters()))
    assert type(optimizer._update.decision.application) is Application
    assert optimizer.param_groups[0]["fused"] is True
    assert [record.message for record in caplog.records] == [
        'fused_optimizer="compile" does not apply to this AdamW: torch.compile finds no working compiler: '
        "no C++ compiler; it is stepped as with fused_optimizer=True"
    ]


def test_an_optimizer_that_is_fused_already_has_nothing_to_compile(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "booster"):
        assert not can_compile(torch.optim.AdamW(nn.Linear(2, 1).parameters(), fused=True))
    assert "fused=True" in caplog.text


SHARED_CACHE = """
import torch
from torch import nn
from booster import Booster

def trained(fused, precision):
    torch.manual_seed(0)
    model = nn.Linear(16, 8)
    booster = Booster("cpu", precision, fused_optimizer=fused)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for x in torch.randn(3, 4, 16):
        booster.backward(model(x).float().square().mean(), optimizer)
        optimizer.clip_grad_by_norm(0.1)
        optimizer.step()
        optimizer.zero_grad()
    return nn.utils.parameters_to_vector(model.parameters()).float()

for precision, allowed in (("fp32", 1e-6), ("bf16_naive", 2.0**-7)):
    compiled, eager = trained("compile", precision), trained(True, precision)
    print(precision, bool((compiled - eager).abs().max() <= allowed * eager.abs().max()))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="needs a CPU with vectors of two widths"
)
def test_code_that_was_compiled_for_wider_vectors_is_not_run_on_a_cpu_with_narrower_ones(compiler, tmp_path):
    """Nodes of a cluster may share the compiler's folder: torch's key of a cached graph says nothing of the CPU."""
    for capability in ("avx512", "avx2"):
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "ATEN_CPU_CAPABILITY": capability}
        done = subprocess.run(
            [sys.executable, "-c", SHARED_CACHE], env=env, capture_output=True, text=True, timeout=600
        )
        assert done.stdout.split() == ["fp32", "True", "bf16_naive", "True"], (
            capability,
            done.stdout,
            done.stderr[-2000:],
        )
