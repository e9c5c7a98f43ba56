#!/usr/bin/env bash
# torch.distributed.checkpoint: tensors that every rank has whole, such as the running statistics of BatchNorm under
# DistributedDataParallel, are written by different ranks, tensor by tensor, and where ranks differ the file mixes them.
#
# Seen with torch 2.13.0 (CPU, gloo), two processes, six equal-sized tensors that hold their rank's number: those of layers
# 0, 2 and 4 are read back as rank 0's, those of layers 1, 3 and 5 as rank 1's. The save planner deals replicated tensors out to
# even the writing, without a look at their values; dcp.save says nothing. A model that is read back has the buffers of no rank.
#
# Exits 0 while this is so, 1 where it changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/main.py" <<'PY'
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp


def tables(value):
    return {f"layer{index}.running_mean": torch.full((4,), value) for index in range(6)}


def run(rank, folder):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    dcp.save(tables(float(rank)), checkpoint_id=f"{folder}/checkpoint")
    dist.destroy_process_group()


if __name__ == "__main__":
    print("torch", torch.__version__)
    mp.spawn(run, (sys.argv[1],), nprocs=2)
    loaded = tables(-1.0)
    dcp.load(loaded, checkpoint_id=f"{sys.argv[1]}/checkpoint", no_dist=True)
    ranks = [int(value[0]) for value in loaded.values()]
    for name, rank in zip(loaded, ranks):
        print(f"{name}: written by rank {rank}")
    sys.exit(0 if set(ranks) == {0, 1} else 1)
PY
"$folder/venv/bin/python" -W ignore "$folder/main.py" "$folder"
