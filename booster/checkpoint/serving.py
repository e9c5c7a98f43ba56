"""Weights for programs that serve them: in half, or in 8 bits with scales, frozen layers unpacked and adapters merged."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from booster.checkpoint.folder import remove, write_beside
from booster.checkpoint.manifest import CheckpointError, Tensor, agreed, dtype_of, is_first, read_manifest
from booster.checkpoint.saving import CollectedState, choose_writers, write
from booster.checkpoint.state_tree import as_planned, refuse_made_of_tensors
from booster.checkpoint.weight_files import CheckpointTensors, ExportedTensor, FileOptions, Read, export
from booster.common import arguments
from booster.common.arguments import listed
from booster.frozen import FORMS, Form, FrozenLinear, origins_of
from booster.interface.model import ModelWrapper
from booster.mixed_precision.policy import dtypes_read
from booster.model.modules import bare, tensor_places
from booster.nn.stacked_experts import stacked_names
from booster.number_formats.number_format import E4M3, INT8, NumberFormat
from booster.number_formats.scaling import ScaledTensor, Scaling, scale_to
from booster.ranks.agreement import gather

_logger = logging.getLogger(__name__)

ServingFormat = Literal["bf16", "fp16", "fp8", "int8"]
SERVING_FORMATS = ("bf16", "fp16", "fp8", "int8")
_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
_TIED = "tie_word_embeddings"
_BLOCK = 128  # rows, and columns, that share a scale in fp8


def check_served(model: nn.Module, weights: Any, *, shard: bool, use_safetensors: bool) -> None:
    """Raise ValueError where `weights` of `model` cannot be written so; see `Booster.save_model`."""
    arguments.choice("weights", weights, (None, *SERVING_FORMATS))
    if weights not in ("fp8", "int8"):
        return
    if not (shard and use_safetensors):
        raise ValueError(
            f"weights={weights!r} needs a folder of safetensors files, in which config.json says how they are to be read; pass "
            "shard=True, use_safetensors=True"
        )
    if not callable(getattr(getattr(model, "config", None), "save_pretrained", None)):
        raise ValueError(
            f"weights={weights!r} is for models with a configuration of transformers, which says how their weights are to be "
            f"read, and this {type(model).__name__} has none; write weights='bf16'"
        )


@dataclass(frozen=True)
class ExportSpec:
    """What one weight is made of, by names of tensors of the model.

    stored: its numbers; in the form of a frozen layer where `packed` says which one, and how many columns. dtype: that of the
    result, None for that of what is stored. adapters: names of A and B, and a factor: factor * B @ A is added, or the
    transpose of that. number: of an expert, where what is stored is that of several.
    """

    stored: str
    packed: tuple[Form, int] | None = None
    dtype: torch.dtype | None = None
    adapters: tuple[tuple[str, str, float], ...] = ()
    transposed: bool = False
    number: int | None = None

    def whole(self, read: Read) -> torch.Tensor:
        """Return the weight, on the host or where `read` has it. Sums are made in float32 and rounded once."""
        value = read(self.stored) if self.number is None else read(self.stored)[self.number]
        dtype = self.dtype or value.dtype
        if self.packed is not None:
            form, columns = self.packed
            value = form.unpack(value, columns, torch.float32 if self.adapters else dtype)
        for a, b, factor in self.adapters:
            added = read(b).float() @ read(a).float() * factor
            value = value.float() + (added.T if self.transposed else added)
        return value.to(dtype)

    def of(self, tensors: Mapping[str, Tensor]) -> ExportedTensor:
        """Return what is written of it, given what the model holds."""
        entry = tensors[self.stored]
        shape = entry.shape if self.packed is None else (entry.shape[0], self.packed[1])
        shape = shape if self.number is None else shape[1:]
        return ExportedTensor(self.dtype or dtype_of(entry), shape, self.whole)


def sources_of(
    model: nn.Module, names: Iterable[str], *, unpack: bool, stacked: Mapping[str, tuple[str, int]] | None = None
) -> dict[str, ExportSpec]:
    """Return what is written of the tensors `names` of `model`, by the names that it gets: each as it is stored.

    unpack: frozen layers. stacked: `stacked_names` of all ranks; None: of `model`.
    """
    found = {name: ExportSpec(name) for name in names}
    stacked = stacked_names(model) if stacked is None else stacked
    single = {name: ExportSpec(own, number=number) for name, (own, number) in stacked.items() if own in found}
    found = {name: each for name, each in found.items() if name not in {own.stored for own in single.values()}} | single
    for name, layer in model.named_modules() if unpack else ():
        if isinstance(layer, FrozenLinear) and layer.form is not None:
            stored, weight = (f"{name}.{own}".removeprefix(".") for own in (layer.stored_name, "weight"))
            dtype = origins_of(layer).get(layer.stored_name, torch.float32)
            if found.pop(stored, None) is not None:
                # Matrices, in the dtype that they were loaded from, or float32.
                found[weight] = ExportSpec(stored, (layer.form, layer.in_features), dtype)
    return found


@dataclass(frozen=True)
class ServedLayers:
    """What a model says of its tensors beyond their numbers; JSON-like, for ranks to exchange.

    linear: names of linear layers, and why their weights stay wide where others are in 8 bits; empty where they need not.
    buffers, experts: names of buffers, and of matrices that lie in one parameter of three dimensions.
    """

    linear: dict[str, str]
    buffers: list[str]
    experts: list[str]


def layers_of(model: nn.Module) -> ServedLayers:
    """Return what the user's `model` says of its layers, as far as this rank has them."""
    places = tensor_places(model)
    shared = {place.holder for found in places.values() if len(found) > 1 for place in found}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    makes_logits = set() if head is None else set(head.modules())  # adapters are around it
    linear, experts = {}, []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        linear[name] = ""
        if module in makes_logits:
            linear[name] = "it makes the logits"
        elif module in shared:
            linear[name] = "its weight is shared"
        elif isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
            linear[name] = "attention reads its weight and does not call it"
    for tensor, (place, *_) in places.items():
        if tensor.dim() == 3 and tensor.is_floating_point() and not hasattr(place.holder, "kernel_size"):
            experts.append(place.name)
    buffers = [name for name, _ in model.named_buffers(remove_duplicate=False)]
    return ServedLayers(linear, buffers, experts)


