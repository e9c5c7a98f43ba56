"""Kernels that read or write one form alone. Needs Triton."""

import triton
import triton.language as tl

from booster.kernels.weights import load_unsigned, shares


@triton.jit
def load(working, residual, out, random_bits, FUNCTION: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = at >= 0
    weights = working.to(tl.int64)
    tl.store(out + at, FUNCTION(weights, residual.to(tl.int64), at, mask, HALF))


@triton.jit
def store(working, residual, values, random_bits, FUNCTION: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = at >= 0
    FUNCTION(working.to(tl.int64), residual.to(tl.int64), at, mask, tl.load(values + at), random_bits, HALF)


@triton.jit
def open_(codes, scales, out, FUNCTION: tl.constexpr, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(out + at, FUNCTION(codes.to(tl.int64), scales.to(tl.int64), at, at >= 0))


@triton.jit
def close(codes, scales, values, random_bits, FUNCTION: tl.constexpr, TILE: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * TILE
    at = first + tl.arange(0, TILE)
    FUNCTION(codes.to(tl.int64), scales.to(tl.int64), first, at, at >= 0, tl.load(values + at), random_bits, TILE)


@triton.jit
def shares_of(codes, out, STEEPNESS: tl.constexpr, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(out + at, shares(load_unsigned(codes.to(tl.int64), at, at >= 0), STEEPNESS))
