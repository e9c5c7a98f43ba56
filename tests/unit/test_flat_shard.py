"""A stretch of a tensor is a few boxes of it, whatever its shape and its order in memory."""

import math

import pytest
import torch

from booster.shards.base import FlatShard

SHAPES = [(7,), (3, 4), (4, 1, 3), (2, 3, 2, 2), (1, 1), (5, 1)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("reverse", [False, True])
def test_every_stretch_is_at_most_2n_minus_1_boxes_that_hold_its_elements(shape, reverse):
    dims = list(reversed(range(len(shape)))) if reverse else list(range(len(shape)))
    numel = math.prod(shape)
    flat = torch.arange(numel)
    whole = flat.view([shape[dim] for dim in dims]).permute([dims.index(dim) for dim in range(len(shape))])
    for start in range(numel + 1):
        for stop in range(start, numel + 1):
            part = FlatShard(flat[start:stop].clone(), start, shape, whole.stride())
            boxes = list(part.boxes())
            assert len(boxes) <= 2 * len(shape) - 1
            seen = torch.full(shape, -1)
            for offsets, sizes, view in boxes:
                box = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
                assert (seen[box] == -1).all(), "boxes overlap"
                seen[box] = view
                assert view.data_ptr() == part.values.data_ptr() + 8 * (int(view.flatten()[0]) - start), "a copy"
            assert torch.equal(seen, torch.where((whole >= start) & (whole < stop), whole, -1))
