"""`python -m benchmarks.parallel`; apart from `run`, because processes that are spawned do not import a `__main__`."""

from benchmarks.parallel.run import main

if __name__ == "__main__":
    main()
