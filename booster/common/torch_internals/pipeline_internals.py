"""Torch's pipeline stages, and what those of torch 2.11 lack."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

__all__ = ["PipelineStage"]


def __getattr__(name: str) -> Any:  # torch's module would make `import booster` slow
    if name != "PipelineStage":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _pipeline_stage()


def computes_weights_apart() -> bool:
    """Return whether torch's schedules compute gradients of weights rightly where they do it apart from those of inputs."""
    # Before torch 2.13 those of a weight that a stage uses twice, once behind the other, are too large (pytorch#180952).
    return torch.__version__ >= "2.13"


def backward_of_weights(module: Any, groups: list[dict[str, Any]]) -> Any:
    """Compute the gradients of weights that torch's backward pass of inputs left for later in `groups`."""
    from torch.distributed.pipelining._backward import stage_backward_weight

    # Torch frees the graph of each group when that is done, and raises for the next one if both are parts of one, as where
    # `module` uses a weight twice, once behind the other, and others between.
    return stage_backward_weight(module.parameters(), groups, retain_graph=True)


@functools.cache
def _pipeline_stage() -> type[Any]:
    from torch.distributed.pipelining import PipelineStage

    return PipelineStage if hasattr(PipelineStage, "_get_grad_send_meta") else _declared(PipelineStage)


def _declared(base: Any) -> type[Any]:
    """Return a class of torch 2.11's pipeline stages, `base`, that goes by the tensors declared to it, as later ones do."""

    class DeclaredStage(base):
        has_backward: bool

        def _get_init_p2p_neighbors_ops(self) -> list[Any]:
            # Two stages in a row may be on one rank, which gloo sends nothing to itself.
            return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

        def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
            # Torch 2.11 takes all that it receives to require gradients, which integers cannot.
            backward, self.has_backward = (
                self.has_backward,
                False,
            )  # else what is received into requires gradients from now on
            try:
                return super()._prepare_forward_infra(*args, **kwargs)
            finally:
                self.has_backward = backward

        def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
            buffers = super()._retrieve_recv_activations(fwd_chunk_id)
            for buffer, declared in zip(buffers, self.inputs_meta, strict=True):
                buffer.requires_grad_(declared.requires_grad and self.has_backward)
            return buffers

        def _create_grad_send_info(self, args_recv_info: Any) -> list[Any]:
            pairs = zip(args_recv_info, self.inputs_meta, strict=True)
            return [info.source if declared.requires_grad else None for info, declared in pairs]

        def _create_grad_recv_info(self, act_send_info: Any) -> tuple[Any, ...]:
            infos = super()._create_grad_recv_info(act_send_info)  # none, of the one output of the last stage
            pairs = zip(infos, self.get_outputs_meta(), strict=False)
            return tuple(info if declared.requires_grad else None for info, declared in pairs)

        def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
            return tuple(info and info.buffer for info in self.grad_recv_info[bwd_chunk_id])

        def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
            for info, tensor in zip(self.args_recv_info[mb_index], prev_stage_outputs, strict=True):
                info.buffer = tensor.detach()

        def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
            for info, grad in zip(self.grad_recv_info[mb_index], next_stage_bwd_outputs, strict=True):
                if info is not None:
                    info.buffer = grad

        def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
            if self.has_backward and not self.is_first:
                given = zip(
                    self.bwd_cache[bwd_chunk_id], self.args_recv_info[bwd_chunk_id], self.inputs_meta, strict=True
                )
                self.bwd_cache[bwd_chunk_id] = tuple(
                    torch.zeros_like(info.buffer) if grad is None and declared.requires_grad else grad
                    for grad, info, declared in given
                )

    return DeclaredStage
