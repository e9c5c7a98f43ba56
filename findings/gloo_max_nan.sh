#!/usr/bin/env bash
# torch.distributed, backend gloo: an all_reduce with MAX or MIN keeps a NaN of rank 0 and drops one of any other rank.
#
# Seen with torch 2.13.0 (CPU), two processes, one float32 element each:
#   NaN on rank 0, 1.0 on rank 1: both ranks get NaN, for MAX and for MIN
#   1.0 on rank 0, NaN on rank 1: both ranks get 1.0, for MAX and for MIN
# torch.maximum and torch.minimum return NaN in both orders. Ranks that agree on an overflow by the maximum of their norms miss
# one that another rank than 0 has alone; a flag, isfinite as 0 or 1, travels safely.
#
# Exits 0 while this is so, 1 where it changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/main.py" <<'PY'
import math
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, folder, found):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    for where in (0, 1):
        for name in ("MAX", "MIN"):
            value = torch.tensor([math.nan if rank == where else 1.0])
            dist.all_reduce(value, getattr(dist.ReduceOp, name))
            found[rank, where, name] = value.item()
    dist.destroy_process_group()


if __name__ == "__main__":
    print("torch", torch.__version__)
    with mp.Manager() as manager:
        found = manager.dict()
        mp.spawn(run, (sys.argv[1], found), nprocs=2)
        for (rank, where, name), value in sorted(found.items()):
            print(f"NaN on rank {where}, {name}: rank {rank} gets {value}")
        kept = {where: all(math.isnan(v) for (_, w, _), v in found.items() if w == where) for where in (0, 1)}
        lost = all(v == 1.0 for (_, w, _), v in found.items() if w == 1)
    sys.exit(0 if kept[0] and lost else 1)
PY
"$folder/venv/bin/python" "$folder/main.py" "$folder"