def merge_layers(layers: Iterable[ServedLayers], sources: Mapping[str, ExportSpec]) -> ServedLayers:
    """Return what ranks say that have layers each, by the names that their tensors get in `sources`."""
    found, written_as = [*layers], {source.stored: name for name, source in sources.items()}
    linear = {
        written_as[stored].rpartition(".")[0]: why
        for each in found
        for name, why in each.linear.items()
        for stored in (f"{name}.weight", *(f"{name}.weight_{form}" for form in FORMS))
        if stored in written_as
    }
    buffers, experts = (
        sorted({written_as[name] for names in kind for name in names if name in written_as})
        for kind in ([each.buffers for each in found], [each.experts for each in found])
    )
    return ServedLayers(linear, buffers, experts)


def in_serving_format(
    plain: Mapping[str, ExportedTensor], weights: ServingFormat, layers: ServedLayers, wide: torch.dtype
) -> tuple[dict[str, ExportedTensor], dict[str, Any] | None]:
    """Return what is written of `plain` in the form `weights`, and what the model's configuration says of it, or None.

    wide: what floating parameters become that are not in 8 bits. Raises ValueError where no layer can be in 8 bits.
    """
    if weights in _HALF:
        return {name: _rounded(name, each, _HALF[weights], layers) for name, each in plain.items()}, None
    if layers.experts:
        raise ValueError(
            f"weights={weights!r} is of linear layers, and {listed(layers.experts)} hold matrices of several experts, which "
            "servers would read in 8 bits as well; write weights='bf16'"
        )
    left = {name: why or _misfit(plain, name, weights) for name, why in layers.linear.items()}
    left = {name: why for name, why in left.items() if why}
    if len(left) == len(layers.linear):
        raise ValueError(
            f"weights={weights!r} is of linear layers, and this model has none that can be in 8 bits"
            f"{': ' if left else ''}{'; '.join(f'{name}: {why}' for name, why in left.items())}; write weights='bf16'"
        )
    _logger.info("written in %s, not in %s: %s", wide, weights, "; ".join(f"{n} ({why})" for n, why in left.items()))
    narrow = _FP8() if weights == "fp8" else _Int8()
    entries: dict[str, ExportedTensor] = {}
    for name, each in plain.items():
        layer, _, own = name.rpartition(".")
        if own == "weight" and layer in layers.linear and layer not in left:
            entries |= narrow.entries(name, each)
        else:
            entries[name] = _rounded(name, each, wide, layers)
    return entries, narrow.config(sorted(left))


