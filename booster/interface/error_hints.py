"""Errors with a known cause: what to write in place of a call that a boosted optimizer refuses, or of a forward that failed."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from traceback import walk_tb
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from booster.common.arguments import dtype_name, listed
from booster.common.misuse import raised_in, where_raised
from booster.model.params import is_dtensor, is_part
from booster.tensors.trees import HALF_DTYPES, tensors
from booster.update.state_dict import STATE_KEY
from booster.update.update import Update


def refuse_grad_scaler(optimizer: Optimizer) -> NoReturn:
    """Raise RuntimeError: a GradScaler has set `found_inf` on the boosted `optimizer`."""
    for name in ("grad_scale", "found_inf"):  # torch leaves them where step() raises
        optimizer.__dict__.pop(name, None)
    raise RuntimeError(
        "a GradScaler stepped the boosted optimizer, which has the loss scale of its precision already, if that needs "
        "one: the update would be scaled twice. Delete the GradScaler: write b.backward(loss, optimizer) for "
        "scaler.scale(loss).backward(), optimizer.step() for scaler.step(optimizer), optimizer.clip_grad_by_norm(max_norm) "
        "for scaler.unscale_(optimizer) and the clip, and nothing for scaler.update(); GradScaler(enabled=False) may stay"
    )


def check_nothing_is_lost(own: Mapping[str, Any], update: Update) -> None:
    """Raise RuntimeError if torch's checkpoints, which keep torch's keys alone, would drop what a resume needs of `own`."""
    masters = own.get("masters", {})
    lost = ["float32 masters"] if masters.get("weights") else []
    lost += ["the random state of stochastic rounding"] if masters.get("rounding") else []
    lost += ["the loss scale"] if update.gradients.scaler.enabled else []
    if lost:
        raise RuntimeError(
            f"torch.distributed.checkpoint.state_dict would drop {' and '.join(lost)} of this optimizer. Save with "
            "Booster.save, which keeps everything, and load with Booster.load, into any layout; or keep what "
            f"optimizer.state_dict() returns, which has them under {STATE_KEY!r}"
        )


def check_pickled(update: Update) -> None:
    """Raise RuntimeError if ranks share the optimizer of `update`, which is to be pickled."""
    if update.shards.is_distributed or update.gradients.group is not None:
        raise RuntimeError(
            "torch.save and pickle take no optimizer that ranks share; save optimizer.state_dict(), which all ranks call, or "
            "write a checkpoint with b.save"
        )


def hint(
    error: Exception, name: str, model: nn.Module, *, precision: object, input_dtype: torch.dtype | None
) -> str | None:
    """Return what to do where the method `name` of `model` raised `error` under `precision`; None for the user's own errors."""
    return (
        _hint_of_shards(error, name, model)
        or _hint_of_divided_features(error, model)
        or _hint_of_moved_weights(error, model, precision)
        or _hint_of_dtypes(error, precision, input_dtype)
    )


def _hint_of_shards(error: Exception, name: str, model: nn.Module) -> str | None:
    """Return what to do where the method `name` of the user's `model` met shards of parameters; None for other errors."""
    said = str(error)
    if "invalid python storage" in said:
        return (
            f"model.{name}() read the memory of weights that are divided among ranks, of which each holds a part; write them "
            "with b.save_model(model, folder, shard=True), which all ranks call and from_pretrained opens"
        )
    if "mixed torch.Tensor and DTensor" not in said:
        return None
    if name != "forward":
        return (
            f"model.{name}() computed with weights that are divided among ranks and were not gathered, since its forward does "
            "not start at the model itself. Tell torch of it after boost, on all ranks, and call it on all: "
            f"torch.distributed.fsdp.register_fsdp_forward_method(b.unwrap(model), {name!r})"
        )
    trace = raised_in(error)
    values = {} if trace is None else trace.tb_frame.f_locals
    own = {id(param): key for key, param in model.named_parameters() if is_part(param)}
    parts = [
        f"{key} (the parameter {own[id(value)]!r})" if id(value) in own else key
        for key, value in values.items()
        if is_dtensor(value)
    ]
    return (
        f"forward computed with a DTensor, a part of a weight that is divided among ranks, at {where_raised(error)}: "
        f"{'there, ' + listed(parts, 4) + (' is' if len(parts) == 1 else ' are') + ' such; ' if parts else ''}not gathered are "
        f"{listed(list(own.values()), 3)}. Weights are whole only in the forward of the module that has them, and what is made "
        "from a part (new_zeros, .data.new, a sum of weights) is a part. Make new tensors from an input, x.new_zeros(...); "
        "compute with weights in the forward of their own module, or make one block of all that share them, by wrap_policy of "
        "the plugin; averages of weights: docs/guides/averages.md"
    )


