"""`python -m benchmarks.scaling`; apart from `tables`, because processes that are spawned do not import a `__main__`."""

from benchmarks.scaling.tables import main

if __name__ == "__main__":
    main()
