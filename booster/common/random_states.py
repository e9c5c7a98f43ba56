"""The states of all random number generators of a process."""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def random_state() -> dict[str, Any]:
    """Return the states of python's, torch's and every CUDA device's generator, and numpy's where it is imported."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = list(torch.cuda.get_rng_state_all())
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, words, position, has_gauss, cached = numpy.random.get_state(legacy=True)
        keys = torch.from_numpy(words.astype("int64"))
        state["numpy"] = {"name": name, "words": keys, "position": position, "gauss": has_gauss, "cached": cached}
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Continue where `random_state` was taken. CUDA devices that this process lacks, and numpy where absent, are left out."""
    # Half of a state that is refused may be set already.
    before = random_state()
    try:
        _set(state)
    except Exception as error:
        _set(before)
        # Raises ValueError, with no generator touched, for what `random_state` did not give.
        raise ValueError(f"this is no state of random number generators: {type(error).__name__}: {error}") from error


def _set(state: dict[str, Any]) -> None:
    random.setstate(of_python(state["python"]))
    torch.set_rng_state(of_torch(state["torch"]))
    if torch.cuda.is_available():
        for device, value in list(enumerate(state.get("cuda", [])))[: torch.cuda.device_count()]:
            torch.cuda.set_rng_state(of_torch(value), device)
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        own = state["numpy"]
        if not (isinstance(own["position"], int) and 0 <= own["position"] <= len(own["words"])):
            raise ValueError(f"numpy's position is {own['position']!r}")
        words = numpy.array(_words(own["words"]), dtype="uint32")
        if len(words) != len(numpy.random.get_state(legacy=True)[1]):
            raise ValueError(f"numpy has {len(words)} words")
        numpy.random.set_state((own["name"], words, own["position"], own["gauss"], own["cached"]))


def of_python(state: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what `random.setstate` is to be given; raises TypeError or ValueError for what no generator was in."""
    if not isinstance(state["gauss"], (float, type(None))):  # python takes anything, and numpy any position
        raise TypeError(f"python's next normal number is {state['gauss']!r}")
    if state["version"] != random.getstate()[0]:  # an earlier one python would make something else of
        raise ValueError(f"python's version is {state['version']!r}")
    return state["version"], tuple(_words(state["words"])), state["gauss"]


def of_torch(state: torch.Tensor) -> torch.Tensor:
    """Return what a generator of torch is to be given; raises TypeError for numbers that would be cut to bytes."""
    if not isinstance(state, torch.Tensor) or state.dtype != torch.uint8:
        raise TypeError(f"torch's bytes are {getattr(state, 'dtype', type(state).__name__)}")
    return state.cpu()


def _words(words: torch.Tensor) -> list[int]:
    """The numbers of a generator, which would be cut to its width without a word."""
    # The words have 32 bits, and are kept in int64.
    if words.dtype != torch.int64 or bool(((words < 0) | (words >= 2**32)).any()):
        raise ValueError(f"its words are {words.dtype}, or not all of 32 bits")
    found: list[int] = words.tolist()
    return found


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[Callable[[int], None]]:
    """Inside, all generators begin at `seed`; afterwards they are where they were. Yields what seeds them anew."""
    if device.type == "cuda":
        torch.cuda.init()  # the state of a device that was never used is not known
    before = random_state()

    def begin(seed: int) -> None:
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.manual_seed_all(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            # numpy takes 32 bits.
            numpy.random.seed(seed % 2**32)

    try:
        begin(seed)
        yield begin
    finally:
        set_random_state(before)


class SharedRandom:
    """Has the ranks that divide the layers of `module` draw alike in its forward passes, whatever each of them drew before.

    Passes run from a state of torch's generators that goes on from pass to pass; outside of them each rank has its own.
    Python's and numpy's generators are left alone. share: gives the bytes of the first of these ranks to all, in place; called
    in the first pass. copy: which copy of the model this is; others draw otherwise.
    """

    def __init__(
        self, module: nn.Module, device: torch.device, share: Callable[[torch.Tensor], None], *, copy: int
    ) -> None:
        self._device, self._share, self._copy = device, share, copy
        self._depth = 0
        self._own: list[torch.Tensor] = []
        self.state: list[torch.Tensor] | None = None  # of the CPU's generator, and the GPU's
        module.register_forward_pre_hook(torch.compiler.disable(self._enter), prepend=True)
        module.register_forward_hook(torch.compiler.disable(self._exit), always_call=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedRandom:
        return self  # a process group cannot be copied

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            self._own = self._read()
            if self.state is None:
                self.state = self._first()
            self._write(self.state)

    def _exit(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1
        if not self._depth:
            self.state = self._read()
            self._write(self._own)

    def _first(self) -> list[torch.Tensor]:
        states = [state.clone() for state in self._own]
        for state in states:
            self._share(state)
        if not self._copy:
            return states
        seed = zlib.crc32(bytes(states[0].tolist()) + self._copy.to_bytes(4, "big"))
        return [torch.Generator(device).manual_seed(seed).get_state() for device in self._devices()]

    def _devices(self) -> list[torch.device]:
        return [torch.device("cpu"), *[self._device] * (self._device.type == "cuda")]

    def _read(self) -> list[torch.Tensor]:
        if self._device.type == "cuda":
            return [torch.get_rng_state(), torch.cuda.get_rng_state(self._device)]
        return [torch.get_rng_state()]

    def _write(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(states[1], self._device)


def shared_random(model: nn.Module) -> list[SharedRandom]:
    """Return what ranks that divide layers of `model` draw by, in the order of its modules."""
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    owners = [getattr(getattr(hook, "__wrapped__", hook), "__self__", None) for hook in hooks]
    return [owner for owner in owners if isinstance(owner, SharedRandom)]
