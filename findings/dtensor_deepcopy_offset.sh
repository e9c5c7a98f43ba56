#!/usr/bin/env bash
# copy.deepcopy copies a DTensor of a local tensor that begins at the start of its storage, and raises for one that begins within.
#
# An optimizer that keeps its states as parts of one flat tensor, and hands them out as DTensors, cannot be copied, as for an average
# or a second optimizer, but for the part that comes first. Plain tensors, parts of a storage as well, are copied with the offset.
#
# Seen with torch 2.13.0, and 2.11.0 and 2.15.0 alike (CPU, gloo): "Attempted to call copy_() on an invalid python storage."
#
# Exits 0 while the second half alone raises, 1 where that changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/main.py" <<'PY'
import copy
import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
flat = torch.arange(8.0)
parts = {"first half": flat[:4], "second half": flat[4:], "second half, cloned": flat[4:].clone()}
print("torch", torch.__version__)
raised = []
for name, local in parts.items():
    assert copy.deepcopy(local).equal(local)
    sharded = DTensor.from_local(local, mesh, [Shard(0)])
    try:
        found = copy.deepcopy(sharded).to_local().tolist()
    except RuntimeError as error:
        found = error
        raised.append(name)
    print(f"{name}: {found}")
dist.destroy_process_group()
sys.exit(0 if raised == ["second half"] else 1)
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc_per_node 1 "$folder/main.py"
