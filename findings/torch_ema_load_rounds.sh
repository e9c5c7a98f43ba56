#!/usr/bin/env bash
# torch-ema: an average that was made of a float32 model keeps float32 averages when the model's weights become half; its
# load_state_dict() rounds them to the dtype that the weights have then, without a warning. A resumed run goes on from other
# averages than the one that was saved, off by up to half a step of bfloat16, and averages in bfloat16 from then on.
#
# Seen with torch-ema 0.3 on torch 2.13.0 (CPU), of 4,096 averages after 20 updates at a decay of 0.99:
#   saved torch.float32, loaded torch.bfloat16, largest difference in parts of the number 0.0038
#   after 200 more updates towards weights of 1.0078, from 1.0: float32 1.00677, as loaded 1
#
# Exits 0 while the loaded averages are rounded, and stay where float32 ones move, 1 otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 torch-ema==0.3 numpy==2.4.6
cat > "$folder/main.py" <<'PY'
import copy
import sys

import torch
from torch import nn
from torch_ema import ExponentialMovingAverage

torch.manual_seed(0)


def averaged(weights):
    param = nn.Parameter(weights)
    average = ExponentialMovingAverage([param], decay=0.99, use_num_updates=False)
    param.data = param.data.to(torch.bfloat16)
    return param, average


param, average = averaged(torch.randn(4096))
for _ in range(20):
    with torch.no_grad():
        param.add_(0.1 * torch.randn(4096).to(torch.bfloat16))
    average.update()
saved = copy.deepcopy(average.state_dict())
param, again = averaged(torch.zeros(4096))
again.load_state_dict(copy.deepcopy(saved))
right, found = saved["shadow_params"][0], again.shadow_params[0]
off = float(((found.float() - right) / right).abs().max())
print(f"saved {right.dtype}, loaded {found.dtype}, largest difference in parts of the number {off:.2g}")

ends = []
for loads in (False, True):
    param, average = averaged(torch.ones(8))
    if loads:
        average.load_state_dict(copy.deepcopy(average.state_dict()))
    param.data.fill_(1.0078125)
    for _ in range(200):
        average.update()
    ends.append(float(average.shadow_params[0][0]))
print(f"after 200 more updates towards weights of 1.0078, from 1.0: float32 {ends[0]:.6g}, as loaded {ends[1]:.6g}")
sys.exit(0 if found.dtype == torch.bfloat16 and off > 1e-3 and ends[0] - ends[1] > 1e-3 else 1)
PY
"$folder/venv/bin/python" "$folder/main.py"
