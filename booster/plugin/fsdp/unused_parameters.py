"""Parameters of a sharded model that some ranks use in a pass and others do not."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import and_
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from booster.common.text import listed
from booster.common.torch_internals.autograd_internals import graph_task, when_backward_ends, without_function_modes
from booster.common.torch_internals.fsdp_internals import (
    fsdp_groups,
    reduces,
    registered_group,
    skip_backward_end,
    unreduced,
    zero_unreduced,
)
from booster.plugin.fsdp.forward_writes import ForwardWrites
from booster.tensors.trees import tensors

# First forward passes, in which ranks compare the order in which they gather, and a GPU is asked what they reduce.
_COMPARED = 4


class _Group:
    """Parameters that are gathered and reduced together.

    Attributes:
        own: torch's record of the group.
        first: the place of its first parameter among all.
        called: in a forward pass since gradients were last reduced.
        agreed: in this backward pass.
    """

    own: Any = None
    first = 0

    def __init__(self, owner: UnusedParameters, index: int, name: str) -> None:
        self.index, self.name = index, name
        self.called = self.agreed = False
        self._owner = owner

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """After torch's own hook, which gathers, and puts a node at the inputs that reduces when backward reaches it."""
        if torch.is_grad_enabled():
            self.called = True
            with without_function_modes():
                simple = not kwargs and all(map(torch.is_tensor, args))
                for tensor in args if simple else tensors((args, kwargs)):
                    if tensor.grad_fn is not None and registered_group(tensor) is self.own:
                        tensor.register_hook(self._before_reduction)  # called before the node
                        return

    def _before_reduction(self, grad: torch.Tensor) -> None:
        if reduces(self.own):
            self._owner.agree((self,), last=False)

    def before_gather(self, module: nn.Module, args: Any) -> None:
        if self.own is not None and graph_task() == -1:  # what is computed again within backward is gathered
            self._owner.compare_gathers(self)

    def before_backward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Before torch's own hook, which has the outputs gather in backward, and the pass end in a reduction."""
        if torch.is_grad_enabled() and graph_task() == -1:
            owner, hook = self._owner, self._owner.begin
            if owner.passes_left and self.own is not None:
                compared = [self]  # torch gathers for the first of the outputs

                def hook(grad: torch.Tensor) -> None:
                    owner.begin(grad)
                    if compared:
                        owner.compare_gathers(compared.pop())

            with without_function_modes():
                for tensor in (output,) if isinstance(output, torch.Tensor) else tensors(output):
                    if tensor.grad_fn is not None:
                        tensor.register_hook(hook)