def ends_that_differ(model: Any, same: Callable[[str, str], bool]) -> tuple[str, str] | None:
    """Return the names of embedding and head where `model` ties them and not `same`(one, other); else None."""
    config: Any = getattr(model, "config", None)
    if not any(getattr(each, _TIED, False) for each in _with_text(config)):
        return None
    names = {id(module): name for name, module in model.named_modules()}
    ends = [getattr(model, f"get_{side}_embeddings", lambda: None)() for side in ("input", "output")]
    # Another model inside may have made the matrices.
    if any(id(end) not in names for end in ends):
        return None
    one, other = (f"{names[id(end)]}.weight".removeprefix(".") for end in ends)
    return None if same(one, other) else (one, other)


def write_config(
    folder: Path,
    model: nn.Module,
    entries: Mapping[str, ExportedTensor],
    quantization: dict[str, Any] | None,
    *,
    untied: bool,
) -> None:
    """Write the configurations of `model` into `folder`, with the dtype and form of what was written. untied: whether its ends
    are."""
    for name in ("config", "generation_config"):
        own: Any = getattr(model, name, None)
        if not callable(getattr(own, "save_pretrained", None)):
            continue
        if name == "config":
            # The user's configuration goes on saying what the model in memory is.
            own = copy.deepcopy(own)
            own.dtype = next(
                (str(each.dtype).removeprefix("torch.") for each in entries.values() if each.is_wide), None
            )
            own.architectures = [type(model).__name__.removeprefix("FSDP")]  # which fully_shard puts before it
            if quantization is not None:
                own.quantization_config = quantization
            for each in _with_text(own) if untied else ():
                setattr(each, _TIED, False)
        write_beside(folder, own.save_pretrained)


# ---------------------------------------------------------------------- inside


def _with_text(config: Any) -> list[Any]:
    """A configuration, and that of the model of texts inside, which may be the same."""
    return [config, *([config.get_text_config()] if callable(getattr(config, "get_text_config", None)) else [])]


def _rounded(name: str, each: ExportedTensor, dtype: torch.dtype, layers: ServedLayers) -> ExportedTensor:
    if not each.is_wide or name in layers.buffers:
        return each

    def make(read: Read) -> torch.Tensor:
        value = each.make(read)
        rounded = value.to(dtype)
        if bool((rounded.isinf() & value.isfinite()).any()):
            raise CheckpointError(
                f"{name} has numbers up to {value.abs().max().item():.3g}, which {dtype} does not hold; write them in bf16"
            )
        return rounded

    return ExportedTensor(dtype, each.shape, make)


def _misfit(plain: Mapping[str, ExportedTensor], layer: str, weights: ServingFormat) -> str:
    rows, columns = plain[f"{layer}.weight"].shape
    fits = weights == "int8" or not (rows % _BLOCK or columns % _BLOCK)
    return "" if fits else f"{rows} x {columns} is not in blocks of {_BLOCK} x {_BLOCK}"


class _EightBits:
    """Weights of linear layers in 8 bits, each with a tensor of float32 scales."""

    target: NumberFormat
    scaling: Scaling
    scale_name: str

    def __init__(self) -> None:
        self._last: tuple[str, ScaledTensor] | None = None

    def entries(self, name: str, each: ExportedTensor) -> dict[str, ExportedTensor]:
        rows, columns = each.shape
        over = self.scaling.over
        scales = (rows, 1) if over == "row" else (rows // over[0], columns // over[1])  # type: ignore[operator]
        dtype: Any = self.target.dtype
        return {
            name: ExportedTensor(dtype, each.shape, lambda read: self._scaled(name, each, read).values),
            f"{name}{self.scale_name}": ExportedTensor(
                torch.float32, scales, lambda read: self._scaled(name, each, read).scale
            ),
        }

    def _scaled(self, name: str, each: ExportedTensor, read: Read) -> ScaledTensor:
        if self._last is None or self._last[0] != name:  # values and scales are written one after the other
            scaled = scale_to(each.make(read).float(), self.target, self.scaling)
            if not bool(scaled.scale.isfinite().all()):
                raise CheckpointError(f"{name} holds inf or NaN, which {self.target} under scales has no code for")
            values = scaled.values if scaled.values.dtype == self.target.dtype else scaled.values.to(self.target.dtype)
            self._last = name, ScaledTensor(values, scaled.scale, None, self.scaling)
        return self._last[1]


class _FP8(_EightBits):
    """e4m3 under a scale for each 128 x 128 numbers; activations are rounded as they come."""

    target, scaling, scale_name = E4M3, Scaling((_BLOCK, _BLOCK)), "_scale_inv"

    def config(self, left: list[str]) -> dict[str, Any]:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [_BLOCK, _BLOCK],
            "modules_to_not_convert": left,
        }


