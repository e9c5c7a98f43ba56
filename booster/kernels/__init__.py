"""The step of an optimizer in three launches of Triton kernels: what gradients are, what is decided, what is written.

Imported on CUDA, and where `fused_optimizer="triton"` asks for them; see docs/design/kernels.md.
"""
