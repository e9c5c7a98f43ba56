#!/usr/bin/env bash
# torch.optim.Muon with nesterov=False on bfloat16 parameters: each step divides the momentum that it keeps by its norm.
#
# The iteration takes its input by `.bfloat16()`, which of a bfloat16 tensor is the tensor itself, and normalizes it in place.
# Without Nesterov that input is the momentum buffer. In float32, and with Nesterov, a copy is normalized.
#
# Seen with torch 2.13.0 (CPU), two steps on one gradient of 8 x 8 normal numbers, lr=0.02, norm of the momentum afterwards:
#   nesterov   float32   bfloat16
#   True       0.807     0.807
#   False      0.807     0.998
# The weights that follow weigh old gradients otherwise than asked for by `momentum`, without a warning.
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

print("torch", torch.__version__)
torch.manual_seed(0)
weight, grad = torch.randn(8, 8), torch.randn(8, 8)
norms = {}
for nesterov in (True, False):
    for dtype in (torch.float32, torch.bfloat16):
        param = torch.nn.Parameter(weight.to(dtype))
        optimizer = torch.optim.Muon([param], lr=0.02, nesterov=nesterov)
        for _ in range(2):
            param.grad = grad.to(dtype)
            optimizer.step()
        norms[nesterov, dtype] = optimizer.state[param]["momentum_buffer"].float().norm().item()
        print(f"nesterov={nesterov}, {dtype}: norm of the momentum {norms[nesterov, dtype]:.3f}")
right = norms[False, torch.float32]
alike = all(abs(norms[key] - right) < 0.01 * right for key in ((True, torch.float32), (True, torch.bfloat16)))
sys.exit(0 if alike and abs(norms[False, torch.bfloat16] - right) > 0.1 * right else 1)
PY
"$folder/venv/bin/python" "$folder/main.py"
