#!/usr/bin/env bash
# torch's grouped_mm, by which transformers multiplies experts: kernels on CPUs take float32, float16 and bfloat16, but the
# function that computes shapes for FakeTensorMode and the meta device takes bfloat16 alone. A float32 mixture of experts runs
# eagerly, and fails wherever shapes are computed without data: estimates of memory, pipelines, deferred initialization.
#
# Seen with torch 2.13.0 (CPU), 8 x 16 rows in two groups, two matrices of 16 x 32:
#   dtype      eager        under FakeTensorMode
#   float32    8 x 32       RuntimeError: Expected inputs of BF16 type
#   float16    8 x 32       RuntimeError: Expected inputs of BF16 type
#   bfloat16   8 x 32       8 x 32
#
# Exits 0 while this is so, 1 where it changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/main.py" <<'PY'
import logging
import sys

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

logging.disable(logging.ERROR)  # torch logs the traceback of the second error too
print("torch", torch.__version__)
found = {}
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    rows, experts = torch.ones(8, 16, dtype=dtype), torch.ones(2, 16, 32, dtype=dtype)
    ends = torch.tensor([4, 8], dtype=torch.int32)
    eager = tuple(F.grouped_mm(rows, experts, offs=ends).shape)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(each) for each in (rows, experts, ends)]
        try:
            fake = tuple(F.grouped_mm(*fakes[:2], offs=fakes[2]).shape)
        except RuntimeError as error:
            fake = str(error).splitlines()[0][:36]
    found[dtype] = eager, fake
    print(f"{dtype}: eager {eager}, fake {fake}")
right = all(eager == (8, 32) for eager, _ in found.values())
refused = [dtype for dtype, (_, fake) in found.items() if fake != (8, 32)]
sys.exit(0 if right and refused == [torch.float32, torch.float16] else 1)
PY
"$folder/venv/bin/python" "$folder/main.py"
