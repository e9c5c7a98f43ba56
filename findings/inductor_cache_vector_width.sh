#!/usr/bin/env bash
# torch.compile on CPUs: a graph cached for vectors of 512 bits is found again where vectors have 256, as on a cluster that
# shares TORCHINDUCTOR_CACHE_DIR between nodes or bakes it into an image. The source keeps its steps of 16 floats and is compiled
# for registers of 8, so half of the elements are never written. Neither an error nor a warning.
#
# Seen with torch 2.13.0 (CPU) on a CPU with AVX512, x * 2 + 1 over 64 floats, one empty folder for two processes, the second
# of which has ATEN_CPU_CAPABILITY=avx2 (which is what a CPU with AVX2 alone is to torch):
#   first    largest error 0
#   second   largest error 127, 32 of the 64 wrong
# With an empty folder of its own the second is right too. Seen the other way round, AVX2 first, the process ended.
# What helps: one folder per kind of CPU, or options={"cpp.simdlen": 512 or 256}, which is part of the cache's key.
#
# Needs a CPU with AVX512. Exits 0 while this is so, 1 where it changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/main.py" <<'PY'
import sys

import torch

options = {"cpp.simdlen": int(sys.argv[1])} if sys.argv[1:] else None
x = torch.arange(64, dtype=torch.float32)
wrong = (torch.compile(lambda x: x * 2 + 1, dynamic=False, options=options)(x) != x * 2 + 1).nonzero().flatten().tolist()
print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, options {options}: {len(wrong)} of 64 wrong", file=sys.stderr)
print(len(wrong))
PY
run() { TORCHINDUCTOR_CACHE_DIR="$folder/$1" ATEN_CPU_CAPABILITY="$2" "$folder/venv/bin/python" "$folder/main.py" ${3:-}; }
first=$(run shared avx512)
second=$(run shared avx2)
own=$(run own avx2)
[ "$(run named avx512 512) $(run named avx2 256)" = "0 0" ] && named=right || named=wrong
echo "shared folder: $first wrong, then $second wrong; own folder: $own wrong; width in the options: $named"
[ "$first" = 0 ] && [ "$second" = 32 ] && [ "$own" = 0 ] && [ "$named" = right ]
