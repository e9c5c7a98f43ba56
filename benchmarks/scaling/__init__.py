"""Memory and communication of large models on paper, and the formulas checked against small jobs.

    python -m benchmarks.scaling            prints the tables of docs/scaling.md
    python -m benchmarks.scaling --check    runs jobs of 2 and 4 processes and compares what they hold and send

The formulas are in `model.py`, `memory.py` and `traffic.py`, with their sources, the tables in `tables.py`; the counting is in
`bytes.py`, on the jobs of `job.py`.
"""
