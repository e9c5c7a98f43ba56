"""The boosted model and criterion: the user's own, run under a precision, otherwise transparent."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import nn

from booster.common import arguments
from booster.common.hang_watchdog import abandon_pass
from booster.common.misuse import RawCallGuard
from booster.common.torch_internals.tensor_internals import version
from booster.interface.call_log import CallLog
from booster.interface.error_hints import hint
from booster.interface.transparent import TransparentModule
from booster.model.modules import bare, fast_path_off, is_fully_sharded, is_placed, uncompiled, wait_for_weights
from booster.model.params import is_part
from booster.tensors.cast_regions import cast_floats, cast_inputs, cast_noting_writes, nest_contexts, region
from booster.tensors.trees import HALF_DTYPES, tensors
from booster.tensors.weak import reading_weakly, strip_weak


class ForwardPrecision(Protocol):
    """What a wrapper needs of a precision."""

    def forward_context(self) -> AbstractContextManager[Any]: ...

    @property
    def output_dtype(self) -> torch.dtype | None: ...


class _BoundForward(functools.partial[Any]):
    """`forward` of one model, with the signature of the user's, which trainers and exporters read."""

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(bare(self.func.__self__.module).forward)  # type: ignore[attr-defined]


class _Forward:
    """The attribute `forward` of a boosted model."""

    def __get__(self, model: PrecisionModule | None, kind: Any = None) -> Callable[..., Any]:
        if model is None:
            return PrecisionModule._logged
        bound = model._run if model._call_log is None else model._logged
        return bound if torch.compiler.is_compiling() else _BoundForward(bound)


