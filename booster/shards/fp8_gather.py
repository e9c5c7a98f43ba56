"""Weights that are divided among ranks and gathered as bytes, since who reads them rounds them to e4m3 anyway."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from booster.common.torch_internals.fsdp_internals import (
    dtype_in_gather,
    free_when_resharded,
    gathered,
    join_shards,
    padded_length,
)
from booster.common.torch_internals.tensor_internals import storage_key, version
from booster.model.params import local_shard
from booster.number_formats.number_format import E4M3
from booster.number_formats.scaling import (
    ScaledTensor,
    Scaling,
    decode_tensorwise,
    encode_tensorwise,
    scale_of,
    share_of,
)
from booster.ranks.agreement import all_gather_flat, reduced


class WeightScales:
    """The largest magnitudes of some divided weights, each over all ranks, of which their float8 scales are made.

    records: of the weights, see `fsdp_internals.fsdp_params`. group: the ranks over which they are divided.
    Weights change by steps, loads and users' own hands, so they are looked at before every forward pass of the model.
    """

    def __init__(self, records: Sequence[Any], group: dist.ProcessGroup) -> None:
        self._records = list(records)
        self._group = group
        self._largest: dict[Any, torch.Tensor] = {}

    def measure(self) -> None:
        """Look at all weights, for the passes that follow. A collective: one all-reduce of 4 bytes a weight tensor."""
        self._measure(self._records)

    def forget(self) -> None:
        """Take note that weights changed; who gathers some before the next `measure` measures those."""
        self._largest.clear()

    def of(self, records: Sequence[Any]) -> list[torch.Tensor]:
        """Return the largest magnitudes of `records`, float32; a collective where `measure` was not called since `forget`."""
        if any(record not in self._largest for record in records):
            self._measure(records)
        return [self._largest[record] for record in records]

    @torch.no_grad()
    def _measure(self, records: Sequence[Any]) -> None:
        shards = [local_shard(record.sharded_param) for record in records]
        each = [torch.linalg.vector_norm(shard, math.inf) if shard.numel() else shard.new_zeros(()) for shard in shards]
        largest = torch.stack([size.float() for size in each])
        largest = largest.where(~largest.isnan(), torch.inf)  # a maximum over ranks may lose a NaN
        largest = reduced(largest, dist.ReduceOp.MAX, self._group)
        self._largest.update(zip(records, largest.unbind(), strict=True))


class FP8Gather:
    """How one group of `fully_shard` gathers: `low` as e4m3 under the scale of the whole weight, all others as they are.

    records: of all parameters of the group, in its order; low: those of them that are sent in one byte a number. What arrives
    is in the dtype of the group, and what rounds it to e4m3 under one scale gets the bytes and the scale that it would have
    got from the weight itself, see `decode_tensorwise`; the layer that multiplies with it takes both from `arrived`, and rounds
    nothing. They are kept as long as the weight is gathered. Collectives: one all-gather, and see `WeightScales`.
    """

    def __init__(self, records: Sequence[Any], low: Collection[Any], scales: WeightScales) -> None:
        self.scales = scales
        self._records = list(records)
        self._low = [record for record in records if record in low]
        self._arrived: dict[Any, tuple[ScaledTensor, int]] = {}
        self._largest: dict[Any, torch.Tensor] = {}  # of the last gathering

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for what is gathered, as torch's own gathers do."""
        return torch.empty(*size, dtype=dtype, device=device)

    @torch.no_grad()
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Gather the group; both tensors are flat, and uint8 where its parameters have several dtypes."""
        dtypes = [dtype_in_gather(record) for record in self._records]
        lengths = [
            padded_length(record) * dtype.itemsize // input_tensor.dtype.itemsize
            for record, dtype in zip(self._records, dtypes, strict=True)
        ]
        low = dict(zip(self._low, self.scales.of(self._low), strict=True))
        self._largest = low
        largest = [low.get(record) for record in self._records]
        message, sizes = pack(input_tensor.split(lengths), dtypes, largest)
        ranks = dist.get_world_size(group)
        received = message.new_empty(ranks * len(message))
        all_gather_flat(received, message, group=group)
        places = output_tensor.view(ranks, -1).split(lengths, dim=1)
        came = unpack(received.view(ranks, -1), sizes, places, dtypes, largest)
        for record, each, dtype in zip(self._records, came, dtypes, strict=True):
            if each is not None:
                self._keep(record, each, low[record].to(each.device).to(dtype).float())

    def arrived(self, record: Any, weight: torch.Tensor) -> ScaledTensor | None:
        """Return `weight`, m x n, as it arrived for `record`; None where it did not, or was written to or freed since.

        None of a weight made in inference mode, either, of which torch counts no writes.
        """
        made, writes = self._arrived.get(record, (None, 0))
        # What is written through `.data` while the model runs leaves no trace.
        if made is None or weight.is_inference() or version(weight) != writes:
            return None
        whole = gathered(record)
        if (
            whole is None
            or _memory_of(weight) != _memory_of(local_shard(whole))
            or not made.values.untyped_storage().nbytes()
        ):
            return None
        for part in (made.values, made.scale) if made.values.is_cuda else ():  # allocated on the stream that gathers
            part.record_stream(torch.cuda.current_stream(part.device))
        return made

    def forget_arrived(self) -> None:
        """Take note that gathered weights may have been written to, with or without a trace."""
        self._arrived.clear()

    def _keep(self, record: Any, came: torch.Tensor, largest: torch.Tensor) -> None:
        values = join_shards(record, came.view(torch.float8_e4m3fn))
        free_when_resharded(record, values)
        weight = gathered(record)
        scale = scale_of(share_of(largest, E4M3))
        writes = 0 if weight is None or weight.is_inference() else version(local_shard(weight))
        self._arrived[record] = ScaledTensor(values, scale, None, Scaling("tensor")), writes

    def as_gathered(self, record: Any, values: torch.Tensor) -> torch.Tensor:
        """Return `values`, a part of the weight of `record` in the dtype of the group, as it was gathered the last time."""
        if record not in self._low:
            return values
        largest = _in_dtype(self._largest[record], values)
        return decode_tensorwise(encode_tensorwise(values, largest), largest, values.dtype)


def pack(
    parts: Iterable[torch.Tensor], dtypes: Sequence[torch.dtype], largest: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, list[int]]:
    """Return what a rank sends of its `parts` of weights, 1-dim and uint8, and how many bytes of it are of each.

    parts: flat numbers of `dtypes`, or their bytes. largest: of a weight that is sent in e4m3 the largest magnitude, float32
    of shape (); None sends what there is.
    """
    sent = []
    for part, dtype, size in zip(parts, dtypes, largest, strict=True):
        if size is not None:
            values = part.clone().view(dtype)  # a copy, because a view of wider numbers needs aligned memory
            # One scale for the weight on all ranks: the bytes of several ranks are one matrix.
            part = encode_tensorwise(values, _in_dtype(size, values))
        sent.append(part.view(torch.uint8))
    return torch.cat(sent), [len(part) for part in sent]


def unpack(
    received: torch.Tensor,
    sizes: Sequence[int],
    places: Iterable[torch.Tensor],
    dtypes: Sequence[torch.dtype],
    largest: Sequence[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """Write what all ranks packed to `places`, one for each weight: (ranks, its length), of its dtype or in bytes.

    received: uint8, a row for each rank, with parts of `sizes` bytes. Returns of each weight that was sent in e4m3 its
    bytes, (ranks, its length), in memory of their own.
    """
    came: list[torch.Tensor | None] = []
    for part, place, dtype, size in zip(received.split(sizes, dim=1), places, dtypes, largest, strict=True):
        # A view of wider numbers needs aligned and contiguous memory.
        part = part.clone(memory_format=torch.contiguous_format)
        came.append(None if size is None else part)
        if size is not None:
            part = decode_tensorwise(part.view(torch.float8_e4m3fn), _in_dtype(size, place, dtype), dtype)
        place.copy_(part.view(place.dtype))
    return came


def _memory_of(x: torch.Tensor) -> tuple[Any, ...]:
    return storage_key(x), x.storage_offset(), x.shape, x.stride()


def _in_dtype(largest: torch.Tensor, values: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The largest magnitude of a weight, of which `values` are a part, after its rounding to their dtype."""
    return largest.to(values.device).to(dtype or values.dtype).float()
