"""A CUDA device that is none: tensors "on it" are in the host's memory and say `cuda:0`; what a device refuses is refused.

What asks for the type of a device takes its branch for GPUs, with numbers, in any build of torch. Inside `pretended`:

- tensors of two devices in one operation raise, but for what CUDA takes: copies, numbers, and indices;
- a copy to the host that nothing waits for brings its numbers when something waits: until then the memory holds `UNREAD`;
- it must go to pinned memory, and pinned memory must not be written to while the device may still read it;
- `syncs` counts what makes the host wait, numbers of the host that become a tensor of the device among them.

What runs on a GPU alone is not here: graphs, parallel streams, Triton's kernels.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from booster.mixed_precision import hardware

DEVICE = torch.device("cuda", 0)
UNREAD = 123
MAKERS = (
    "empty zeros ones full tensor as_tensor arange rand randn randint randperm eye linspace empty_strided scalar_tensor"
)
LIKE = "empty_like zeros_like ones_like full_like rand_like randn_like"
NEW = "new_empty new_zeros new_ones new_full new_tensor"
_NEW_TENSOR = torch.Tensor.new_tensor
ANYWHERE = ("copy_", "_to_copy", "_foreach_copy_", "set_", "_has_compatible_shallow_copy_type", "is_same_size", "equal")
INDEXED = ("index", "index_put_", "index_put", "_unsafe_index", "_index_put_impl_")
READS = ("_local_scalar_dense", "nonzero", "equal", "unique_dim", "_unique2", "masked_select", "is_nonzero")


def lies(tensor: torch.Tensor) -> bool:
    """Whether it is on the device."""
    return getattr(tensor.untyped_storage(), "on_device", False) if torch._C._has_storage(tensor) else False


def put(tensor: torch.Tensor, *, there: bool = True) -> torch.Tensor:
    tensor.untyped_storage().on_device = there
    return tensor


def _is_device(device: Any) -> bool:
    return device is not None and (isinstance(device, int) or torch.device(device).type == "cuda")


class Pretended(TorchDispatchMode):
    """The device. syncs: how often the host waited."""

    def __init__(self) -> None:
        super().__init__()
        self.syncs = 0
        self._on_the_way: list[tuple[torch.Tensor, torch.Tensor]] = []  # target on the host, what arrives
        self._read: list[tuple[torch.Tensor, torch.Tensor]] = []  # pinned memory, what it held

    def wait(self, count: int | None = None) -> None:
        """Have the first `count` copies arrive that are on their way, or all."""
        self.syncs += 1
        arrived, self._on_the_way = self._on_the_way[:count], self._on_the_way[len(self._on_the_way[:count]) :]
        with mock.patch.object(self, "_is_off", True, create=True):
            for target, values in arrived:
                target.copy_(values)
            for pinned, held in self._read:
                assert torch.equal(_bits(pinned), _bits(held)), "pinned memory was written to while the device read it"
        self._read.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(self, "_is_off", False):
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        there = [lies(each) for each in given]
        if func.namespace == "aten" and any(there):
            self._check(func, name, given, there)
        if name in ("copy_", "_foreach_copy_"):
            self._note_copies(args, kwargs)
            if name == "copy_" and self._on_the_way and self._on_the_way[-1][0] is args[0]:
                return args[0]
        if name in READS and any(there):
            self.wait()
        run = _wide_mm if func is torch.ops.aten.mm.dtype else func
        made = run(*args, **kwargs)
        known = {each.untyped_storage()._cdata for each in given}
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor) and any(there) and each.untyped_storage()._cdata not in known:
                put(each)
        return made

    def _check(self, func: Any, name: str, given: list[torch.Tensor], there: list[bool]) -> None:
        if name in ANYWHERE or all(there):
            return
        if name in INDEXED and there[0]:
            return
        if all(here or not each.dim() for each, here in zip(given, there, strict=True)):
            return
        said = [f"{tuple(each.shape)} on {each.device}" for each in given]
        raise RuntimeError(f"Expected all tensors to be on the same device, but {func} got {', '.join(said)}")

    def _note_copies(self, args: Any, kwargs: Any) -> None:
        waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        lists = isinstance(args[0], (list, tuple))
        for target, source in zip(*args[:2], strict=True) if lists else [args[:2]]:
            if lies(source) and not lies(target):
                if waits or lists:
                    self.wait()
                    continue
                assert _is_pinned(target), "a copy to memory that is not pinned, which nothing waits for"
                # What the device read before, it read before this: streams are one here.
                self._read = [each for each in self._read if not _is_one(each[0], target)]
                self._on_the_way.append((target, source.to(target.dtype).clone()))
                with mock.patch.object(self, "_is_off", True, create=True):
                    target.view(torch.uint8).fill_(UNREAD) if target.dim() else target.fill_(UNREAD)
            elif lies(target) and not lies(source) and source.dim():
                if not waits and _is_pinned(source):
                    self.note_read(source)
                else:
                    self.syncs += 1

    def waiting(self, read: Callable[..., Any]) -> Callable[..., Any]:
        """`read` of a tensor, which shows no operation."""

        def reads(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if lies(tensor):
                self.wait()
            return read(tensor, *args, **kwargs)

        return reads

    def copying(self, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """`make` of numbers of the host, for whose copy to the device that waits."""

        def copies(values: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            made = make(values, *args, **kwargs)
            self.syncs += lies(made) and not isinstance(values, torch.Tensor)
            return made

        return copies

    def note_read(self, pinned: torch.Tensor) -> None:
        """The device reads `pinned`, sooner or later."""
        with mock.patch.object(self, "_is_off", True, create=True):
            self._read.append((pinned, pinned.clone()))

    # ---- what has the names of torch

    def event(self, **_: Any) -> Any:
        event = SimpleNamespace(place=None)

        def record(stream: Any = None) -> None:
            event.place = len(self._on_the_way)
            event.last = self._on_the_way[-1] if self._on_the_way else None

        def synchronize() -> None:
            places = [index for index, each in enumerate(self._on_the_way) if each is event.last]
            self.wait(places[0] + 1 if places else 0)

        event.record, event.synchronize, event.query = record, synchronize, lambda: False
        return event

    def stream(self, *_: Any, **__: Any) -> Any:
        stream = SimpleNamespace(wait_stream=lambda other: None, wait_event=lambda event: None, synchronize=self.wait)

        def record_event(event: Any = None) -> Any:
            event = event or self.event()
            event.record()
            return event

        stream.record_event = record_event
        return stream


def _is_one(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


def _is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
    return getattr(tensor.untyped_storage(), "pinned", False)


def _maker(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if make is _NEW_TENSOR and device is None and lies(args[0]):  # which shows no operation of `args[0]`
            device = DEVICE
        on_host = device is not None and not _is_device(device) and torch.device(device).type == "cpu"
        own = {} if device is None or _is_device(device) else {"device": device}
        tensor = make(*args, **own, **kwargs)
        if _is_device(device):
            put(tensor)
        elif on_host:
            put(tensor, there=False)
        if pin_memory:
            assert not lies(tensor), "only memory of the host can be pinned"
            tensor.untyped_storage().pinned = True
        return tensor

    return made


def _moved(self: Pretended) -> Callable[..., torch.Tensor]:
    real = torch.Tensor.to

    def to(
        tensor: torch.Tensor, *args: Any, non_blocking: bool = False, copy: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        device = kwargs.pop("device", None)
        if args and isinstance(args[0], (str, torch.device, int)):
            device, args = args[0], args[1:]
        if args and args[0] is None:
            args = args[1:]
        flags = [each for each in args if isinstance(each, bool)]
        non_blocking = flags[0] if flags else non_blocking
        args = tuple(each for each in args if not isinstance(each, bool))
        dtype = kwargs.pop("dtype", args[0] if args else None)
        goes = device is not None and torch.device(device).type != "meta" and _is_device(device) != lies(tensor)
        own = {} if dtype is None else {"dtype": dtype}
        if device is not None and torch.device(device).type == "meta":
            return real(tensor, device=device, copy=copy, **own, **kwargs)
        if not goes:
            return real(tensor, copy=copy, **own, **kwargs) if own or copy or kwargs else tensor
        assert not (non_blocking and lies(tensor)), "a copy to the host that nothing waits for"
        moved = real(tensor, dtype=dtype or tensor.dtype, copy=True)
        put(moved, there=_is_device(device))
        if not lies(tensor) and non_blocking and _is_pinned(tensor):
            self.note_read(tensor)
        else:
            self.wait()
        return moved

    return to


@contextlib.contextmanager
def pretended() -> Iterator[Pretended]:
    """Inside, there is a device."""
    mode = Pretended()
    with contextlib.ExitStack() as stack:

        def patch(owner: Any, **values: Any) -> None:
            for name, value in values.items():
                stack.enter_context(mock.patch.object(owner, name, value))

        base = torch._C.TensorBase
        own_device = base.device.__get__
        patch(
            torch.Tensor,
            device=property(lambda t: DEVICE if not _is_odd(t) and lies(t) else own_device(t)),
            is_cuda=property(lambda t: t.device.type == "cuda"),
            is_cpu=property(lambda t: t.device.type == "cpu"),
            to=_moved(mode),
            cuda=lambda t, *_, **__: t.to(DEVICE),
            cpu=lambda t, *_, **__: t.to("cpu"),
            pin_memory=lambda t, device=None: _pinned(t),
            is_pinned=_is_pinned,
            record_stream=lambda t, stream: None,
            tolist=mode.waiting(torch.Tensor.tolist),
            numpy=mode.waiting(torch.Tensor.numpy),
            **{name: _maker(getattr(torch.Tensor, name)) for name in NEW.split()},
        )
        patch(torch.UntypedStorage, __deepcopy__=_copied)
        patch(torch, Generator=_Generator)
        patch(torch, **{name: _maker(getattr(torch, name)) for name in f"{MAKERS} {LIKE}".split()})
        patch(torch, **{name: mode.copying(getattr(torch, name)) for name in ("tensor", "as_tensor")})
        there = {"is_available": True, "is_initialized": True, "current_device": 0, "device_count": 1}
        there |= {"is_current_stream_capturing": False, "is_bf16_supported": True, "get_device_name": "pretended"}
        there |= {"get_device_capability": (9, 0), "empty_cache": None, "init": None, "_lazy_init": None}
        there |= {"manual_seed_all": None, "get_rng_state_all": [], "set_rng_state": None, "set_device": None}
        patch(torch.cuda, **{name: functools.partial(_answer, value) for name, value in there.items()})
        patch(torch.cuda, synchronize=lambda device=None: mode.wait(), Event=mode.event, Stream=mode.stream)
        patch(torch.cuda, current_stream=mode.stream, stream=lambda stream: contextlib.nullcontext())
        patch(torch.cuda, get_rng_state=lambda device=None: torch.zeros(16, dtype=torch.uint8))
        patch(torch.cuda, device=lambda device: contextlib.nullcontext())
        for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype"):
            patch(torch, **{name: functools.partial(_by_cpu, getattr(torch, name))})
        real_autocast = torch.autocast
        patch(torch, autocast=lambda device_type, *args, **kwargs: real_autocast("cpu", *args, **kwargs))
        patch(torch._C, _group_tensors_by_device_and_dtype=_grouped(torch._C._group_tensors_by_device_and_dtype))
        known = torch._C._dispatch_has_kernel_for_dispatch_key
        patch(torch._C, _dispatch_has_kernel_for_dispatch_key=lambda op, key: known(op, key.replace("CUDA", "CPU")))
        patch(hardware, alone=lambda look: look())  # not in its own thread, which has no modes
        stack.callback(hardware.gives_float32_sums.cache_clear)
        stack.enter_context(mode)
        yield mode


def _grouped(group: Callable[..., Any]) -> Callable[..., Any]:
    def by_device(lists: Any, with_indices: bool = False) -> Any:
        found = group(lists, with_indices)
        first = next((each for each in lists[0] if each is not None), None)
        return found if first is None else {(first.device, dtype): value for (_, dtype), value in found.items()}

    return by_device


def _wide_mm(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As GPUs have it, and CPUs do not."""
    return torch.mm(a.float(), b.float()).to(dtype)


class _Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> Any:
        made = super().__new__(cls)
        made.place = torch.device(device)
        return made

    @property
    def device(self) -> torch.device:
        return DEVICE if self.place.type == "cuda" else self.place


def _copied(storage: Any, memo: dict[int, Any], real: Any = torch.UntypedStorage.__deepcopy__) -> Any:
    made = real(storage, memo)
    made.on_device = getattr(storage, "on_device", False)
    return made


def _is_odd(tensor: torch.Tensor) -> bool:
    return type(tensor) not in (torch.Tensor, torch.nn.Parameter)


def _answer(value: Any, *_: Any, **__: Any) -> Any:
    return value


def _by_cpu(function: Callable[..., Any], *args: Any) -> Any:
    return function(*("cpu" if each == "cuda" else each for each in args))


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    assert not lies(tensor), "only memory of the host can be pinned"
    if _is_pinned(tensor):
        return tensor
    copy = tensor.clone()
    copy.untyped_storage().pinned = True
    return copy
