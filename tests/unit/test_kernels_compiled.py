"""Kernels compile for GPUs that are not there, into instructions that round as a CPU does, and into few enough registers.

In their own processes, as interpreted kernels cannot be compiled."""

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
import inspect, json, re, subprocess, sys, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from torch.optim import SGD, Adagrad, AdamW, RMSprop
from booster.kernels import launches, weights
from booster.kernels.rules import lion_rule, rule_of
from booster.kernels.rule import MOST_NUMBERS
from booster.kernels.arithmetic import BFLOAT16, FLOAT16, FLOAT32
import torch

TARGET = GPUTarget("cuda", int(sys.argv[1]), 32)
PTXAS = get_ptxas(*[int(sys.argv[1])] * len(inspect.signature(get_ptxas).parameters)).path  # of the GPU since Triton 3.6
ROUGH = ("fma.", "mul.f32", "add.f32", "sub.f32", "approx", "div.full", ".ftz")
found, loads, spilled, specialised, shared = {}, {}, {}, [], {}

def compiled(name, kernel, types, constants, warps=4, asks=False):
    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    options = {"enable_fp_fusion": False, "num_warps": warps}
    # As a launch compiles: tensors begin at multiples of 16 bytes, but for those of which a kernel says that they need not.
    aligned = [p.num for p in kernel.params if types.get(p.name, "i").startswith("*") and not p.do_not_specialize_on_alignment]
    source = ASTSource(kernel, signature, constants, {(place,): [["tt.divisibility", 16]] for place in aligned})
    made = triton.compile(source, TARGET, options=options)
    ptx, shared[name] = made.asm["ptx"], made.metadata.shared
    # Floor and ceil take subnormal numbers for 0. None of ours is one that rounds otherwise: see `weights._store_stochastic`.
    exact = re.sub(r"cvt\\.r[mp]i\\.ftz\\.f32\\.f32", "", ptx)
    found[name] = [word for word in ROUGH if word in exact]
    if name.startswith(("measure", "update")):  # addresses of a table: views begin at any element
        found[name] += re.findall(r"(?:ld|st)\\.global[.:\\w]*\\.v\\d", ptx)
    loads[name] = len(re.findall(r"\\bld\\.global", ptx))
    specialised.extend(each.name for each in kernel.params if types.get(each.name) == "i32" and not each.do_not_specialize)
    if asks:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "ptx").write_text(ptx)
            command = [PTXAS, "-v", "--fmad=false", f"--gpu-name=sm_{sys.argv[1]}" + "a" * (sys.argv[1] != "80"), "ptx"]
            said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stderr
        registers, spills = re.search(r"Used (\\d+) registers", said), re.search(r"(\\d+) bytes spill stores", said)
        spilled[name] = int(registers[1]) * warps * 32, int(spills[1])

param = torch.nn.Parameter(torch.zeros(1))
rules = [rule_of(kind([param], lr=0.1)) for kind in (SGD, AdamW, RMSprop, Adagrad)] + [lion_rule(SGD)]
sizes = {"COLUMNS": launches.COLUMNS, "TILE": launches.TILE}
read = {"table": "*i64", "tiles": "*i32", "partials": "*fp64"}
compiled("measure", launches.measure, read, {**sizes, "zeros": None})
compiled("measure zeros", launches.measure, {**read, "zeros": "*i32"}, sizes)
compiled("add_up", launches.add_up, {"partials": "*fp64", "count": "i32", "total": "*fp64"}, {})
factors = {"current_scale": "*fp64", "pending": "*fp64"}
norm = {"sums": "*fp64", "count": "i32", **factors, "norm": "*fp64"}
compiled("norm_of", launches.norm_of, norm, {"previous": None})
compiled("norm_of previous", launches.norm_of, {**norm, "previous": "*fp64"}, {})
compiled("clip_by", launches.clip_by, dict.fromkeys(("norm", "bound", "pending", "factor"), "*fp64"), {})
names = "partials count zeros num_zeros found_in carried pending options scale growth hysteresis seed"
names += " numbers out words step_counts num_step_counts rows scalars"
types = "*fp64 i32 *i32 i32 *fp32 *fp32 *fp64 *fp64 *fp32 *i64 *i64 *fp32 *fp64 *fp32 *i64 *i64 i32 *fp64 *fp32"
whole = dict(zip(names.split(), types.split(), strict=True))
maybe = {"partials", "zeros", "found_in", "current_scale", "pending", "scale", "growth", "hysteresis", "seed"}
for rule in rules:
    constants = {"PREPARE": rule.prepare, "NUMBERS": MOST_NUMBERS, "SCALARS": launches.SCALARS, "BLOCK": launches.BLOCK}
    compiled(f"decide {rule.body.__name__}", launches.decide, whole, {**constants, "CLIP": True})
    some = {name: kind for name, kind in whole.items() if name not in maybe}
    compiled(f"decide little {rule.body.__name__}", launches.decide, some,
             {**constants, "CLIP": False, **dict.fromkeys(maybe)})

