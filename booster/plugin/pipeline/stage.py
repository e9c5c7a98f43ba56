"""One pipeline stage: the user's own forward, from the block where the stage begins to the one where the next begins."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from booster.plugin.pipeline.rehearsal import StageEnd
from booster.plugin.pipeline.route import Route, substitute
from booster.plugin.pipeline.skeleton import Skeleton, is_fake
from booster.plugin.pipeline.split import Split
from booster.tensors.micro_batch import MicroBatch
from booster.tensors.trees import leaves as leaves_of
from booster.tensors.weak import InPlaceOfForward, OfAModule, Weak, plain


class InStage(OfAModule):
    """The forward of the module of a stage, around `forward`; or of a child of the container, at `position`, that another stage
    has. It does not keep the stage alive, which holds the module."""

    def __init__(self, stage: Stage, forward: Callable[..., Any] | None = None, position: int = -1) -> None:
        self._stage = weakref.ref(stage)
        self._inner = None if forward is None else InPlaceOfForward(forward)
        self._position = position

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stage = self._stage()
        if stage is None:
            raise RuntimeError(
                "the model lies on several pipeline stages, and what b.boost(...) made of it is gone; keep that, and run it by "
                "b.execute_pipeline(...)"
            )
        if self._inner is None:
            return stage.elsewhere(self._position, *args, **kwargs)
        return stage.forward(self._inner.run, *args, **kwargs)


class Stage:
    """What the modules of one stage share: the micro-batches at hand, and what was received for each of them.

    module: the model as this stage has it. index: of the stage. current: the micro-batch that is computed, or whose
    activations are recomputed in its backward.
    """

    def __init__(self, index: int, split: Split, skeleton: Skeleton) -> None:
        self.index = index
        self.module: nn.Module = nn.Identity()
        self.current = 0
        self._split = split
        self._skeleton = skeleton
        self._route: Route | None = None
        self._feeds: Sequence[MicroBatch] = ()
        self._received: dict[int, tuple[torch.Tensor, ...]] = {}
        self._running = False
        self._blocks: dict[int, nn.Module] = {}  # own ones that do not take what was received yet, by position
        self._constant: dict[int, torch.Tensor] = {}  # by position of a foreign block before: what it always returns

    @property
    def is_last(self) -> bool:
        return self.index == self._split.num_stages - 1

    @property
    def target(self) -> Any:
        """That of the current micro-batch."""
        return self._feeds[self.current].target

    def begin(self, route: Route, feeds: Sequence[MicroBatch]) -> None:
        """Make ready for a run over micro-batches of one shape."""
        self._route, self._feeds = route, feeds
        self._received.clear()
        self._constant = route.constants(self.index, self._split.starts[self.index - 1]) if self.index else {}
        for position in route.slots.keys() & self._blocks.keys():
            self._receive_at(position, self._blocks.pop(position))

    def finish(self) -> None:
        """Forget the micro-batches."""
        self._route, self._feeds, self._constant = None, (), {}
        self._received.clear()

    def compute(self, received: tuple[torch.Tensor, ...]) -> Any:
        """Forward of the current micro-batch: what the next stage receives, as a tuple, or what the model returns.

        received: of the stage before; ignored by the first.
        """
        if self.index:
            self._received[self.current] = received
        feed = self._feeds[self.current]
        return self.module(*feed.args, **feed.kwargs)

    def forward(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The forward of `module`, where `forward` is the user's."""
        if self._route is None:
            raise RuntimeError(
                f"the model lies on several pipeline stages, and this is stage {self.index}; "
                "run it by b.execute_pipeline(...)"
            )
        mode = self._skeleton.mode
        self._running = True
        # From here on, a fake tensor that meets a real one stands for something that this stage needs and does not have.
        mode.allow_non_fake_inputs = self.index > 0
        mode.answers = self._route.answers.get(self.index)
        try:
            output = forward(*args, **kwargs)
        except StageEnd as end:
            return end.values
        except AssertionError as error:
            if "convert all Tensors to FakeTensors" in str(error):
                raise RuntimeError(
                    f"stage {self.index} of the pipeline uses what lies on another stage, and did not in the first micro-batch "
                    "of this shape: the forward differs from run to run"
                ) from error
            raise
        finally:
            self._running = False
            mode.allow_non_fake_inputs = True
            mode.answers = None
        if not self.is_last:
            raise self._missed(self._split.starts[self.index])
        if any(is_fake(leaf) for leaf in leaves_of(output)):
            raise self._missed(self._split.starts[self.index - 1])
        return output

    def arm(self, position: int, block: nn.Module) -> None:
        """Let `block`, the child of the container at `position`, take what was received. Call it after every other hook on
        inputs is there: those are to see what was received. A block gets a hook in the first run in which it receives."""
        self._blocks[position] = block

    def _receive_at(self, position: int, block: nn.Module) -> None:
        this = weakref.ref(self)  # whose module has the block

        def receive(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
            stage = this()
            slots = stage._route.slots.get(position) if stage is not None and stage._route is not None else None
            if stage is None or not slots:
                return None
            if stage._running:
                stage._skeleton.mode.allow_non_fake_inputs = False
            return substitute(args, kwargs, slots, stage._received[stage.current])

        block.register_forward_pre_hook(receive, with_kwargs=True, prepend=True)

    def elsewhere(self, position: int, /, *args: Any, **kwargs: Any) -> Any:
        """The forward of a child of the container that another stage has."""
        known = self._constant.get(position)
        if known is not None:
            return known
        if self._route is None:
            raise RuntimeError(
                f"{self._split.name_of(position)} is on another pipeline stage; run the model by b.execute_pipeline(...)"
            )
        if self._split.stage_of(position) < self.index:
            if position not in self._route.replays:
                raise RuntimeError(
                    f"{self._split.name_of(position)} was not called in the first micro-batch of this shape: the forward "
                    "differs from run to run"
                )
            again = self._route.answers.get(self.index) is not None
            return self._route.replays[position](args, kwargs, again=again)
        boundary = self._route.boundaries[self.index]
        leaves = leaves_of((args, kwargs))
        if position != self._split.starts[self.index] or boundary.positions[-1] >= len(leaves):
            raise self._missed(self._split.starts[self.index])
        received = self._received.get(self.current, ())
        crossing = []
        for leaf, relay, spec in zip(boundary.positions, boundary.relays, boundary.specs, strict=True):
            # A tensor of its own: one that only passes through is a leaf here, and would be detached after backward.
            value = leaves[leaf] if relay is None else received[relay].clone()
            crossing.append((plain(value, spec.dtype) if isinstance(value, Weak) else value).contiguous())
        values = tuple(crossing)
        for number, (value, spec) in enumerate(zip(values, boundary.specs, strict=True)):
            if is_fake(value) or value.dtype != spec.dtype:
                raise RuntimeError(
                    f"{self._split.name_of(position)} should get a tensor of {spec.dtype} as number {number} of what crosses "
                    f"to its pipeline stage, and gets {'none' if is_fake(value) else value.dtype}: the forward differs from "
                    "run to run"
                )
        raise StageEnd(values)

    def _missed(self, position: int) -> RuntimeError:
        return RuntimeError(
            f"stage {self.index} of the pipeline did not come to {self._split.name_of(position)} as it did in the first "
            "micro-batch of this shape: the forward differs from run to run, as layers that are dropped at random do"
        )
