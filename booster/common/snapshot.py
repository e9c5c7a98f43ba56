"""Keep everything that Python or torch may change in some objects, and put it back: `StateSnapshot(roots)`, later `restore()`.

    before = StateSnapshot([model, optimizer])
    train_step()                            # weights, states, counters, gradients and random numbers are others now
    before.restore()                        # and are as they were, in the same objects

Three things have to come back. What Python holds: attributes and the content of containers, found by walking from the roots.
What tensors hold: the bytes of their memory. And where random generators are, all those of a process (`random_state`). A walk
is cheap, since it copies references; the bytes are not, so they are copied at once for what the walk finds, or
(`numbers=False`) only where `memory` learns of a write before it happens. `MemorySnapshot` alone is for who knows which tensors
are written; `attributes` sets a few for a while.
"""

from __future__ import annotations

import random
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from booster.common.torch_internals.tensor_internals import storage_key


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
    numbers: list[int] = words.tolist()
    return numbers


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


_OF_TORCH = (nn.Module, Optimizer, LRScheduler)


@contextmanager
def attributes(objects: Iterable[Any], **values: Any) -> Iterator[None]:
    """Return a context in which attributes of all `objects` are `values`; afterwards they are what they were."""
    before = [(each, {name: getattr(each, name) for name in values}) for each in objects]
    for each, _ in before:
        for name, value in values.items():
            setattr(each, name, value)
    try:
        yield
    finally:
        for each, own in before:
            for name, value in own.items():
                setattr(each, name, value)


class MemorySnapshot:
    """The bytes of memory that is about to be written, as they were when `keep` was first called for it."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def keep(self, tensor: torch.Tensor) -> None:
        """Copy all of the storage of `tensor`, unless that was done."""
        storage = tensor.untyped_storage()
        # Whole storages: other tensors that are views of them are written by the same operations.
        if storage_key(tensor) not in self._kept and storage.nbytes():
            self._kept[storage_key(tensor)] = (storage, storage.clone())

    def restore(self) -> None:
        # Written as storages, because no version counter sees that: graphs that saved these tensors stay valid.
        for storage, copy in self._kept.values():
            if storage.nbytes() == copy.nbytes():  # one that was resized since is memory that somebody let go
                storage.copy_(copy)
        self._kept.clear()


class ContainerSnapshot:
    """Lists, deques, dicts and sets with what was in them, and attributes of objects."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Any, Any]] = {}

    def keep(self, container: Any) -> list[Any]:
        """Keep the content of `container` unless that was done; returns what is in it."""
        if id(container) in self._kept:
            return []
        before = dict(container) if isinstance(container, dict) else container.copy()
        self._kept[id(container)] = (container, before)
        return [*before, *before.values()] if isinstance(before, dict) else list(before)

    def restore(self) -> None:
        for container, before in self._kept.values():
            if isinstance(container, list):
                # In place: others hold these very objects.
                container[:] = before
                continue
            container.clear()
            if isinstance(container, deque):
                container.extend(before)
            else:
                container.update(before)


class StateSnapshot:
    """What can be reached from `roots`, as it is now.

    The walk follows attributes of modules, optimizers, schedulers and objects of this library, the content of containers, and
    tensors to their gradients.

    Attributes:
        memory: the bytes of tensors; who writes to others than those that were reached calls `memory.keep` before.
        numbers: whether the bytes of all tensors that are reached are copied now.
        random: whether the global random generators come back; others by `keep_generator`.
    """

    def __init__(self, roots: Iterable[Any], *, numbers: bool = True, random: bool = True) -> None:
        self.memory = MemorySnapshot()
        self._numbers = numbers
        self._random = random_state() if random else None
        self._generators: dict[torch.Generator, torch.Tensor] = {}
        self._containers = ContainerSnapshot()
        self._gradients: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        seen: dict[int, Any] = {}  # holds what it saw: an object that is gone gives its id to another
        waiting = list(roots)
        while waiting:
            each = waiting.pop()
            if id(each) not in seen:
                seen[id(each)] = each
                waiting += self._keep(each)

    def keep_generator(self, generator: torch.Generator) -> None:
        """Have `generator` come back too; called before it is used."""
        if generator not in self._generators:
            self._generators[generator] = generator.get_state()

    def restore(self) -> None:
        """Put everything back."""
        self._containers.restore()
        for tensor, grad in self._gradients.values():
            tensor.grad = grad
        self.memory.restore()
        torch.clear_autocast_cache()  # of weights as they were in between
        for generator, state in self._generators.items():
            generator.set_state(state)
        if self._random is not None:
            set_random_state(self._random)

    def _keep(self, each: Any) -> list[Any]:
        """Keep `each`; returns what is reached from it."""
        if isinstance(each, torch.Tensor):
            if self._numbers and type(each) in (torch.Tensor, nn.Parameter) and each.layout is torch.strided:
                self.memory.keep(each)
            # What autograd computed has a history instead of a `.grad`, and is freed with its graph.
            if not each.is_leaf:
                return []
            self._gradients[id(each)] = (each, each.grad)
            return [] if each.grad is None else [each.grad]
        if type(each) in (list, set, deque) or isinstance(each, dict):
            return self._containers.keep(each)
        if isinstance(each, tuple):
            return list(each)
        # Objects of others are not walked: their attributes may lead to everything there is.
        ours = type(each).__module__.startswith("booster.") and not isinstance(each, type)
        if ours and not hasattr(each, "__dict__"):  # a quantized state: its slots never change, its tensors do
            return [getattr(each, name, None) for name in getattr(type(each), "__slots__", ())]
        if ours or isinstance(each, _OF_TORCH):
            return self._containers.keep(vars(each))
        return []