class PrecisionModule(TransparentModule):
    """A model that runs its forward, and every method called through it, under a precision.

    input_dtype: floating inputs of forward and of methods are cast to it, in whatever container; None leaves them.

    A method other than forward runs on the user's model itself, so a plugin's gradient synchronisation does not see it:
    where a plugin wraps the model, a method that returns a result with gradients raises RuntimeError.
    """

    _precision: ForwardPrecision
    _input_dtype: torch.dtype | None
    _output_dtype: torch.dtype | None
    _cast = staticmethod(cast_floats)  # what becomes of outputs
    _cast_in = staticmethod(cast_inputs)  # and of inputs
    _call_log: CallLog | None = None
    _raw_calls: RawCallGuard | None = None
    _passed_over: Literal["", "path", "hooks"] = ""  # by a path of torch's own, or by hooks that run before forward

    def __init__(
        self, module: nn.Module, precision: ForwardPrecision, *, input_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(module)
        # By way of __dict__, because plain assignment sets attributes on the user's model.
        self.__dict__.update(_precision=precision, _input_dtype=input_dtype, _output_dtype=precision.output_dtype)

    forward = _Forward()

    def _logged(self, *args: Any, **kwargs: Any) -> Any:
        return (
            self._run(*args, **kwargs) if self._call_log is None else self._call_log.call(self._run, self, args, kwargs)
        )

    def keep_calls(self, log: CallLog) -> None:
        """Keep what every call was given in `log` from now on."""
        self.__dict__["_call_log"] = arguments.instance("log", log, CallLog, "a booster.interface.call_log.CallLog")

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if torch.jit.is_tracing():
            raise RuntimeError(
                "torch.jit.trace does not follow a boosted model; use torch.export.export(model, inputs), which keeps the "
                "precision, or trace the user's model in the dtype of its weights: "
                "torch.jit.trace(b.unwrap(model).eval(), inputs)"
            )
        wanted, writes = self._input_dtype, None
        given: Any = args[0] if len(args) == 1 and not kwargs else None
        cast: Any = given
        if wanted is not None:  # outside of the region: its function modes would see the cast
            compiling = torch.compiler.is_compiling()  # which traces no count of writes
            if type(given) is torch.Tensor and (compiling or not torch.is_inference_mode_enabled()):  # no more calls
                # To half, finite numbers that are too large stay finite, as a mask of the smallest number must.
                args = (self._cast if wanted is torch.float32 else self._cast_in)(args, wanted)
                if not compiling and args[0] is not given:
                    cast = args[0]
                    before = version(cast)
            else:
                args, kwargs, writes = cast_noting_writes(self.cast_inputs, args, kwargs)
        try:
            passed = self._passed_over
            own = self._precision.forward_context if not passed else self._off_path
            with region(self._beside_forward() if passed == "hooks" else own):
                output = self._modules["module"](*args, **kwargs)  # type: ignore[misc]
            if writes is not None:
                writes.bring_back(self.cast_outputs)
            elif cast is not given and version(cast) != before:
                given.copy_(cast)
        except Exception as error:
            abandon_pass(error)
            advice = self._hint(error, "forward") if isinstance(error, RuntimeError) else None
            if advice is None:
                raise
            raise RuntimeError(advice) from error
        returned = self._output_dtype
        if returned is None or (type(output) is torch.Tensor and output.dtype == returned):
            return output
        return self._cast(output, returned)

    def _hint(self, error: Exception, name: str) -> str | None:
        return hint(error, name, bare(self.module), precision=self._precision, input_dtype=self._input_dtype)

    def _off_path(self) -> AbstractContextManager[Any]:
        return nest_contexts(fast_path_off(), self._precision.forward_context())

    def _beside_forward(self) -> Callable[[], AbstractContextManager[Any]]:
        """The context of other methods, which read buffers as forward does."""
        own = self._off_path if self._passed_over else self._precision.forward_context
        return reading_weakly([bare(self.module)], own)

    def cast_inputs(self, tree: Any) -> Any:
        """Inputs of the model, in whatever containers, as the precision wants them."""
        wanted = self._input_dtype
        return self._cast_in(tree, wanted) if wanted in HALF_DTYPES else self._cast(tree, wanted)

    def cast_outputs(self, tree: Any) -> Any:
        """Outputs of the model, likewise."""
        return self._cast(tree, self._output_dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if any(map(is_part, self.module.parameters())) or (
            is_placed(self.module) and not isinstance(self.module, nn.parallel.DistributedDataParallel)
        ):
            raise RuntimeError(
                "torch.save and pickle of a model that ranks share would write this rank's shard of what is divided; "
                "write whole weights with b.save_model(model, path), or a checkpoint with b.save, which all ranks call"
            )
        return super().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> PrecisionModule:
        # Weights may still be on their way from the last step's all-gather.
        wait_for_weights(self.module)
        if is_fully_sharded(self.module):
            raise RuntimeError(
                "a model that fully_shard divides is not copied. Copy it before boost, and boost the copy too, as a target "
                "network: target = copy.deepcopy(net); target, *_ = b.boost(target); averages: docs/guides/averages.md"
            )
        memo[id(self._precision)] = self._precision  # one strategy may serve several models
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        clone.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return clone

    def _wrap_method(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def run_method(*args: Any, **kwargs: Any) -> Any:
            try:
                args, kwargs, writes = cast_noting_writes(self.cast_inputs, args, kwargs)
                with region(self._beside_forward()):
                    output = method(*args, **kwargs)
                if writes is not None:
                    writes.bring_back(self.cast_outputs)
            except RuntimeError as error:
                advice = self._hint(error, name)
                if advice is None:
                    raise
                raise RuntimeError(advice) from error
            # What a generator computes needs the region when it runs, not when it is made.
            if isinstance(output, Generator):
                return self._stream(output, name)
            return self._finish(output, name)

        return run_method

    def _stream(self, outputs: Generator[Any, Any, Any], name: str) -> Iterator[Any]:
        # The body of a generator runs when it is iterated, long after the method returned.
        with closing(outputs):
            while True:
                with region(self._beside_forward()):
                    try:
                        output = next(outputs)
                    except StopIteration:
                        return
                yield self._finish(output, name)

    def _finish(self, output: Any, name: str) -> Any:
        # Only what wraps the model reduces gradients, and a method passes it by.
        if self.module is not self.unwrap() and any(tensor.grad_fn is not None for tensor in tensors(output)):
            raise RuntimeError(
                f"model.{name}() returned tensors with gradients, but {type(self.module).__name__} synchronises only "
                "what goes through forward. Compute the loss in forward, or call the method under torch.no_grad()"
            )
        return self.cast_outputs(strip_weak(output))


class Resumable(Protocol):
    """What a checkpoint keeps of a model and gives back."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> Any: ...


class Pinned(Resumable, Protocol):
    """Modules that were pinned to float32 during the run."""

    @property
    def names(self) -> list[str]: ...

    def count_skip(self, name: str, step: int) -> bool: ...
    def missing(self, state: Mapping[str, Any]) -> list[str]: ...


@dataclass
class ModelExtras:
    """What a precision has with a model besides weights; checkpoints keep each of them under its name.

    Attributes:
        pins: modules pinned during the run, or an autopilot's controller; None where the precision pins nothing.
        histories: what scales of delayed scaling follow from; None where they follow from nothing that was.
        choice: which layers were chosen by measuring; None where none were.
    """

    pins: Pinned | None = None
    histories: Resumable | None = None
    choice: Resumable | None = None


class ModelWrapper(PrecisionModule):
    """What `boost` returns for a model, and for a criterion that is a module.

    module: the placed model; attributes that are not of the wrapper are those of the user's own inside.
    precision: under which it runs.
    input_dtype: what floating inputs are cast to; None leaves them.
    """

    _extras: ModelExtras

    def __init__(
        self, module: nn.Module, precision: ForwardPrecision, *, input_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(module, precision, input_dtype=input_dtype)
        self.__dict__["_extras"] = ModelExtras()

    def replace_with(self, other: ModelWrapper, hooks: Collection[int] = ()) -> set[int]:
        """Run what `other` runs, as it does, from now on: the same user's model, under another precision.

        hooks: keys of the forward pre-hooks that the precision so far registered; returns those of `other`, which take their
        place.
        """
        for name in ("_precision", "_input_dtype", "_output_dtype", "_passed_over"):
            self.__dict__[name] = getattr(other, name)
        self._extras.pins = other._extras.pins
        self.module = other.module
        # Those of the user's stay.
        # By key, so that hooks which the user registered keep their places and order.
        for key in hooks:
            self._forward_pre_hooks.pop(key, None)
        self._forward_pre_hooks.update(other._forward_pre_hooks)
        if self._raw_calls is not None:
            self._raw_calls.precision = type(self._precision).__name__
        return set(other._forward_pre_hooks)


def guard_raw_calls(model: ModelWrapper, *, several_ranks: bool) -> None:
    """Watch for the first calls of the user's model that do not come through `model`; see `RawCallGuard`."""
    own = model.unwrap()
    # Not where the user compiled it, since it would be compiled again as soon as the guard is gone.
    if own is bare(own):
        name = type(model._precision).__name__
        model.__dict__["_raw_calls"] = RawCallGuard(own, precision=name, several_ranks=several_ranks)


def remove_raw_call_guard(model: ModelWrapper) -> None:
    """Watch no longer: who asks for the user's model knows of it, and TorchScript takes no hook that it cannot compile."""
    if model._raw_calls is not None:
        model._raw_calls.remove()


def avoid_fast_path(model: ModelWrapper) -> None:
    """Evaluate `model` as it trains, without torch's fused path for transformer layers."""
    model.__dict__["_passed_over"] = "path"


def extras_of(model: ModelWrapper) -> ModelExtras:
    """Return what the precision has with a boosted model; no attribute of it, because attributes are the user's model's."""
    return model._extras


def precision_of(model: PrecisionModule) -> ForwardPrecision:
    """The precision that `model` runs under; no attribute of it, because attributes are those of the user's model."""
    return model._precision


def boosted_wrapper(model: nn.Module, method: str) -> ModelWrapper:
    """The boosted model that `model` is, perhaps inside a `torch.compile` wrapper; raises TypeError if it is none."""
    wrapper = uncompiled(model)
    if not isinstance(wrapper, ModelWrapper):
        raise TypeError(
            f"{method} needs the model that boost() returned, the boosted one, got {arguments.described(wrapper)}"
        )
    return wrapper


class CriterionWrapper:
    """A loss function that is not a module, run under a precision. Attributes pass through."""

    def __init__(self, criterion: Callable[..., Any], precision: ForwardPrecision) -> None:
        self.criterion = criterion
        self._precision = precision
        self._call_log: CallLog | None = None

    def keep_calls(self, log: CallLog) -> None:
        """Keep what every call was given in `log` from now on."""
        self._call_log = arguments.instance("log", log, CallLog, "a booster.interface.call_log.CallLog")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (
            self._compute(*args, **kwargs)
            if self._call_log is None
            else self._call_log.call(self._compute, self, args, kwargs)
        )

    def _compute(self, *args: Any, **kwargs: Any) -> Any:
        with region(self._precision.forward_context):
            output = self.criterion(*args, **kwargs)
        return cast_floats(output, self._precision.output_dtype)

    def replace_with(self, other: CriterionWrapper) -> None:
        """Compute under the precision of `other` from now on."""
        self._precision = other._precision

    def unwrap(self) -> Callable[..., Any]:
        """The user's function."""
        return self.criterion

    def __getattr__(self, name: str) -> Any:
        if name == "criterion":
            raise AttributeError(name)
        return getattr(self.criterion, name)
