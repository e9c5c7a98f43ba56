#!/usr/bin/env bash
# fully_shard with set_gradient_divide_factor and set_force_sum_reduction_for_comms divides gradients twice where the mesh that
# shards has one rank, as it has with pure replication, or for experts that are dealt to as many ranks as share the data.
#
# The reduction of a mesh of one rank divides by the factor itself; forced sums then divide after the reduction once more.
#
# Seen with torch 2.13.0, and 2.11.0 alike (CPU, gloo): factor 4, a gradient of 1 in float32. On one rank 0.25 without forced sums
# and 0.0625 with them; on two ranks, with them, 0.5, which is the sum of two divided by the factor.
#
# Exits 0 while the two differ by the factor, 1 where that changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/main.py" <<'PY'
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

torch.set_num_threads(1)
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))


def gradient(forced):
    layer = nn.Linear(4, 1, bias=False)
    fully_shard(layer, mesh=mesh)
    layer.set_force_sum_reduction_for_comms(forced)
    layer.set_gradient_divide_factor(4.0)
    layer(torch.ones(1, 4)).sum().backward()
    return layer.weight.grad.full_tensor()[0, 0].item()


print("torch", torch.__version__)
found = [gradient(forced) for forced in (False, True)]
print(f"gradient of 1, factor 4: {found[0]} without forced sums, {found[1]} with them")
dist.destroy_process_group()
sys.exit(0 if found[0] == 4 * found[1] else 1)
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc_per_node 1 "$folder/main.py"
