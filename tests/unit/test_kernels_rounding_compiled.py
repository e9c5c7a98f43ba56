"""Kernels that round matrices compile for GPUs that are not there; in processes of their own, as interpreted ones cannot be."""

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
COMPILE = r"""
import inspect, json, re, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from booster.kernels import matrices
from booster.kernels import matrix_kernels as rounding
from booster.number_formats.number_format import E4M3, E5M2, INT8

TARGET = GPUTarget("cuda", int(sys.argv[1]), 32)
PTXAS = get_ptxas(*[int(sys.argv[1])] * len(inspect.signature(get_ptxas).parameters)).path  # of the GPU since Triton 3.6
found = {}

# What takes subnormal numbers for zero, or divides or takes a reciprocal roughly; only whole parts, of magnitudes, may.
ROUGH = re.compile(r"^\s*(?!cvt\.rmi)[a-z][\w.]*\.(?:ftz|approx|full)\b", re.M)

def compiled(name, kernel, types, constants, warps=4):
    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    options = {"enable_fp_fusion": False, "num_warps": warps}
    made = triton.compile(ASTSource(kernel, signature, constants), TARGET, options=options)
    ptx = made.asm["ptx"]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [PTXAS, "-v", "--fmad=false", "--gpu-name=sm_" + sys.argv[1] + "a" * (sys.argv[1] != "80"), "-o", "/dev/null"]
        said = subprocess.run([*command, file.name], capture_output=True, text=True, check=True).stderr
    spills = int(re.search(r"(\d+) bytes spill stores", said)[1]) > 32  # eight numbers of a thread
    found[name] = {"fused": "fma." in ptx, "spills": spills or "st.local" in ptx, "rough": bool(ROUGH.search(ptx)),
                   "shared": made.metadata.shared}

POINTERS = {0: "*fp32", 1: "*bf16", 2: "*fp16"}
PLACES = dict.fromkeys("rows columns row_stride column_stride".split(), "i32")

def given(name, type_, is_there):
    return ({name: type_}, {}) if is_there else ({}, {name: None})

def measure(kind, dtype, known):
    sizes = {"KIND": kind, "DTYPE": dtype, "BM": 64, "BN": 128}
    types, none = given("given", "*fp32", known)
    compiled(f"largest_of {kind} {dtype} {known}", rounding.largest_of,
             {"x": POINTERS[dtype], "partials": "*i32", **types, **PLACES, "splits": "i32"}, {**sizes, **none})

def write(kind, over, target, dtype, power=False, turned=False, known=False):
    down, across = over
    sizes = dict(zip(("BM", "BN"), matrices.tile_of(kind, down), strict=True))
    constants = {"KIND": kind, "POWER": power, "DOWN": down, "ACROSS": across, "BLOCK": 256, "DTYPE": dtype, **sizes}
    types = {"x": POINTERS[dtype], "values": "*i8", "scales": "*fp32", **PLACES}
    types |= dict.fromkeys(("filled", "transposed_filled", "splits"), "i32")
    for name, type_, there in (("transposed", "*i8", turned), ("partials", "*i32", kind != rounding.BLOCKS),
                               ("given", "*fp32", known), ("seen", "*i32", known)):
        own, none = given(name, type_, there)
        types, constants = {**types, **own}, {**constants, **none}
    compiled(f"write {kind} {over} {target} {dtype} {power} {turned} {known}", rounding.write, types,
             {**constants, **matrices.form_of(target)}, warps=matrices.warps_of(kind, down))

for dtype in POINTERS:
    for kind in (rounding.TENSOR, rounding.ROW):
        measure(kind, dtype, False)
measure(rounding.TENSOR, 1, True)
for dtype in POINTERS:
    write(rounding.TENSOR, (1, 1), E4M3, dtype)
for target in (E4M3, E5M2):
    for turned in (False, True):
        for known in (False, True):
            write(rounding.TENSOR, (1, 1), target, 1, turned=turned, known=known)
write(rounding.TENSOR, (1, 1), E4M3, 1, power=True)
write(rounding.ROW, (1, 1), E4M3, 1, power=True)
write(rounding.ROW, (1, 1), INT8, 1)
write(rounding.BLOCKS, (1, 128), E4M3, 1)
write(rounding.BLOCKS, (1, 32), E4M3, 1, power=True)
write(rounding.BLOCKS, (128, 128), E4M3, 1)
write(rounding.BLOCKS, (128, 128), E4M3, 0, power=True)
types, none = given("largest", "*fp32", True)
for there in (True, False):
    types, none = given("largest", "*fp32", there)
    types = {"seen": "*i32", "count": "i32", "given": "*fp32", **types, "scale": "*fp32"}
    compiled(f"note {there}", rounding.track_largest, types,
             {"LARGEST": 448.0, "BLOCK": 256, **none})
for signs in (-1, 0b1101000010110100):
    for there in (True, False):
        own, none = given("sums", "*i32", there)
        sizes = {"SIGNS": signs, "DTYPE": 1, **dict(zip(("BM", "BN"), matrices.FOURS_TILE, strict=True)), **none}
        compiled(f"look {signs} {there}", rounding.largest_of_rotated,
                 {"x": "*bf16", "partials": "*i32", **own, **PLACES, "splits": "i32"}, sizes)
        for down in (1, 16):
            types = {"x": "*bf16", "values": "*bf16", **dict.fromkeys(("scales", "outer"), "*fp32"), "partials": "*i32"}
            types |= {**own, **PLACES, "filled": "i32", "parts": "i32"}
            compiled(f"write_fours {signs} {there} {down}", rounding.write_fours, types, {**sizes, "DOWN": down, "BLOCK": 256},
                     warps=matrices.FOURS_WARPS)
# Whole numbers that are 1 are constants of a kernel, unless it says otherwise; those of its own making are none.
ONES = {**dict.fromkeys(PLACES, 1), "DTYPE": 1, "BM": 64, "BN": 128}
compiled("largest_of, ones", rounding.largest_of, {"x": "*bf16", "partials": "*i32", "splits": "i32"},
         {**ONES, "given": None, "KIND": rounding.ROW})
compiled("write, ones", rounding.write,
         {"x": "*bf16", "values": "*i8", "scales": "*fp32", "partials": "*i32", "splits": "i32"},
         {**ONES, **dict.fromkeys(("transposed", "given", "seen")), "filled": 1, "transposed_filled": 1, "KIND": rounding.ROW,
          "POWER": True, "DOWN": 1, "ACROSS": 1, "BLOCK": 256, **matrices.form_of(E4M3)},
         warps=matrices.warps_of(rounding.ROW, 1))
ONES |= {"SIGNS": 5, **dict(zip(("BM", "BN"), matrices.FOURS_TILE, strict=True))}
compiled("look, ones", rounding.largest_of_rotated, {"x": "*bf16", "partials": "*i32", "sums": "*i32", "splits": "i32"}, ONES)
compiled("write_fours, ones", rounding.write_fours,
         {"x": "*bf16", "values": "*bf16", **dict.fromkeys(("scales", "outer"), "*fp32"),
          **dict.fromkeys(("partials", "sums"), "*i32"), **dict.fromkeys(("filled", "parts"), "i32")},
         {**ONES, "DOWN": 1, "BLOCK": 256}, warps=matrices.FOURS_WARPS)
kernels = rounding.largest_of, rounding.write, rounding.track_largest, rounding.largest_of_rotated, rounding.write_fours
always = {each.__name__: [p.name for p in each.params if p.do_not_specialize] for each in kernels}
anywhere = {each.__name__: [p.name for p in each.params if p.do_not_specialize_on_alignment] for each in kernels}
print(json.dumps([found, always, anywhere]))
"""


@pytest.mark.parametrize("capability", [80, 90, pytest.param(100, marks=pytest.mark.slow)])
def test_every_form_compiles_for_a_gpu_and_fuses_no_multiplication_with_an_addition(capability):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(capability)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found, always, anywhere = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 42
    assert [name for name, how in found.items() if how["fused"] or how["spills"] or how["rough"]] == []
    # Counts that change with the batch, and places among the scales of all layers, make no kernel anew.
    counts = {
        "largest_of": "splits",
        "write": "splits",
        "track_largest": "count",
        "largest_of_rotated": "splits",
        "write_fours": "parts",
    }
    assert always == {name: [count] for name, count in counts.items()}
    scales = {"largest_of": ["given"], "write": ["given"], "track_largest": ["given", "largest"]}
    assert anywhere == {name: scales.get(name, []) for name in counts}
    assert max(how["shared"] for how in found.values()) <= 2**16
