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
    import triton.language as tl
    from triton.runtime import interpreter

    replace, launch, done = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    @functools.cache
    def seen(fn):
        return frozenset(value.__name__ for value in fn.__globals__.values() if value is tl or value is tl.core)

    def replaced(fn):
        if seen(fn) not in done:
            done.add(seen(fn))
            return replace(fn)
        return None  # who launches is the first, and restores what was

    def launched(*args, **kwargs):
        done.clear()
        return launch(*args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = replaced, launched
