"""On a CUDA device: steps by Triton kernels are torch's, wherever tensors lie and however large they are; and what a kernel
that is wrong, does not compile or faults leads to. The same steps are tried on a CPU by tests/unit/test_kernels.py."""

import subprocess
import sys

import pytest
import torch
from torch import nn

pytest.importorskip("triton")
from interpreted import gradients, held, pair, step_on
from kernel_cases import FORMS, HALVES, RULES, make_model, on_half_weights, one_after_another, refuses
from kernel_places import SIZES, Anywhere, anywhere

from booster import Booster
from booster.kernels import matrices
from booster.kernels.launches import IS_INTERPRETED
from booster.mixed_precision import BF16NaiveMixedPrecision
from booster.number_formats.number_format import E4M3
from booster.number_formats.scaling import Scaling, scale_to

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(IS_INTERPRETED, reason="TRITON_INTERPRET=1 runs kernels on a CPU")]
BEYOND = 2**31 + 2**12 + 3  # elements


def room_for(gib):
    free, _ = torch.cuda.mem_get_info()
    if free < gib * 2**30:
        pytest.skip(f"needs {gib} GiB of memory on the device, and {free / 2**30:.0f} are free")


@pytest.mark.parametrize("states", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("rule", RULES)
def test_a_step_on_float32_weights_is_that_of_torch(rule, states):
    if refuses(rule, states):
        pytest.skip("such states cannot be packed")
    options = {} if states == "fp32" else {"states": states}
    both = pair(make_model, RULES[rule], "fp32", device="cuda", clip_grad_norm=0.05, **options)
    one_after_another(both, 3e-7, states)


@pytest.mark.crossed
@pytest.mark.parametrize("states", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("rule", RULES)
def test_a_step_on_half_weights_is_that_of_torch(rule, half, form, states):
    if refuses(rule, states):
        pytest.skip("such states cannot be packed")
    on_half_weights(pair, make_model, rule, half, form, states, device="cuda")


@pytest.mark.parametrize("form", ["fp32", *FORMS])
def test_parameters_and_gradients_lie_anywhere_and_are_of_any_size(form):
    dtype = torch.float32 if form == "fp32" else torch.bfloat16
    made = "fp32" if form == "fp32" else lambda: BF16NaiveMixedPrecision(**FORMS[form], states="8bit", keep_fp32=())
    options = {"clip_grad_norm": 0.5, "skip_nonfinite": True, "device": "cuda"}
    both = pair(lambda: Anywhere(SIZES, dtype, "cuda"), RULES["AdamW"], made, **options)
    anywhere(both, SIZES, 3e-7 if form == "fp32" else 2.0**-7)


@pytest.mark.parametrize(
    ("precision", "mode"),
    [
        ("fp32", "exact"),
        ("fp32", "previous_norm"),
        ("fp16", "exact"),
        ("bf16_naive", "exact"),
        ("bf16_naive", "previous_norm"),
    ],
)
def test_steps_within_backward_are_those_after_it(precision, mode):
    options = {"device": "cuda", "release_gradients": mode, "clip_grad_norm": 0.5}
    steps = pair(make_model, RULES["AdamW"], precision, **options)
    for number in range(6):
        for each in steps:
            step_on(*each, gradients(list(each[1].parameters()), number))
    for own, other in zip(held(steps[1][2])[0], held(steps[0][2])[0], strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


def test_elements_beyond_those_that_32_bits_count_are_stepped():
    room_for(20)
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(BEYOND, device="cuda"))
    booster = Booster("cuda", "fp32", fused_optimizer="triton")
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.25))
    weight = next(model.parameters())
    weight.grad = torch.full_like(weight, 0.5)
    optimizer.step()
    weight = weight.detach()
    assert bool((weight[:4096] == 0.875).all())
    assert bool((weight[-8192:] == 0.875).all())
    assert float(weight.sum(dtype=torch.float64)) == 0.875 * BEYOND


def test_matrices_of_elements_beyond_those_that_32_bits_count_are_rounded():
    room_for(12)
    x = torch.ones(2**16 + 64, 2**15, device="cuda", dtype=torch.bfloat16)
    x[-1, -16:] = 3.0
    made, _ = matrices.quantized(x, E4M3, Scaling("row"), 16)
    for rows in (slice(0, 64), slice(-64, None)):
        expected = scale_to(x[rows], E4M3, Scaling("row"))
        assert torch.equal(made.values[rows].view(torch.uint8), expected.values.view(torch.uint8))
        assert torch.equal(made.scale[rows], expected.scale)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_model_on_another_device_than_the_current_one_is_stepped_there():
    both = pair(make_model, RULES["AdamW"], "bf16_naive", device="cuda:1")
    for number in range(2):
        for each in both:
            assert step_on(*each, gradients(list(each[1].parameters()), number)).applied
    assert torch.cuda.current_device() == 0
    for own, other in zip(both[1][1].parameters(), both[0][1].parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=2.0**-7, atol=1e-6)


# ---- faults, each in its own process: one that CUDA finds at a wrong address ends all work there

PLANTED = """
import dataclasses, logging, sys
import torch
import interpreted_faults as faults
from booster import Booster
from booster.kernels import rules, weights

logging.basicConfig(level="WARNING", format="%(levelname)s %(message)s", stream=sys.stdout)
AdamW, fault = torch.optim.AdamW, getattr(faults, sys.argv[1])
if sys.argv[1] == "stores_beyond":
    object.__setattr__(weights.FULL, "store", fault)
else:
    rules._RULES[AdamW] = dataclasses.replace(rules._RULES[AdamW], body=fault)
steps = []
for fused in (True, False):
    torch.manual_seed(0)
    net = torch.nn.Linear(6, 5)
    booster = Booster("cuda", "fp32", fused_optimizer=fused)
    model, optimizer, *_ = booster.boost(net, AdamW(net.parameters(), lr=1e-2))
    for _ in range(3):
        booster.backward(model(torch.ones(4, 6, device="cuda")).square().mean(), optimizer)
        assert optimizer.step().applied
        optimizer.zero_grad()
    steps.append(list(net.parameters()))
for own, other in zip(*steps):
    torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)
print("right")
"""


def planted(fault):
    done = subprocess.run([sys.executable, "-c", PLANTED, fault], capture_output=True, text=True, check=False)
    return done.returncode, [line for line in done.stdout.splitlines() if line.startswith(("WARNING", "right"))], done


@pytest.mark.parametrize(("fault", "what"), [("slow_body", "a weight of shape"), ("raises", "a trial raised")])
def test_a_kernel_that_is_wrong_or_does_not_compile_is_told_once_and_torch_steps(fault, what, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    code, logged, done = planted(fault)
    assert code == 0, done.stderr[-2000:]
    assert len(logged) == 2
    assert logged[0].startswith("WARNING steps of AdamW by Triton kernels on cuda:0 are not like torch's")
    assert what in logged[0]


def test_a_kernel_that_faults_ends_the_process_with_what_to_switch_off(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    code, logged, done = planted("stores_beyond")
    assert code == 1
    assert "left cuda:0 unusable in this process; switch it off in booster/kernels/switches.py" in done.stderr
    assert logged == []
