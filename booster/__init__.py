"""Mixed-precision training for PyTorch: your loop, any precision, any parallelism."""

__version__ = "0.1.0"
