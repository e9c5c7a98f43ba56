"""What is kept with a half weight: exactness of every format, and how parameters are laid out in buckets."""

import math

import pytest
import torch

from booster.masters.formats import Float32Master, Kahan, Nearest, SplitBFloat16, SplitFloat16, Stochastic
from booster.masters.formats_compiled import BFloat16Planes, Float16Planes
from booster.tensors.flat import bucket_size, cut, flat, flat_like, is_dense, pack, shaped_like

BF16, FP16 = torch.bfloat16, torch.float16
CPU = torch.device("cpu")


def bits(values):
    return values.view(torch.int32)


def random_bits(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(-(2**31), 2**31, (n,), dtype=torch.int64, generator=generator).to(torch.int32).view(torch.float32)
    )


class Kept:
    """Values put into a format; `read` gives them back. Two working tensors, as a bucket of two parameters has."""

    def __init__(self, form, values, dtype):
        self.form, self.size = form, len(values)
        third = self.size // 3 // 64 * 64
        self.working = [torch.zeros(third, dtype=dtype), torch.zeros(self.size - third, dtype=dtype)]
        self.residual = form.allocate(self.size, dtype, CPU)
        self.write(values)

    def write(self, values):
        self.form.write(self.working, self.residual, values.clone(), torch.empty(self.size))

    def read(self):
        values = torch.empty(self.size)
        self.form.read(self.working, self.residual, values, torch.empty(self.size))
        return values

    @property
    def weights(self):
        return torch.cat(self.working)


def test_split_bfloat16_gives_back_every_bit_of_any_float32_number():
    values = random_bits(2**20)
    values[values.isnan()] = math.nan
    values = torch.cat([values, torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, 3.4e38, 1e-45])])
    assert torch.equal(bits(Kept(SplitBFloat16(), values, BF16).read()), bits(values))


def test_split_bfloat16_rounds_as_torch_does_but_for_exact_ties_which_go_away_from_zero():
    values = torch.randn(2**18)
    values[:4] = torch.tensor([1 + 2.0**-8, -1 - 2.0**-8, 1 + 3 * 2.0**-8, 1.0])
    weights = Kept(SplitBFloat16(), values, BF16).weights
    tie = (bits(values) & 0xFFFF) == 0x8000
    assert torch.equal(weights[~tie], values[~tie].bfloat16())
    assert weights[:4].tolist() == [1 + 2.0**-7, -1 - 2.0**-7, 1 + 2.0**-6, 1.0]


@pytest.mark.parametrize("form", [Float32Master, Nearest, Kahan])
def test_every_rounding_to_nearest_gives_the_same_bfloat16_weights_as_split(form):
    values = torch.randn(4096)
    values[::5] = (values[::5].bfloat16().float().view(torch.int32) + 0x8000).view(torch.float32)  # ties
    assert torch.equal(Kept(form(), values, BF16).weights, Kept(SplitBFloat16(), values, BF16).weights)


def test_split_float16_is_exact_from_the_smallest_normal_number_up_and_within_two_to_minus_38_below():
    magnitudes = torch.exp2(torch.empty(2**19).uniform_(-30, 15.99, generator=torch.Generator().manual_seed(0)))
    values = magnitudes * torch.where(torch.rand(2**19) < 0.5, -1.0, 1.0)
    values[:3] = torch.tensor([2.0**-14, 1.0 - 2.0**-24, 2.0 - 2.0**-23])  # the last two round up to a power of two
    kept = Kept(SplitFloat16(), values, FP16)
    read = kept.read()
    assert torch.equal(kept.weights, values.half())
    normal = values.abs() >= 2.0**-14
    assert normal.sum() > 1000
    assert torch.equal(read[normal], values[normal])
    assert (read[~normal] - values[~normal]).abs().max() < 2.0**-38


def test_split_float16_of_an_overflow_is_infinite_and_not_nan():
    assert Kept(SplitFloat16(), torch.tensor([1e5, -1e5, 1.0]), FP16).read().tolist() == [math.inf, -math.inf, 1.0]


FORMATS = {
    BF16: [Float32Master, SplitBFloat16, Nearest, Stochastic, Kahan, BFloat16Planes],
    FP16: [Float32Master, SplitFloat16, Nearest, Stochastic, Kahan, Float16Planes],
}
PAIRS = [pytest.param(dtype, form, id=f"{dtype} {form.__name__}") for dtype in FORMATS for form in FORMATS[dtype]]


