"""What a GPU says of everything that was built without one, in parts of at most eight minutes: `python -m benchmarks.gpu`.

The runbook is docs/design/gpu.md. A part is a list of rows. Its own process makes them one after the other, and writes
each as it comes to `rows.jsonl` in the folder of `--out`; who started it watches. A row that ends the process, as one after
which CUDA can do nothing more, or that does not end, is written down as such, and another process goes on behind it. So a part
that is killed keeps its rows, and one that is started again makes those that are missing.

In reading order:

    __main__.py      the command
    row.py           what a row is; the file of rows
    supervisor.py    processes that make rows, and what becomes of those that die
    worker.py        such a process
    verdict.py       tables, the last line of a part, and lines for booster/kernels/switches.py
    card.py          the card, its clocks, and time and memory on it
    models.py        what is trained
    ways.py          a step of them: by hand, by peers, by us
    timed_rows.py    parts 2, 3 and 5: ways beside each other
    right_rows.py    part 1: kernels next to torch and float64
    low_rows.py      parts 4 and 9: low precision
    memory_rows.py   part 6: memory beside its estimate
    suite_rows.py    part 7: the tests of tests/gpu
    rank_rows.py     part 8: two ranks that share the card
"""
