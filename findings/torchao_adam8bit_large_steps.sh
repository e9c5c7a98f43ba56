#!/usr/bin/env bash
# torchao's AdamW8bit: where gradients of neighbouring elements differ by a factor of 100, single steps move a weight by hundreds
# of learning rates, without a warning: of a block of 256 the second moment is rounded to zero where the first is not.
#
# Seen with torchao 0.18.0 and bitsandbytes 0.50.2 on torch 2.13.0 (CPU): largest step, in learning rates, of 30 over 65,536
# elements with random gradients, every second of them smaller by the factor. Adam in float32 makes 1.0.
#   factor                       100     10,000    1,000,000
#   torchao AdamW8bit            929      6,948          106
#   bitsandbytes Adam8bit        1.7        1.0          1.0
#
# Exits 0 while torchao moves more than 100 learning rates and bitsandbytes fewer than 3 at the factor 100, 1 otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 torchao==0.18.0 bitsandbytes==0.50.2 numpy==2.4.6
cat > "$folder/main.py" <<'PY'
import sys

import bitsandbytes
import torch
from torch import nn
from torchao.optim import AdamW8bit

LR = 1e-3
MADE = {
    "torchao": lambda param: AdamW8bit([param], lr=LR, weight_decay=0.0),
    "bitsandbytes": lambda param: bitsandbytes.optim.Adam8bit([param], lr=LR),
}
found = {}
for name, make in MADE.items():
    for factor in (1e2, 1e4, 1e6):
        torch.manual_seed(0)
        param = nn.Parameter(torch.zeros(65536))
        optimizer, scale = make(param), torch.ones(65536)
        scale[::2] = 1 / factor
        largest = 0.0
        for _ in range(30):
            before = param.detach().clone()
            param.grad = torch.randn(65536) * scale
            optimizer.step()
            largest = max(largest, float((param.detach() - before).abs().max()) / LR)
        found[name, factor] = largest
        print(f"{name}, factor {factor:g}: largest step {largest:.4g} learning rates")
sys.exit(0 if found["torchao", 1e2] > 100 and found["bitsandbytes", 1e2] < 3 else 1)
PY
"$folder/venv/bin/python" "$folder/main.py"