def representable(dtype):
    """Every number of `dtype` but the NaNs."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    return numbers[~numbers.isnan()]


@pytest.mark.parametrize(("dtype", "form"), PAIRS)
def test_a_representable_number_never_moves(dtype, form):
    """Thirty times each: an upper neighbour hit once in 16,000 draws shows."""
    numbers = representable(dtype).repeat(30 if form is Stochastic else 1)
    kept = Kept(form(), numbers.float(), dtype)
    for _ in range(2):
        assert torch.equal(kept.weights.view(torch.int16), numbers.view(torch.int16))
        assert torch.equal(kept.read(), numbers.float())
        kept.write(kept.read())


@pytest.mark.parametrize(("dtype", "form"), PAIRS)
def test_what_is_kept_reads_and_writes_without_another_change(dtype, form):
    """The first rounding may cost something; after it, reading and writing again and again is the identity."""
    if form is Stochastic:
        pytest.skip("rounds again only what is not representable, and what it keeps is")
    generator = torch.Generator().manual_seed(0)
    magnitudes = torch.exp2(torch.empty(2**19).uniform_(-30, 15.9, generator=generator))
    kept = Kept(form(), magnitudes * torch.where(torch.rand(2**19, generator=generator) < 0.5, -1.0, 1.0), dtype)
    first, weights = kept.read(), kept.weights
    kept.write(first)
    assert torch.equal(bits(kept.read()), bits(first))
    assert torch.equal(kept.weights, weights)


CHANCES = [2.0**-12, 0.01, 0.25, 0.5, 0.9, 1 - 2.0**-10]
BELOW = {
    "ordinary": lambda dtype: 1.0,
    "below a power of two": lambda dtype: 2.0 - torch.finfo(dtype).eps,
    "large": lambda dtype: 2.0**14,
    "subnormal": lambda dtype: 3 * 2.0**-24 if dtype == FP16 else 2.0**-100,
    "smallest normal": lambda dtype: 2.0**-14,
}


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("below", BELOW)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_stochastic_rounding_takes_each_neighbour_with_the_chance_that_theory_gives_it(dtype, below, sign):
    draws = 2**17
    low = torch.tensor(BELOW[below](dtype)).to(dtype)
    high = (low.view(torch.int16) + 1).view(dtype)
    for chance in CHANCES:
        value = (low.double() + chance * (high.double() - low.double())).float()
        exact = float((value.double() - low.double()) / (high.double() - low.double()))
        weights = Kept(Stochastic(), torch.full((draws,), sign * float(value)), dtype).weights
        ups = int((weights == sign * high).sum())
        assert ups + int((weights == sign * low).sum()) == draws
        assert abs(ups - draws * exact) <= 5 * math.sqrt(draws * exact * (1 - exact)) + 1


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_stochastic_rounding_is_right_on_average_for_any_numbers(dtype):
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(2**19, generator=generator)
    weights = Kept(Stochastic(), values, dtype).weights.double()
    ulp = torch.exp2(values.double().abs().log2().floor()).clamp(min=2.0**-14) * torch.finfo(dtype).eps
    errors = (weights - values.double()) / ulp
    assert errors.abs().max() < 1.0
    assert abs(float(errors.mean())) < 5 * math.sqrt(1 / 6 / 2**19)  # the variance of a chance p is p (1 - p)
    away = (errors * values.sign()).mean()
    assert abs(float(away)) < 5 * math.sqrt(1 / 6 / 2**19)


def test_two_ranks_draw_the_same_and_the_users_random_state_is_not_touched():
    before = torch.get_rng_state()
    first, second = (Kept(Stochastic(), torch.linspace(0, 1, 4096), BF16).weights for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("dtype", "form", "moves"), [(BF16, Nearest, False), (BF16, Kahan, True), (FP16, Kahan, True)])
def test_kahan_accumulates_updates_below_half_an_ulp_and_plain_rounding_loses_them(dtype, form, moves):
    kept = Kept(form(), torch.ones(64), dtype)
    step = torch.finfo(dtype).eps / 16
    for _ in range(160):
        kept.write(kept.read() + step)
    assert torch.allclose(kept.read(), torch.full((64,), 1 + 160 * step if moves else 1.0), rtol=1e-3 * step * 160)


def test_buckets_are_cut_at_multiples_of_64_and_hold_an_eighth_at_most_and_fit_a_cache_on_cpu():
    params = [torch.zeros(1_000_000), torch.zeros(7), torch.zeros(3_000_001), torch.zeros(3, 5)]
    total = sum(param.numel() for param in params)
    size = bucket_size(total, CPU)
    assert size % 64 == 0
    assert size <= total / 8
    assert bucket_size(10**9, CPU) == 2**19
    assert bucket_size(10**9, torch.device("cuda")) == 10**9 // 8 // 64 * 64
    buckets = cut(params, size)
    assert all(bucket[-1].offset + bucket[-1].size <= size for bucket in buckets)
    assert all(piece.offset % 64 == piece.start % 64 == 0 for bucket in buckets for piece in bucket)
    assert len(buckets) == math.ceil(total / size)
    for param in params:
        pieces = [piece for bucket in buckets for piece in bucket if piece.param is param]
        assert [piece.start for piece in pieces] == [0, *[piece.stop for piece in pieces[:-1]]]
        assert pieces[-1].stop == param.numel()


def test_small_tensors_share_a_bucket_and_whole_ones_are_not_cut():
    params = [torch.zeros(100) for _ in range(400)]
    assert len(cut(params, bucket_size(40_000, CPU))) == 1  # 2 MiB of scratch, and a step is not calls alone
    assert len(cut(params, bucket_size(40_000, CPU, released=True))) == 4
    lots = pack([torch.zeros(70), torch.zeros(30), torch.zeros(500), torch.zeros(1)], 128)
    assert [[piece.size for piece in lot] for lot in lots] == [[70], [30], [500], [1]]


def test_memory_order_is_kept_for_any_dense_layout():
    param = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert is_dense(param)
    assert flat(param).data_ptr() == param.data_ptr()
    assert torch.equal(shaped_like(flat(param), param), param)
    other = torch.randn(2, 3, 4, 5)
    assert torch.equal(shaped_like(flat_like(other, param), param), other)
    assert not is_dense(torch.zeros(4, 4)[:, ::2])
    assert not is_dense(torch.zeros(()).expand(3))
