#!/usr/bin/env bash
# make coverage: tools/coverage.sh PYTHON WORKERS [ARGS...]
# Each worker writes a file of its own (--parallel-mode), and `combine` adds them up. The report is printed also where tests
# fail; the exit code is theirs.
set -uo pipefail
python=$1 workers=$2
shift 2
"$python" -m coverage erase
OMP_NUM_THREADS=1 "$python" -m coverage run --parallel-mode -m pytest -m "not slow" -n "$workers" --dist loadfile --no-loadscope-reorder "$@"
code=$?
"$python" -m coverage combine --quiet
"$python" -m coverage report
exit $code
