"""Forms of weights and states in kernels, on every half number, to the bit."""

import pytest
import torch
from comparing import same
from interpreted import interpreted

from booster.masters.formats import (
    Float32Master,
    Kahan,
    Nearest,
    Split24BFloat16,
    Split24Float16,
    SplitBFloat16,
    SplitFloat16,
    Stochastic,
)
from booster.masters.quantized_state import QuantizedState
from booster.masters.rounding import RoundingRNG

pytestmark = interpreted
SIZE = 2**16
BF16, F16 = torch.bfloat16, torch.float16
FORMS = {
    "separate bf16": (Float32Master, BF16),
    "separate fp16": (Float32Master, F16),
    "split bf16": (SplitBFloat16, BF16),
    "split fp16": (SplitFloat16, F16),
    "split24 bf16": (Split24BFloat16, BF16),
    "split24 fp16": (Split24Float16, F16),
    "nearest bf16": (Nearest, BF16),
    "nearest fp16": (Nearest, F16),
    "stochastic bf16": (Stochastic, BF16),
    "stochastic fp16": (Stochastic, F16),
    "kahan bf16": (Kahan, BF16),
    "kahan fp16": (Kahan, F16),
}


def every_half(dtype):
    return torch.arange(SIZE, dtype=torch.int32).to(torch.int16).view(dtype)