class _Int8(_EightBits):
    """Whole numbers under a scale for each row; activations are rounded as they come, under a scale for each token."""

    target, scaling, scale_name = INT8, Scaling("row"), "_scale"

    def config(self, left: list[str]) -> dict[str, Any]:
        common = {"num_bits": 8, "type": "int", "symmetric": True}
        group = {
            "targets": ["Linear"],
            "weights": {**common, "strategy": "channel", "dynamic": False},
            "input_activations": {**common, "strategy": "token", "dynamic": True},
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": left,
            "kv_cache_scheme": None,
        }


def save_weights(
    model: ModelWrapper,
    path: Path,
    *,
    group: dist.ProcessGroup | None,
    files: FileOptions,
    weights: ServingFormat | None,
    half: torch.dtype | None,
    wide: torch.dtype,
    merge: Callable[[nn.Module, Iterable[str]], tuple[nn.Module, dict[str, ExportSpec]]] | None,
) -> None:
    """Write the whole weights of `model` to `path`, see `Booster.save_model`; a collective.

    Each rank writes its shards as a checkpoint, which the first rank turns into plain files, one tensor at a time: no process
    holds the whole model.

    half: the dtype in which the forward reads all weights, also those that ranks hold in float32; None where it reads them as
        they are stored.
    wide: see `in_serving_format`.
    merge: gives the model without adapters, and what is written of the tensors of these names; None writes them as they are.
    """
    own = bare(model.module)
    tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    if weights is not None:
        read = dtypes_read(own, half, weights=True)
        tensors = {name: value.to(read.get(name, value.dtype)) for name, value in tensors.items()}
    for name, tensor in tensors.items():
        refuse_made_of_tensors(name, tensor)
    buffers = dict(own.named_buffers(remove_duplicate=False))
    written, _ = choose_writers({name: as_planned(t) for name, t in tensors.items()}, group, buffers, all_kept=False)
    # Through a checkpoint, so that shards of all ranks meet on the disk and not in the memory of one.
    taken = CollectedState(written, {"random": []})
    between = write(path.with_name(f".{path.name}.whole"), taken, step=0, keep_last=None, group=group)
    said = gather(asdict(layers_of(own)), group) if weights is not None else []
    stacked = {name: place for each in gather(stacked_names(own), group) for name, place in each.items()}
    with agreed(group):
        if is_first(group):
            try:
                manifest, quantization = read_manifest(between), None
                if merge is None:
                    described, sources = (
                        own,
                        sources_of(own, manifest.tensors, unpack=weights is not None, stacked=stacked),
                    )
                else:
                    described, sources = merge(own, manifest.tensors)
                entries = {name: source.of(manifest.tensors) for name, source in sources.items()}
                if weights is not None:
                    layers = merge_layers((ServedLayers(**each) for each in said), sources)
                    entries, quantization = in_serving_format(entries, weights, layers, wide)
                export(between, manifest, entries, path, files)
                if files.shard:
                    whole = CheckpointTensors(between, manifest).whole
                    apart = ends_that_differ(described, partial(_same, entries, whole))
                    write_config(path, described, entries, quantization, untied=apart is not None)
            finally:
                remove(between)


def _same(entries: Mapping[str, ExportedTensor], read: Read, one: str, other: str) -> bool:
    """Whether two names are written with the same numbers, or one of them is not written."""
    ends = [entries[name] for name in (one, other) if name in entries]
    return len(ends) < 2 or torch.equal(*(end.make(read).float() for end in ends))