class UnusedParameters:
    """Makes all ranks reduce gradients of the same parameters of `model`, which goes through `fully_shard`.

    `fully_shard` lays the gradients that a rank has end to end and adds these over ranks. If ranks took other branches, it
    would add gradients of different parameters. So before a group is reduced its ranks agree, in a small collective, which of
    its parameters have a gradient, and a rank without one that another has adds zeros. What no rank used gets none. In the
    first passes ranks compare what they gather too. RuntimeError where they are about to gather or reduce different groups:
    on all ranks in the first passes; later, on a GPU, on those that lack a gradient, which alone wait for it.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, device: torch.device, written: ForwardWrites) -> None:
        self._written, self._passes = written, 0
        self._model = weakref.ref(model)
        self._names = weakref.WeakKeyDictionary({module: name for name, module in model.named_modules()})
        self._ranks = [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]
        self._device = device
        self._groups: list[weakref.ref[_Group]] = []  # hooks of their modules hold them, and they hold this
        self._num_params = 0
        self._under_way = False
        self.passes_left = _COMPARED if self._ranks else 0
        self._compare_hooks: list[Any] = []  # of those first passes

    def before_sharding(self, modules: Sequence[nn.Module]) -> _Group:
        """Register what runs before the output hooks of `fully_shard`, which will be applied to `modules` together.

        Returns the group for `after_sharding`.
        """
        names = [repr(self._names[module]) if self._names[module] else "the model" for module in modules]
        group = _Group(self, len(self._groups), listed(names, 3))
        for module in modules:
            module.register_forward_hook(torch.compiler.disable(group.before_backward))
            if module is self._model():
                module.register_forward_hook(torch.compiler.disable(self._after_forward))
        return group

    def after_sharding(self, modules: Sequence[nn.Module], group: _Group) -> None:
        """Register the rest once `fully_shard` was applied to `modules`. group: what `before_sharding` returned for them."""
        if own := fsdp_groups(modules[:1]):
            (group.own,), group.first = own, self._num_params
            self._num_params += len(group.own.fsdp_params)
            self._groups.append(weakref.ref(group))
        for module in modules:
            if own:
                hook = torch.compiler.disable(group.before_forward)
                module.register_forward_pre_hook(hook, with_kwargs=True)
                if self.passes_left:
                    hook = torch.compiler.disable(group.before_gather)
                    self._compare_hooks.append(module.register_forward_pre_hook(hook, prepend=True))

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._under_way = False  # if a backward pass raised
        self._passes += 1
        if self._passes & (self._passes - 1) == 0:  # a power of two
            self._written.before_end(self._passes)
        if self.passes_left:
            self.compare_gathers(None)
            self.passes_left -= 1
            if not self.passes_left:
                for hook in self._compare_hooks:
                    hook.remove()

    def begin(self, grad: torch.Tensor) -> None:
        """A backward pass has come to outputs of a module that was sharded."""
        if not self._under_way:
            self._under_way = True
            for group in self._alive():
                group.agreed = False  # of a pass that raised
            when_backward_ends(self._before_end)  # before torch's own callback, which is queued later

    def _before_end(self) -> None:
        """Torch is about to reduce groups with inputs that need no gradient, and those that were not reached."""
        self._under_way = False
        groups = self._alive()
        if groups and reduces(groups[0].own):
            self.before_reduction()
        else:
            for group in groups:
                skip_backward_end(group.own)

    def before_reduction(self) -> None:
        """Agree on what is left to be reduced: all, where that is done outside of backward."""
        groups = self._alive()
        self.agree(groups, last=True)
        for group in groups:
            group.called = False

    def _alive(self) -> list[_Group]:
        return [group for reference in self._groups if (group := reference()) is not None]

    def compare_gathers(self, group: _Group | None) -> None:
        """Compare among ranks which group is gathered next; None: the forward pass ends."""
        count = len(self._groups)
        here = bytearray(count) + bytearray([1]) * count
        if group is not None:
            here[group.index], here[count + group.index] = 1, 0
        with torch.no_grad(), without_function_modes():
            flags = torch.frombuffer(here, dtype=torch.uint8).to(self._device)
            for ranks in self._ranks:
                dist.all_reduce(flags, dist.ReduceOp.MAX, group=ranks)
            anywhere = flags.tolist()
            if sum(anywhere) > count:
                self._refuse(anywhere)

    def agree(self, groups: Sequence[_Group], *, last: bool) -> None:
        """Agree on the gradients of `groups`, which are about to be reduced; zeros where only other ranks have one.

        last: `groups` are all, and those without a call in this pass and without waiting gradients are left out.
        """
        with torch.no_grad(), without_function_modes():
            # Of each group whether it is reduced, of each whether it is not, and of each parameter whether it has a gradient.
            count = len(self._groups)
            here = bytearray(count) + bytearray([1]) * count + bytearray(self._num_params)
            lacking: list[tuple[int, Any, bool]] = []
            for group in groups:
                if last and group.agreed:
                    continue
                found, apart = unreduced(group.own)
                if last and not group.called and True not in found:
                    continue
                group.agreed = True
                # Neither, of a group that only joins others: of its call a pass that raised may be all that is left.
                here[group.index], here[count + group.index] = not last or True in found, 0
                for place, has in enumerate(found, 2 * count + group.first):
                    if has:
                        here[place] = 1
                    elif has is not None:
                        lacking.append((place, group.own.fsdp_params[place - 2 * count - group.first], apart))
            if not self._ranks:
                return
            flags = torch.frombuffer(here, dtype=torch.uint8).to(self._device)
            for ranks in self._ranks:
                dist.all_reduce(flags, dist.ReduceOp.MAX, group=ranks)
            if lacking or self.passes_left or self._device.type == "cpu":
                anywhere = flags.tolist()
                if any(map(and_, anywhere[:count], anywhere[count : 2 * count])):
                    self._refuse(anywhere)
                for place, param, apart in lacking:
                    if anywhere[place]:
                        zero_unreduced(param, apart)

    def _refuse(self, anywhere: list[int]) -> None:
        count = len(self._groups)
        names = [group.name for group in self._alive() if anywhere[group.index] and anywhere[count + group.index]]
        raise RuntimeError(
            f"ranks take different ways through the model: some go through {listed(names, 5)} now and others do not, but each "
            "of these is gathered and reduced by itself, so that weights and gradients of different modules would be taken for "
            "each other. Pass a wrap_policy that does not name what some ranks leave out, so that it travels with the module "
            "around it, or use LowLevelZeroPlugin(stage=2), which needs no option"
        )