def copied(form, half, working, residual, values=None, random_bits=None):
    """By a kernel: the float32 numbers of `working` and `residual`; or, written there, `values`."""
    from interpreted_forms import load, store

    out = torch.zeros(working.numel()) if values is None else values
    residual = working if residual is None else residual
    random_bits = torch.zeros(64, dtype=torch.int32) if random_bits is None else random_bits
    kernel, function = (load, form.load) if values is None else (store, form.store)
    kernel[(working.numel() // 4096,)](working, residual, out, random_bits, FUNCTION=function, HALF=half, TILE=4096)
    return out


class Places:
    """Copies of tensors of 4,096 elements, `offset` elements into memory of somebody else."""

    def __init__(self, offset):
        self.offset, self.wholes = offset, []

    def __call__(self, tensor):
        self.wholes.append(torch.full((self.offset + 4096 + 64,), 7, dtype=tensor.dtype))
        inside = self.wholes[-1][self.offset : self.offset + 4096]
        return inside.copy_(tensor)

    def kept(self):
        """Whether nothing was written around them."""
        return all(
            bool((whole[: self.offset] == 7).all() and (whole[self.offset + 4096 :] == 7).all())
            for whole in self.wholes
        )


def alike(found, expected):
    """Whether all bits are, but for those of NaN."""
    kind = torch.int16 if found.dtype in (BF16, F16) else torch.int32
    nan = expected.isnan()
    same = found.view(kind) == expected.view(kind)
    return bool((same | (nan & found.isnan())).all())


@pytest.mark.parametrize("name", FORMS)
def test_every_half_number_with_any_rest_is_read_and_written_as_its_form_says(name):
    from booster.kernels.segments import DTYPES
    from booster.kernels.weights import FORMS as KERNELS

    kind, dtype = FORMS[name]
    rng = RoundingRNG()
    form = kind(rng) if "24" in name else kind()
    kernel, half = KERNELS[kind], DTYPES[dtype]
    rng.next()
    generator = torch.Generator().manual_seed(0)
    working = every_half(dtype)
    # Masters about every half number, and zeros, infinities and the largest.
    masters = working.float() * (1 + (torch.rand(SIZE, generator=generator) - 0.5) * 2.0**-7)
    mine, theirs = working.clone(), working.clone()
    residual, other = (form.allocate(SIZE, dtype, torch.device("cpu")) for _ in range(2))
    noise = kind().noise(SIZE, dtype, torch.device("cpu")) if kernel.noise else residual
    form.write(
        [theirs],
        other,
        masters.clone() if other is None or other.dtype != torch.float32 else masters,
        torch.zeros(SIZE),
    )
    copied(kernel, half, mine, noise, masters.clone(), rng.lanes("weights", torch.device("cpu")))
    assert alike(mine, theirs)
    finite = theirs.isfinite()
    if residual is not None:
        assert torch.equal(residual[finite], other[finite])
    # Some weights were written by somebody else since.
    mine[::7], theirs[::7] = 1.5, 1.5
    mine[::11], theirs[::11] = 0.0, 0.0
    values = torch.zeros(SIZE)
    form.read([theirs], other, values, torch.zeros(SIZE))
    found = copied(kernel, half, mine, other)
    assert alike(found[finite], values[finite])


@pytest.mark.parametrize("encoding", ["bf16", "signed", "unsigned", "root_ratio", "ratio"])
def test_states_are_packed_and_unpacked_to_the_bit(encoding):
    from interpreted_forms import close, open_, shares_of

    from booster.kernels.weights import ENCODINGS

    rng = RoundingRNG()
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(SIZE, generator=generator) * 10.0 ** torch.randint(-18, 9, (SIZE // 64, 1)).expand(
        -1, 64
    ).reshape(-1)
    values = values.abs() if encoding == "unsigned" else values
    values[:64], values[100], values[4096:4128] = 0.0, 1e30, 1e-40
    expected, found = QuantizedState(encoding, SIZE, values.device), QuantizedState(encoding, SIZE, values.device)
    divisor, shares = None, torch.ones(SIZE)
    if ENCODINGS[encoding].ratio:
        divisor = QuantizedState("unsigned", SIZE, values.device)
        divisor.codes.copy_(torch.arange(SIZE) % 256)
        shares_of[(SIZE // 4096,)](divisor.codes, shares, STEEPNESS=ENCODINGS[encoding].ratio, TILE=4096)
        assert same(shares, divisor.shares(torch.zeros(SIZE), encoding))
        values *= shares
    for _ in range(2):
        rng.next()
        random_bits = rng.random_bits("exp_avg", values.device)
        expected.quantize(values.clone(), random_bits, divisor=divisor)
        scales = found.codes if found.scales is None else found.scales
        form = ENCODINGS[encoding]
        close[(SIZE // 4096,)](found.codes, scales, values / shares, random_bits.lanes, FUNCTION=form.close, TILE=4096)
        assert torch.equal(found.codes.view(torch.uint8), expected.codes.view(torch.uint8))
        if found.scales is not None:
            assert torch.equal(found.scales, expected.scales)
        wide, out = expected.dequantize(torch.zeros(SIZE), divisor=divisor), torch.zeros(SIZE)
        open_[(SIZE // 4096,)](found.codes, scales, out, FUNCTION=form.open, TILE=4096)
        assert same(out * shares, wide)
        values = wide


@pytest.mark.parametrize("name", FORMS)
def test_a_form_at_odd_addresses_is_that_at_even_ones_and_keeps_what_is_around(name):
    from booster.kernels.segments import DTYPES
    from booster.kernels.weights import FORMS as KERNELS

    kind, dtype = FORMS[name]
    rng, cpu = RoundingRNG(), torch.device("cpu")
    form = kind(rng) if "24" in name else kind()
    rng.next()
    kernel, half, found = KERNELS[kind], DTYPES[dtype], []
    masters = torch.randn(4096, generator=torch.Generator().manual_seed(2))
    noise = kind().noise(4096, dtype, cpu) if kernel.noise else None
    for offset in (0, 1, 3):
        place, residual = Places(offset), form.allocate(4096, dtype, cpu)
        working, residual = place(every_half(dtype)[:4096]), None if residual is None else place(residual)
        beside = residual if noise is None else place(noise)
        copied(kernel, half, working, beside, place(masters), rng.lanes("weights", cpu))
        found.append((working, residual, copied(kernel, half, working, residual)))
        assert place.kept()
    assert same(found[0], found[1])
    assert same(found[0], found[2])


@pytest.mark.parametrize("encoding", ["bf16", "signed", "unsigned", "root_ratio", "ratio"])
def test_packed_states_at_odd_addresses_are_those_at_even_ones_and_keep_what_is_around(encoding):
    from interpreted_forms import close, open_

    from booster.kernels.weights import ENCODINGS

    rng, form, found = RoundingRNG(), ENCODINGS[encoding], []
    rng.next()
    values = torch.rand(4096, generator=torch.Generator().manual_seed(3))
    for offset in (0, 1, 3):
        place, state = Places(offset), QuantizedState(encoding, 4096, values.device)
        codes, out = place(state.codes), place(torch.zeros(4096))
        scales = codes if state.scales is None else state.scales
        lanes = rng.random_bits("exp_avg", values.device).lanes
        close[(1,)](codes, scales, place(values), lanes, FUNCTION=form.close, TILE=4096)
        open_[(1,)](codes, scales, out, FUNCTION=form.open, TILE=4096)
        found.append((codes, state.scales, out))
        assert place.kept()
    assert same(found[0], found[1])
    assert same(found[0], found[2])
