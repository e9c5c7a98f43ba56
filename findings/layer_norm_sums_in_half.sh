#!/usr/bin/env bash
# torch on a CPU: the gradients of LayerNorm's weight and bias are summed over rows in the dtype of the activations, even where
# weight and bias are float32, as they are under torch.autocast.
#
# Seen with torch 2.13.0 (CPU), one thread, F.layer_norm over 8 features with float32 weight and bias, gradients of one:
#   rows      sum of bias gradients   bfloat16   float16
#   4,096     4,096                   256        2,048
#   65,536    65,536                  256        2,048
# The gradients come back as float32, so nothing shows that the sum stood still. GroupNorm's bias on the same inputs gets 65,536.
#
# Exits 0 while this is so, 1 where it changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/main.py" <<'PY'
import sys

import torch
from torch.nn import functional as F

torch.set_num_threads(1)
print("torch", torch.__version__)
found = {}
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for rows in (4096, 65536):
        x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
        weight, bias = torch.ones(8, requires_grad=True), torch.zeros(8, requires_grad=True)
        F.layer_norm(x, (8,), weight, bias).backward(torch.ones(rows, 8, dtype=dtype))
        found[dtype, rows] = bias.grad[0].item()
        print(f"{dtype}, {rows} rows: bias gradient {bias.grad[0].item():g} ({bias.grad.dtype}), right is {rows}")
same = all(found[torch.float32, rows] == rows for rows in (4096, 65536))
lost = all(found[dtype, 65536] < 0.1 * 65536 for dtype in (torch.bfloat16, torch.float16))
sys.exit(0 if same and lost else 1)
PY
"$folder/venv/bin/python" "$folder/main.py"
