"""What a step launches on a GPU, counted on CPU tensors that take the path of one: `python -m benchmarks.launches`.

An operation of torch counts as one launch, unless it makes a view or empty memory, and so does one on a list of tensors; a
Triton kernel where it runs interpreted (`TRITON_INTERPRET=1`). What is copied to the host, and what the host reads of a device,
is counted by itself: `waits` must be nothing but for what the step before has sent to the host.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any
from unittest import mock

from benchmarks.gpu.ways import Tiny
from benchmarks.waits import as_on_a_gpu
from booster.common.devices import HostCopy
from booster.common.torch_internals.tensor_internals import TorchDispatchMode

_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "resize_", "set_"}
_FREE |= {"_record_function_enter_new", "_record_function_exit"}
_WAITS = {"_local_scalar_dense", "is_nonzero", "equal", "item"}


class Launches(TorchDispatchMode):
    """While entered, counts by name in `found` what a device is given to do, and in `waits` what the host waits for.

    copies: to the host, which nothing waits for. tables: of addresses of gradients that changed, each a copy to the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.copies = self.tables = 0
        self._at_home: set[int] = set()  # memory of the host, by address
        self._is_aside = False

    @property
    def total(self) -> int:
        return sum(self.found.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _WAITS:
            self.waits[name] += args[0].untyped_storage().data_ptr() not in self._at_home
        elif not self._is_aside and not func.is_view and name not in _FREE:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Any:
        self._held = ExitStack()
        copied, read = HostCopy.__init__, HostCopy.tensor

        def copy(this: HostCopy, tensor: Any) -> None:
            self.copies += 1
            self._aside(copied, this, tensor)

        def tensor(this: HostCopy) -> Any:
            found = read(this)
            self._at_home.add(found.untyped_storage().data_ptr())
            return found

        self._held.enter_context(mock.patch.object(HostCopy, "__init__", copy))
        self._held.enter_context(mock.patch.object(HostCopy, "tensor", tensor))
        if interprets():
            from triton.runtime.interpreter import InterpretedFunction

            from booster.kernels.segments import Table

            launch, follow = InterpretedFunction.__getitem__, Table.set_gradients

            def followed(this: Table, addresses: Any) -> None:
                self.tables += 1
                self._aside(follow, this, addresses)

            self._held.enter_context(mock.patch.object(Table, "set_gradients", followed))
            counted = mock.patch.object(
                InterpretedFunction, "__getitem__", lambda kernel, grid: self._counted(kernel, launch(kernel, grid))
            )
            self._held.enter_context(counted)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._held.close()

    def _counted(self, kernel: Any, launch: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> None:
            self.found[f"Triton: {kernel.fn.__name__}"] += 1
            self._aside(launch, *args, **kwargs)

        return counted

    def _aside(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._is_aside = True
        try:
            return function(*args, **kwargs)
        finally:
            self._is_aside = False


def interprets() -> bool:
    """Return whether Triton runs kernels on CPU tensors here."""
    return find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"


def of_step(make: Callable[[], Callable[[], object]]) -> Launches:
    """Return what one step of `make()` launches, once it has run a few times."""
    with as_on_a_gpu():
        step = make()
        for _ in range(4):
            step()
        with Launches() as launches:
            step()
    return launches


PRECISIONS = ("fp32", "bf16", "fp16")
CELLS = [(precision, clip) for precision in PRECISIONS for clip in (False, True)]


def by_hand(precision: str, clip: bool) -> Launches:
    """What a tiny step launches in a loop by hand, with a fused optimizer."""
    return of_step(lambda: Tiny("cpu").by_hand(precision, clip=clip))


def ours(precision: Any, clip: bool, **options: Any) -> Launches:
    """What it launches under a Booster with these options."""
    return of_step(lambda: Tiny("cpu").ours(precision, clip=clip, **options))


def main() -> None:
    ways: dict[str, Callable[[str, bool], Launches]] = {"by hand, fused": by_hand, "by torch's kernels": ours}
    if interprets():
        ways["by Triton kernels"] = lambda precision, clip: ours(precision, clip, fused_optimizer="triton")
    print("| launches (waits) of a tiny step | " + " | ".join(p + ", clip" * c for p, c in CELLS) + " |")
    print("|---" * (1 + len(CELLS)) + "|")
    for name, of in ways.items():
        found = [of(*cell) for cell in CELLS]
        print(f"| {name} | " + " | ".join(f"{each.total} ({each.waits.total()})" for each in found) + " |")


if __name__ == "__main__":
    main()