def hint_of_loss(error: Exception, loss: object) -> str | None:
    """Return what to do where backward of `loss`, with a penalty on divided weights, raised `error`; None for others."""
    if "mixed torch.Tensor and DTensor" not in str(error) or not is_dtensor(loss):
        return None
    return (
        "the loss is a DTensor, as a penalty on a weight that is divided among ranks is, and backward cannot go on from it to "
        f"tensors that are whole ({error}). Make the penalty whole before it is added to anything: "
        "layer.weight.square().sum().full_tensor(), on all ranks"
    )


_SIZES_DIFFER = re.compile(r"normalized_shape=|must match the size of tensor|to contain \d+ elements")


def _hint_of_divided_features(error: Exception, model: nn.Module) -> str | None:
    """Return what to do where a rank's share of features met something of their whole width; None for other errors."""
    if not _SIZES_DIFFER.search(str(error)):
        return None
    sizes = {int(number) for number in re.findall(r"\d+", str(error))}
    parts = [param for param in model.parameters() if is_part(param)]
    meshes: list[Any] = [param.device_mesh for param in parts]  # type: ignore[attr-defined]
    ranks = {mesh["tp"].size() for mesh in meshes if "tp" in (mesh.mesh_dim_names or ())}
    pairs = [
        (size, size * number) for size in sorted(sizes) for number in ranks if number > 1 and size * number in sizes
    ]
    if not pairs:
        return None
    own, whole = pairs[-1]
    return (
        f"{error}: at {where_raised(error) or 'a layer'}, {own} features met something of {whole}. Behind a column-wise layer "
        "each rank of tensor parallelism has its own features alone, and a norm over all of them, or a parameter for each of "
        "them, is whole. In tp_plan give the layer ahead 'colwise_gather_output' and the one behind 'rowwise_split_input', "
        "between which features are whole; or leave both layers out"
    )


def _hint_of_moved_weights(error: Exception, model: nn.Module, precision: object) -> str | None:
    """Return what to do where weights were given another dtype after boost; None for other errors."""
    stored = getattr(getattr(precision, "policy", None), "param", None)
    dtypes = {param.dtype for param in model.parameters() if param.is_floating_point()}
    if stored is None or not dtypes or stored in dtypes or not _MIXED_DTYPES.search(str(error)):
        return None
    return (
        f"{error}: weights were {dtype_name(stored)} at boost() and are {listed(sorted(map(dtype_name, dtypes)))} now, as "
        "after model.half(), model.float() or model.to(dtype). Leave the weights as they are, since the precision casts what "
        "it computes; b.switch(precision) changes it during the run, and inputs and outputs may be cast"
    )


_MIXED_DTYPES = re.compile(
    r"same dtype|mixed dtype|expected scalar type|should be the same|dtype.* mismatch", re.IGNORECASE
)


def _has_other_states(error: Exception) -> bool:
    """Return whether a recurrent layer raised `error` that had first states of another dtype than its input."""
    frames = (frame.f_locals for frame, _ in walk_tb(error.__traceback__))
    given = (tensors((values.get("input"), values.get("hx"))) for values in frames)
    return "primitive descriptor" in str(error) and any(len({each.dtype for each in some}) > 1 for some in given)


def _hint_of_dtypes(error: Exception, precision: object, wanted: torch.dtype | None) -> str | None:
    """Return what to do where forward met a half and a float32 tensor that no cast makes one; None for other errors."""
    policy = getattr(precision, "policy", None)
    compute = None if policy is None else policy.compute
    if "multiple of 16 bytes" in str(error) and HALF_DTYPES & {wanted, compute}:
        return (
            f"{error}: at {where_raised(error)} torch's product of groups takes halves in rows of a multiple of 8 numbers; "
            "give experts such sizes, or have them multiplied one by one: model.set_experts_implementation('eager')"
        )
    if not _MIXED_DTYPES.search(str(error)) and not _has_other_states(error):
        return None
    where = where_raised(error) or "a layer"
    if compute in HALF_DTYPES:
        return (
            f"{error}: at {where} a function got {dtype_name(compute)} and another dtype, and autocast has no "
            "rule that casts them for it. Give it one dtype, by x.float() or x.to(y.dtype); on a CPU Booster's "
            "half_products='float32' has rules for mv, addmv, dot, vdot, inner and cross, but for none in place"
        )
    if wanted is None or wanted not in HALF_DTYPES:
        return None
    half, kind = dtype_name(wanted), type(precision)
    takes = "default_dtype" in inspect.signature(kind).parameters
    or_by_default = f"; or pass default_dtype=True to {kind.__name__}, which makes such tensors {half}" if takes else ""
    return (
        f"{error}: weights are {half}, and forward gave one of them a tensor of another dtype, at {where}. A "
        "tensor that forward makes itself, by torch.zeros or torch.arange(...).float(), is float32 by default: make it from "
        f"an input, x.new_zeros(...), or with dtype=x.dtype{or_by_default}"
    )
