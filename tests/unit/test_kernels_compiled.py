"""Kernels compile for GPUs that are not there, without fused multiply-adds, which would round otherwise than a CPU.

In processes of its own, as interpreted kernels cannot be compiled."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton; `make kernels` runs it"),
    pytest.mark.timeout(900),
]
COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from torch.optim import SGD, Adagrad, AdamW, RMSprop
from booster.kernels import launches, states, weights
from booster.kernels.rules import lion, rule_of
from booster.kernels.rule import MOST_NUMBERS
from booster.kernels.arithmetic import BFLOAT16, FLOAT16, FLOAT32
import torch

TARGET = GPUTarget("cuda", int(sys.argv[1]), 32)
found = {}

def compiled(name, kernel, types, constants):
    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    made = triton.compile(ASTSource(kernel, signature, constants), TARGET, options={"enable_fp_fusion": False})
    found[name] = "fma." in made.asm["ptx"]

param = torch.nn.Parameter(torch.zeros(1))
rules = [rule_of(kind([param], lr=0.1)) for kind in (SGD, AdamW, RMSprop, Adagrad)] + [lion.lion_rule(SGD)]
sizes = {"COLUMNS": launches.COLUMNS, "TILE": launches.TILE}
read = {"table": "*i64", "tiles": "*i32", "partials": "*fp64"}
compiled("measure", launches.measure, read, {**sizes, "zeros": None})
compiled("measure zeros", launches.measure, {**read, "zeros": "*i32"}, sizes)
compiled("add_up", launches.add_up, {"partials": "*fp64", "count": "i32", "total": "*fp64"}, {"BLOCK": launches.BLOCK})
factors = {"carried": "*fp64", "pending": "*fp64"}
compiled("norm_of", launches.norm_of, {"sums": "*fp64", "count": "i32", **factors, "norm": "*fp64"}, {"BLOCK": launches.BLOCK})
compiled("clip_by", launches.clip_by, dict.fromkeys(("norm", "bound", "pending", "factor"), "*fp64"), {})
names = "partials count zeros num_zeros found_in carried pending options scale growth hysteresis seed"
names += " numbers out words clocks num_clocks rows scalars"
types = "*fp64 i32 *i32 i32 *fp32 *fp32 *fp64 *fp64 *fp32 *i64 *i64 *fp32 *fp64 *fp32 *i64 *i64 i32 *fp64 *fp32"
whole = dict(zip(names.split(), types.split(), strict=True))
maybe = {"partials", "zeros", "found_in", "carried", "pending", "scale", "growth", "hysteresis", "seed"}
for rule in rules:
    constants = {"PREPARE": rule.prepare, "NUMBERS": MOST_NUMBERS, "SCALARS": launches.SCALARS, "BLOCK": launches.BLOCK}
    compiled(f"decide {rule.body.__module__}", launches.decide, whole, {**constants, "CLIP": True})
    some = {name: kind for name, kind in whole.items() if name not in maybe}
    compiled(f"decide little {rule.body.__module__}", launches.decide, some,
             {**constants, "CLIP": False, **dict.fromkeys(maybe)})

def update(rule, flags, form, half, ways):
    ways = [*ways, *[states.ABSENT] * (3 - len(ways))]
    constants = {"RULE": rule.body, "FLAGS": flags, "LOAD": form.load, "STORE": form.store, "HALF": half, "GRADIENT": half,
                 "CHECKED": True, "DIVIDE": True, "COLUMNS": launches.COLUMNS, "SCALARS": launches.SCALARS,
                 "TILE": launches.TILE}
    for place, way in enumerate(ways):
        constants |= {f"OPEN{place}": way.open, f"CLOSE{place}": way.close}
    types = {"table": "*i64", "tiles": "*i32", "first_tile": "i32", "scalars": "*fp32", "out": "*fp32", "chances": "*i32"}
    compiled(f"update {rule.body.__module__} {flags} {form.store.__name__} {half} {ways[0].open.__name__}",
             launches.update, types, constants)

packed = [states.WAYS["signed"], states.WAYS["unsigned"]]
for form in {id(form): form for form in weights.FORMS.values()}.values():
    for half in (FLOAT32,) if form is weights.FULL else (BFLOAT16, FLOAT16):
        for ways in ([states.FULL] * 2, packed, [states.WAYS["bf16"]] * 2):
            update(rules[1], 4 | 8, form, half, ways)
for rule, several in zip(rules, ((0, 1, 15), (7,), (0, 1, 2, 15), (0, 3), (0,)), strict=True):
    for flags in several:
        update(rule, flags, weights.FULL, FLOAT32, [states.FULL] * 3)
print(json.dumps(found))
"""


@pytest.mark.parametrize("capability", [80, 90])
def test_every_kernel_compiles_for_a_gpu_and_fuses_no_multiplication_with_an_addition(capability):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(capability)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 65
    assert [name for name, fused in found.items() if fused] == []
