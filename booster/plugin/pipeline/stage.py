"""One pipeline stage: the user's own forward, from the block where the stage begins to the one where the next begins."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from booster.plugin.pipeline.meta_model import MetaModel, is_fake
from booster.plugin.pipeline.shape_inference import StageEnd, StageIO, substitute
from booster.plugin.pipeline.split import Split
from booster.tensors.trees import MicroBatch
from booster.tensors.trees import leaves as leaves_of
from booster.tensors.weak import ForwardProxy, ModuleReference, WeakTensor, strip_weak


class StageForward(ModuleReference):
    """The forward of a stage's module, around the user's `forward`; or of the block at `position`, which another stage has.

    The reference to the stage is weak, because the stage holds the module.
    """

    def __init__(self, stage: Stage, forward: Callable[..., Any] | None = None, position: int = -1) -> None:
        self._stage = weakref.ref(stage)
        self._inner = None if forward is None else ForwardProxy(forward)
        self._position = position

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stage = self._stage()
        if stage is None:
            raise RuntimeError(
                "the model is on several pipeline stages, and what b.boost(...) made of it is gone; keep that, and run it by "
                "b.execute_pipeline(...)"
            )
        if self._inner is None:
            return stage.foreign_forward(self._position, *args, **kwargs)
        return stage.forward(self._inner.run, *args, **kwargs)


class Stage:
    """What the modules of one stage share: the micro-batches of the run, and what was received for each of them.

    Attributes:
        index: of the stage.
        module: the model as this stage has it.
        current: the micro-batch that is computed, or that recomputes activations in its backward.
        began: called with the number of the micro-batch that becomes current.
        before_reduction: called before data-parallel ranks reduce the gradients of all micro-batches.
    """

    def __init__(self, index: int, split: Split, meta_model: MetaModel) -> None:
        self.index = index
        self.module: nn.Module = nn.Identity()
        self.current = 0
        self.began: Callable[[int], None] = lambda number: None
        self.before_reduction: Callable[[], None] = lambda: None
        self._split = split
        self._meta_model = meta_model
        self._io: StageIO | None = None
        self._micro_batches: Sequence[MicroBatch] = ()
        self._received: dict[int, tuple[torch.Tensor, ...]] = {}
        self._running = False
        self._blocks: dict[int, nn.Module] = {}  # own ones without a hook that receives yet, by position
        self._constants: dict[
            int, torch.Tensor
        ] = {}  # by position of a block of an earlier stage: what it always returns

    @property
    def is_last(self) -> bool:
        return self.index == self._split.num_stages - 1

    @property
    def target(self) -> Any:
        return self._micro_batches[self.current].target

    def begin(self, micro_batch: int) -> None:
        """Make `micro_batch` the current one."""
        self.current = micro_batch
        self.began(micro_batch)

    def prepare(self, io: StageIO, micro_batches: Sequence[MicroBatch]) -> None:
        """Prepare a run over micro-batches of one shape."""
        self._io, self._micro_batches = io, micro_batches
        self._received.clear()
        self._constants = io.constants(self.index, self._split.starts[self.index - 1]) if self.index else {}
        for position in io.received.keys() & self._blocks.keys():
            self._receive_at(position, self._blocks.pop(position))

    def finish(self) -> None:
        """Forget the micro-batches."""
        self._io, self._micro_batches, self._constants = None, (), {}
        self._received.clear()

    def compute(self, received: tuple[torch.Tensor, ...]) -> Any:
        """Run the forward of the current micro-batch; returns a tuple for the next stage, or what the model returns.

        received: from the stage before; the first stage ignores it.
        """
        if self.index:
            written = self._io.written[self.index] if self._io is not None else None
            if written:
                # A leaf that requires gradients takes no write in place, and the stage before may be on this rank and still
                # read what it sent.
                received = tuple(value.clone() if number in written else value for number, value in enumerate(received))
            self._received[self.current] = received
        micro_batch = self._micro_batches[self.current]
        return self.module(*micro_batch.args, **micro_batch.kwargs)

    def forward(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The forward of `module`; `forward` is the user's."""
        if self._io is None:
            raise RuntimeError(
                f"the model is on several pipeline stages, and this is stage {self.index}; "
                "run it by b.execute_pipeline(...)"
            )
        mode = self._meta_model.mode
        self._running = True
        # Where fake and real tensors may not mix, a fake one is what this stage needs and does not have: torch raises then.
        mode.allow_non_fake_inputs = self.index > 0
        mode.results = self._io.results.get(self.index)
        try:
            output = forward(*args, **kwargs)
        except StageEnd as end:  # the first block of the next stage was called, with what is sent
            return end.values
        except AssertionError as error:
            if "convert all Tensors to FakeTensors" in str(error):
                raise RuntimeError(
                    f"stage {self.index} of the pipeline uses what is on another stage, and did not in the first micro-batch "
                    "of this shape: the forward differs from run to run"
                ) from error
            raise
        finally:
            self._running = False
            mode.allow_non_fake_inputs = True
            mode.results = None
        if not self.is_last:
            raise self._differs(self._split.starts[self.index])
        if any(is_fake(leaf) for leaf in leaves_of(output)):
            raise self._differs(self._split.starts[self.index - 1])
        return output

    def register_receiving(self, position: int, block: nn.Module) -> None:
        """Let `block`, the child of the container at `position`, receive activations."""
        # Call it when all other hooks on its inputs are registered, so that these see what was received.
        self._blocks[position] = block

    def _receive_at(self, position: int, block: nn.Module) -> None:
        this = weakref.ref(self)  # the stage holds the module that holds the block

        def receive(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
            stage = this()
            slots = stage._io.received.get(position) if stage is not None and stage._io is not None else None
            if stage is None or not slots:
                return None
            # Not while activations are recomputed in backward: `forward` does not run around that.
            if stage._running:
                stage._meta_model.mode.allow_non_fake_inputs = False
            return substitute(args, kwargs, slots, stage._received[stage.current])

        block.register_forward_pre_hook(receive, with_kwargs=True, prepend=True)

    def foreign_forward(self, position: int, /, *args: Any, **kwargs: Any) -> Any:
        """The forward of a child of the container that another stage has."""
        constant = self._constants.get(position)
        if constant is not None:
            return constant
        if self._io is None:
            raise RuntimeError(
                f"{self._split.name_of(position)} is on another pipeline stage; run the model by b.execute_pipeline(...)"
            )
        if self._split.stage_of(position) < self.index:
            if position not in self._io.outputs:
                raise RuntimeError(
                    f"{self._split.name_of(position)} was not called in the first micro-batch of this shape: the forward "
                    "differs from run to run"
                )
            again = self._io.results.get(self.index) is not None
            return self._io.outputs[position](args, kwargs, again=again)
        boundary = self._io.boundaries[self.index]
        leaves = leaves_of((args, kwargs))
        if position != self._split.starts[self.index] or boundary.positions[-1] >= len(leaves):
            raise self._differs(self._split.starts[self.index])
        received = self._received.get(self.current, ())
        crossing = []
        for leaf, relay, spec in zip(boundary.positions, boundary.relays, boundary.specs, strict=True):
            # A clone, because a tensor that only passes through is a leaf here, which torch detaches after backward.
            value = leaves[leaf] if relay is None else received[relay].clone()
            crossing.append((strip_weak(value, spec.dtype) if isinstance(value, WeakTensor) else value).contiguous())
        values = tuple(crossing)
        for number, (value, spec) in enumerate(zip(values, boundary.specs, strict=True)):
            if is_fake(value) or value.dtype != spec.dtype:
                raise RuntimeError(
                    f"{self._split.name_of(position)} should get a tensor of {spec.dtype} as number {number} of what crosses "
                    f"to its pipeline stage, and gets {'none' if is_fake(value) else value.dtype}: the forward differs from "
                    "run to run"
                )
        raise StageEnd(values)

    def _differs(self, position: int) -> RuntimeError:
        return RuntimeError(
            f"stage {self.index} of the pipeline did not come to {self._split.name_of(position)} as it did in the first "
            "micro-batch of this shape: the forward differs from run to run, as layers that are dropped at random do"
        )
