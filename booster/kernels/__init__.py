"""The step of an optimizer in three launches of Triton kernels: what gradients are, what is decided, what is written.

Imported where a step runs on CUDA, or where Triton interprets its kernels; see docs/design/kernels.md.
"""
