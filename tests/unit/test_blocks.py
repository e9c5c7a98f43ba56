"""Blocks of e4m3 with a scale each: what is off, and what arrives of numbers that no scale holds."""

import pytest
import torch

from booster.number_formats.scaling import BLOCK, BLOCK_BYTES, decode_blocks, encode_blocks


def back(x):
    return decode_blocks(encode_blocks(x))[: len(x)]


def block_of(x, values):
    """For each of `x` the largest of `values` in its block."""
    padded = torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    return padded.amax(1, keepdim=True).expand(-1, BLOCK).flatten()[: len(x)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, 5 * BLOCK + 3])
def test_a_number_is_off_by_a_sixteenth_of_itself_or_by_little_of_its_block(dtype, length):
    generator = torch.Generator().manual_seed(length)
    x = (torch.randn(length, generator=generator) * torch.randn(length, generator=generator).mul(3).exp2()).to(dtype)
    error, size = (back(x) - x.float()).abs(), x.float().abs()
    assert (error <= torch.maximum(size / 16, block_of(x, size) * 2.0**-17)).all()
    assert error.any() or length == 1


def test_a_block_takes_a_byte_for_each_number_and_one_for_its_scale():
    packed = encode_blocks(torch.randn(2 * BLOCK + 1))
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, BLOCK_BYTES) == (3, 129)
    assert decode_blocks(packed).shape == (3 * BLOCK,)
    assert not decode_blocks(packed)[2 * BLOCK + 1 :].any()


@pytest.mark.parametrize("largest", [2.0**127, 448.0, 1.0, 2.0**-120])
def test_powers_of_two_come_back_as_they_were_at_any_magnitude(largest):
    x = 2.0 ** (torch.tensor(largest).log2().floor() - torch.arange(10.0))
    assert torch.equal(back(x), x)


def test_zeros_come_back_as_zeros():
    assert not back(torch.zeros(BLOCK)).any()


@pytest.mark.parametrize("wrong", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_becomes_nan_and_its_neighbours_stay(wrong):
    x = torch.randn(2 * BLOCK, generator=torch.Generator().manual_seed(0))
    x[6] = 9.0  # so that the scale does not depend on what is replaced
    spoiled = x.clone()
    spoiled[5] = wrong
    came, expected = back(spoiled), back(x)
    assert came[5].isnan()
    came[5] = expected[5]
    assert torch.equal(came, expected)


def test_a_block_of_nothing_finite_becomes_nan():
    assert back(torch.full((BLOCK,), torch.inf)).isnan().all()


def test_a_block_is_scaled_by_its_own_numbers():
    x = torch.cat([torch.full((BLOCK,), 1e30), torch.full((BLOCK,), 1e-30)])
    assert torch.allclose(back(x), x, rtol=1 / 16)


def test_nothing_comes_of_nothing():
    assert encode_blocks(torch.empty(0)).shape == (0, BLOCK_BYTES)
    assert decode_blocks(encode_blocks(torch.empty(0))).shape == (0,)
