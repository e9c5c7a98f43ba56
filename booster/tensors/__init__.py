"""Tensors and containers of them: walked, laid flat, cast, cut into micro-batches."""
