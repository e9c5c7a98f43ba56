#!/usr/bin/env bash
# make kernels: tools/kernels.sh PYTHON WORKERS [ARGS...]
# First the tests of kernels. Then other tests whose steps kernels make wherever they can (--kernels): half weights, packed states,
# resumes, and cells of the matrix, on ranks too.
set -euo pipefail
python=$1 workers=$2
shift 2
export TRITON_INTERPRET=1 OMP_NUM_THREADS=1
matrix=tests/distributed/test_matrix.py::test_cell
cells=()
for cell in fp32-single bf16-single fp16-single fp16_naive-single bf16_naive-single fp16-DDP bf16_naive-DDP bf16_naive-FSDP fp16-ZeRO-2; do
  cells+=("$matrix[$cell]")
done
"$python" -m pytest -n "$workers" --timeout 1800 "$@" tests/unit/test_kernels*.py tests/distributed/test_kernels*.py \
  tests/unit/test_launches.py tests/unit/test_gpu_benchmark.py
"$python" -m pytest -n "$workers" --timeout 1800 --kernels -m "not slow" "$@" \
  tests/unit/test_{naive_model,naive_strategy,packed_states,masters_resume,resume}.py "${cells[@]}"
