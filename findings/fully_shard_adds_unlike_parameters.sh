#!/usr/bin/env bash
# fully_shard adds the gradients of unlike parameters together where ranks use different branches of one model.
#
# A mixture of two experts of one shape: rank 0 calls the first with ones, rank 1 the second with hundreds. Each expert's average over
# the ranks is 0.5 and 50. Each rank sends the gradients that it has, one after the other, and they meet by their place, not by name.
#
# Seen with torch 2.13.0, and 2.11.0 alike (CPU, gloo), without an error or a warning: rank 0 holds 50.5 for its part of the first
# expert and no gradient of the second; rank 1 holds no gradient of the first and 50.5 for its part of the second.
# set_reduce_scatter_unused_params, which 2.13 has, gives 0.5 and 50 on both; it is off.
#
# Exits 0 while that is so, 1 where it changed.
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
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2,))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 2, bias=False)
        self.second = nn.Linear(4, 2, bias=False)

    def forward(self, x):
        return (self.first if rank == 0 else self.second)(x)


def gradients(asked):
    model = fully_shard(Experts(), mesh=mesh)
    if asked:
        model.set_reduce_scatter_unused_params(True)
    model(torch.full((1, 4), 1.0 if rank == 0 else 100.0)).sum().backward()
    return [None if p.grad is None else p.grad.to_local()[0, 0].item() for p in (model.first.weight, model.second.weight)]


APART = [[50.5, None], [None, 50.5]]
RIGHT = [[0.5, 50.0], [0.5, 50.0]]
found = []
for asked in (False, True):
    of_ranks = [None, None]
    dist.all_gather_object(of_ranks, gradients(asked))
    found.append(of_ranks)
if rank == 0:
    print("torch", torch.__version__)
    print("by default  ", found[0])
    print("when asked  ", found[1])
dist.destroy_process_group()
sys.exit(0 if found == [APART, RIGHT] else 1)
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc_per_node 2 "$folder/main.py"
