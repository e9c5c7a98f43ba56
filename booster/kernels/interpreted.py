"""Whether Triton interprets kernels, on CPU tensors, in the place of compiling them: it decides so where they are defined."""

import triton

from booster.kernels.launches import decide

IS_INTERPRETED = not isinstance(decide, triton.runtime.JITFunction)