def update(rule, flags, form, half, ways, *, both=True):
    ways = [*ways, *[weights.NO_STATE] * (3 - len(ways))]
    constants = {"RULE": rule.body, "FLAGS": flags, "LOAD": form.load, "STORE": form.store, "HALF": half, "GRADIENT": half,
                 "RATIO": ways[0].ratio, "CHECKED": both, "DIVIDE": both, "COLUMNS": launches.COLUMNS,
                 "SCALARS": launches.SCALARS, "TILE": launches.TILE}
    for place, way in enumerate(ways):
        constants |= {f"OPEN{place}": way.open, f"CLOSE{place}": way.close}
    types = {"table": "*i64", "tiles": "*i32", "first_tile": "i32", "scalars": "*fp32", "out": "*fp32", "random_bits": "*i32"}
    compiled(f"update {rule.body.__name__} {flags} {form.store.__name__} {half} {ways[0].open.__name__} {both}",
             launches.update, types, constants, launches.WARPS, asks=True)

packed = [weights.ENCODINGS["root_ratio"], weights.ENCODINGS["unsigned"]]
kept = {"_sgd": ["signed"], "_rmsprop": ["unsigned", "signed"], "_adagrad": ["unsigned"], "_lion": ["signed"]}
full, halves = [weights.FULL_STATE] * 3, [weights.ENCODINGS["bf16"]] * 3
forms = list({id(form): form for form in weights.FORMS.values()}.values())
for form in forms:
    for half in (FLOAT32,) if form is weights.FULL else (BFLOAT16, FLOAT16):
        for ways in (full[:2], packed, halves[:2]):
            update(rules[1], 4 | 8, form, half, ways)
# Flags that compile to other code, and every form with the packed states that a rule has.
most = {"_sgd": (0, 1, 3, 4, 9, 15), "_adam": (0, 1, 7, 15), "_rmsprop": (0, 1, 2, 3, 15), "_adagrad": (0, 3), "_lion": (0,)}
for rule in rules:
    for flags in most[rule.body.__name__]:
        update(rule, flags, weights.FULL, FLOAT32, full)
    for form in forms:
        for half in (FLOAT32,) if form is weights.FULL else (BFLOAT16, FLOAT16):
            if rule is not rules[1]:
                update(rule, flags, form, half, [weights.ENCODINGS[name] for name in kept[rule.body.__name__]])
    update(rule, flags, forms[2], BFLOAT16, halves, both=False)
print(json.dumps([found, loads, spilled, specialised, shared]))
"""


@pytest.mark.parametrize("capability", [80, 90, pytest.param(100, marks=pytest.mark.slow)])
def test_every_kernel_compiles_for_a_gpu_rounds_as_ieee_says_and_fits_into_its_registers(capability):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(capability)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found, loads, spilled, specialised, shared = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 130
    assert {name: rough for name, rough in found.items() if rough} == {}
    # One program adds the sums of all tiles, and waits for memory once a round: 32 numbers of each thread are under way.
    assert min(count for name, count in loads.items() if name in ("add_up", "norm_of")) >= 32
    assert len(spilled) >= 100
    # The assembler may put one or two registers aside to do with 64, at which two programs fit where one did.
    assert {name: log for name, log in spilled.items() if log[0] > 65536 or log[1] > 8} == {}
    assert max(shared.values()) <= 2**15  # of the 99 KiB that the smallest GPU since Ampere has for a program
    assert specialised == []  # numbers of tiles: nothing is compiled anew for their values
