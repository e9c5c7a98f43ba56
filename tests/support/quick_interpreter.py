"""Triton's interpreter without what it does again in each call of a function by a kernel, which is half of its time.

A launch has the functions of the language replaced by interpreted ones. Each call inside of it looks through the language
anew, though there is nothing left to replace: here that is done once a launch for the modules that a function sees.
"""

import functools
import os
from importlib.util import find_spec


@functools.cache
def quicken():
    """Have kernels interpreted so in this process, where they are interpreted at all."""
    if find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
        return
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    replace, launch, done = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    @functools.cache
    def seen(fn):
        return frozenset(value.__name__ for value in fn.__globals__.values() if value is tl or value is tl.core)

    def whole(tensor):
        """Of a loop over numbers: NumPy 2.5 makes none of an array with one element, as Triton before 3.7 asks it to."""
        return int(tensor.handle.data.item())

    def replaced(fn):
        if seen(fn) not in done:
            done.add(seen(fn))
            scope = replace(fn)
            tl.tensor.__index__ = whole  # restored with the others
            return scope
        return None  # who launches is the first, and restores what was

    def launched(*args, **kwargs):
        done.clear()
        return launch(*args, **kwargs)

    to_tensor = interpreter.ReduceScanOpInterface.to_tensor

    def wrapped(self, ret, dtype):
        """As `to_tensor`, where sums of int32 are no error if they wrap, as they do on a GPU; NumPy adds them in int64."""
        return to_tensor(self, np.asarray(ret).astype(interpreter._get_np_dtype(dtype)), dtype)

    interpreter.ReduceScanOpInterface.to_tensor = wrapped
    interpreter._patch_lang, interpreter.GridExecutor.__call__ = replaced, launched
