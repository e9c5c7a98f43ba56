"""The engine of backward passes, torch function modes and the compiler, by torch's private names."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn


def is_compiled(module: nn.Module) -> bool:
    """Return whether a call of `module` runs what torch.compile made of it."""
    return getattr(module, "_compiled_call_impl", None) is not None or "_orig_mod" in module._modules


def compiled_like(module: nn.Module, function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return `function` compiled by the options with which torch.compile wrapped `module`; None where it did not."""
    options: Any = getattr(module, "dynamo_ctx", None) if "_orig_mod" in module._modules else None
    return None if options is None else options(function)


# The number of the backward pass that runs in this thread, or -1. The function itself, as every pass asks it.
graph_task = torch._C._current_graph_task_id


# The hooks of the thread through which goes what autograd saves, as inside a checkpoint that is not reentrant; and the
# transform of `torch.func`, such as vmap or grad, that runs around: None where there is none. Of C, as each product asks.
saved_tensors_hooks_around = functools.partial(torch._C._autograd._top_saved_tensors_default_hooks, True)

interpreters_around = torch._C._functorch.peek_interpreter_stack

# The level of forward mode that is entered, or -1. A function of C likewise.
dual_level = functools.partial(getattr, torch.autograd.forward_ad, "_current_level")


def when_backward_ends(action: Callable[[], None]) -> None:
    """Call `action` once, after the backward pass that runs now has filled all gradients."""
    torch.autograd.Variable._execution_engine.queue_callback(action)


def engine_backward(*args: Any, **kwargs: Any) -> Any:
    """Run autograd as `torch.autograd.backward` does, in the torch function modes of the caller, which that leaves."""
    return torch.autograd.Variable._execution_engine.run_backward(*args, **kwargs)


def computed_from(tensor: torch.Tensor, leaves: Sequence[torch.Tensor]) -> bool:
    """Return whether the graph of `tensor`, which requires gradients, leads to one of `leaves`."""
    wanted = {id(leaf) for leaf in leaves}
    waiting = [torch.autograd.graph.get_gradient_edge(tensor).node]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if id(getattr(node, "variable", None)) in wanted:
            return True
        following = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= following
        waiting += following
    return False


def running_node() -> tuple[str, int, Any] | None:
    """Return the autograd node that runs in this thread: its class's name, its number, and of one that fills `.grad` the leaf.

    None outside a backward pass.
    """
    node = torch._C._current_autograd_node()
    return None if node is None else (node.name(), node._sequence_nr(), getattr(node, "variable", None))


def node_dtypes(node: Any) -> list[torch.dtype]:
    """Return the dtypes of what the autograd `node` differentiates: of the results of its operation."""
    return [each.dtype for each in getattr(node, "_input_metadata", ())]


def newest_node_number() -> int:
    """Return the number of the autograd node that was made last in this thread: inside an operator, if it records, its own."""
    return torch.autograd._get_sequence_nr() - 1


def engine_starts() -> frozenset[CodeType]:
    """Return the code on Python's stack by which a backward pass is handed to the engine."""
    return frozenset({torch.autograd.graph._engine_run_backward.__code__, engine_backward.__code__})


def function_modes() -> list[Any]:
    """Return the torch function modes of this thread, outermost first."""
    return [torch._C._get_function_stack_at(index) for index in range(num_function_modes())]


num_function_modes = torch._C._len_torch_function_stack  # of this thread; itself, because every pass asks it


# A context in which torch functions go to no torch function mode and no subclass's `__torch_function__`; itself, as above.
without_function_modes = torch._C.DisableTorchFunction


def with_function_modes() -> AbstractContextManager[Any]:
    """Return a context, for use inside `without_function_modes`, in which functions go to the modes around that."""
    return torch._C._EnableTorchFunction()


# A context in which torch functions go to no subclass's `__torch_function__`, but to modes; itself, as above.
without_subclasses = torch._C.DisableTorchFunctionSubclass


def uninterceptable(function: Any) -> Any:
    """Return a copy of a function of torch written in Python that hands itself to no torch function mode, but what it calls."""
    names = {**function.__globals__, "has_torch_function": lambda tensors: False}
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)


def default_device_mode() -> Any | None:
    """Return the mode by which `torch.set_default_device` acts, or None."""
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


def compiler_is_loaded() -> bool:
    """Return whether anything can have been compiled: whether somebody has imported the compiler, which takes seconds."""
    return "torch._dynamo" in sys.modules


# What knows in `cached_backends` all that `torch.compile` was called for, and None for what optimizers of torch exempt; None
# where nothing has loaded it. A function of C likewise.
compiler_frames = functools.partial(sys.modules.get, "torch._dynamo.eval_frame")


def uncompiled() -> AbstractContextManager[Any]:
    """Return a context in which what was compiled runs as it was written: compiled code shows no operations."""
    # Importing the compiler where nothing is compiled would take seconds.
    return torch.compiler.set_stance("force_eager") if compiler_is_loaded() else nullcontext()


def outside_of_graphs(
    function: Callable[[torch.Tensor], torch.Tensor], why: str
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return `function` as one that no compiler traces. Of what is being compiled: the graph ends here, or with fullgraph=True
    the compilation, which says `why`."""
    torch._dynamo.graph_break(msg=why)
    return torch.compiler.disable(function, reason=why)


def compile_graph() -> Callable[..., Any]:
    """Return inductor's `compile(graph, example_inputs)`; imports it, which torch.compile does anyway."""
    import torch._inductor

    return torch._inductor.compile


def module_call() -> CodeType:
    """Return the code on Python's stack by which a module, its local `self`, is called, hooks included."""
    return nn.Module._call_impl.__code__


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Return whether the user has `register_hook` or `register_post_accumulate_grad_hook` on `tensor`."""
    return bool(tensor._backward_hooks) or bool(getattr(tensor, "_post_accumulate_grad_hooks", None))
