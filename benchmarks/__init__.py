"""Measurements behind what the documentation claims; run one as `python -m benchmarks.NAME` in the repository."""
