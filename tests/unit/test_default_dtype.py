"""A default dtype that is not float32, in force around a run with a model and batches in float32."""

import ast
import re
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import booster
from booster import Booster
from booster.mixed_precision import (
    BF16NaiveMixedPrecision,
    FP8MixedPrecision,
    FP16ApexMixedPrecision,
    FP16NaiveMixedPrecision,
    Int8MixedPrecision,
    MXFP8MixedPrecision,
    NVFP4MixedPrecision,
    TF32MixedPrecision,
)
from booster.number_formats.number_format import decode_nf4, encode_nf4

ROOT = Path(booster.__file__).parent

# What torch gives the default dtype, or, of whole numbers, int64, where a call names none.
FACTORIES = re.compile(
    "arange|as_tensor|asarray|(bartlett|blackman|hamming|hann|kaiser)_window|empty|empty_permuted|empty_strided|eye|from_file|"
    "full|linspace|logspace|normal|ones|rand|randn|range|scalar_tensor|tensor|zeros|Tensor"
)


def makes_floats_of_no_dtype(node):
    if not (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and FACTORIES.fullmatch(node.func.attr)
    ):
        return False
    of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
    return of_torch and not any(keyword.arg in ("dtype", "out", None) for keyword in node.keywords)


def unnamed(path):
    return [
        f"{path.name}:{node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(ast.parse(path.read_text()))
        if makes_floats_of_no_dtype(node)
    ]


def test_every_tensor_that_the_library_makes_names_its_dtype():
    assert [line for path in sorted(ROOT.rglob("*.py")) for line in unnamed(path)] == []


def test_a_tensor_without_a_dtype_is_noticed(tmp_path):
    path = tmp_path / "made.py"
    path.write_text("import torch\ntorch.zeros(3)\ntorch.zeros(3, dtype=torch.int8)\ntorch.tensor(0.5, device='cpu')\n")
    assert [line.partition(": ")[0] for line in unnamed(path)] == ["made.py:2", "made.py:4"]


@contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 32))


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


def momentum(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adafactor(params):
    return torch.optim.Adafactor(params)


RUNS = {
    "fp32": ("fp32", adamw, {}),
    "fp32 bf16": ("fp32", adamw, {"states": "bf16"}),
    "fp32 8bit": ("fp32", adamw, {"states": "8bit"}),
    "fp32 8bit of SGD": ("fp32", momentum, {"states": "8bit"}),
    "fp16 8bit": ("fp16", adamw, {"states": "8bit"}),
    "bf16, released": ("bf16", adamw, {"release_gradients": "exact"}),
    "bf16 8bit, released": ("bf16", adamw, {"release_gradients": "exact", "states": "8bit"}),
    "O1": (lambda: FP16ApexMixedPrecision("O1", verbosity=0), adamw, {}),
    "O2": (lambda: FP16ApexMixedPrecision("O2", verbosity=0), adamw, {}),
    "tf32": (lambda: TF32MixedPrecision(emulate=True), adamw, {}),
    "fp8": (lambda: FP8MixedPrecision(emulate=True), adamw, {}),
    "mxfp8": (lambda: MXFP8MixedPrecision(emulate=True), adamw, {}),
    "nvfp4": (lambda: NVFP4MixedPrecision(emulate=True), adamw, {}),
    "int8": (Int8MixedPrecision, adamw, {}),
    "bf16_naive of Adafactor": (BF16NaiveMixedPrecision, adafactor, {}),
    "bf16_naive 8bit": (BF16NaiveMixedPrecision, adamw, {"states": "8bit"}),
    "bf16_naive stochastic": (
        lambda: BF16NaiveMixedPrecision(master_weights="none", rounding="stochastic"),
        adamw,
        {},
    ),
    "bf16_naive kahan": (lambda: BF16NaiveMixedPrecision(master_weights="none", rounding="kahan"), adamw, {}),
    **{
        f"{kind.__name__} {form}": (lambda kind=kind, form=form: kind(master_weights=form), adamw, {})
        for kind in (FP16NaiveMixedPrecision, BF16NaiveMixedPrecision)
        for form in ("fp32", "split", "split24")
    },
}


def run(precision, make, options, dtype):
    """Boost and train a few steps with `dtype` the default; return all tensors that the run is made of."""
    booster = Booster("cpu", precision if isinstance(precision, str) else precision(), **options)
    model = net()
    draw = torch.Generator().manual_seed(1)
    batches = [(torch.randn(32, 32, generator=draw), torch.randint(0, 32, (32,), generator=draw)) for _ in range(4)]
    with default_dtype(dtype):
        model, optimizer, *_ = booster.boost(model, make(model.parameters()))
        for inputs, targets in batches:
            booster.backward(F.cross_entropy(model(inputs).float(), targets), optimizer)
            if not options.get("release_gradients"):
                optimizer.clip_grad_by_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        state = optimizer.state_dict()
    found = {f"state {key} {name}": value for key, own in state["state"].items() for name, value in own.items()}
    masters = state["booster"].get("masters", {}).get("weights", {})
    return {**model.state_dict(), **{f"master {name}": value for name, value in masters.items()}, **found}


@pytest.mark.slow_cases("mxfp8", "int8", "fp16 8bit", "bf16_naive 8bit", "fp32 8bit")
@pytest.mark.parametrize("case", RUNS)
def test_a_default_dtype_in_force_during_steps_changes_no_bit(case):
    expected = run(*RUNS[case], torch.float32)
    for dtype in (torch.float64, torch.bfloat16):
        found = run(*RUNS[case], dtype)
        assert found.keys() == expected.keys()
        # torch keeps its own count of steps in float64 then.
        torch.testing.assert_close(
            {name: value for name, value in found.items() if not name.endswith(" step")},
            {name: value for name, value in expected.items() if not name.endswith(" step")},
            rtol=0.0,
            atol=0.0,
        )


def test_the_default_dtype_changes_no_code_of_nf4():
    drawn = torch.randn(4, 64, generator=torch.Generator().manual_seed(2)).clamp(-1, 1)
    codes = encode_nf4(drawn)
    with default_dtype(torch.bfloat16):
        assert torch.equal(encode_nf4(drawn), codes)
        assert decode_nf4(codes, 64).dtype == torch.float32
