"""Formats in plain Python, one number at a time: what the fast code and the runtimes must give to the last bit."""

import itertools

import numpy as np


def minifloat(exponent_bits, mantissa_bits, bias, codes):
    """The numbers of a small float type by code, without the sign; subnormals have exponent 0."""
    numbers = []
    for code in range(codes):
        exponent, mantissa = divmod(code, 1 << mantissa_bits)
        if exponent == 0:
            numbers.append(mantissa * 2.0 ** (1 - bias - mantissa_bits))
        else:
            numbers.append((1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias))
    return numbers


E4M3 = minifloat(4, 3, 7, 127)  # 0 to 448; code 127 is NaN
E2M1 = minifloat(2, 1, 1, 8)  # 0, 0.5, 1, 1.5, 2, 3, 4, 6
INT4 = [float(n) for n in range(8)]  # and -8
INT8 = [float(n) for n in range(128)]
GRIDS = {"fp8": E4M3, "nvfp4": E2M1, "int4": INT4, "int8": INT8}


def nearest(x, grid):
    """The nearest number of the grid, of two at the same distance the one with an even code; saturates."""
    if grid is INT4 and x < -7.5:
        return np.float32(-8)
    size = min(abs(float(x)), grid[-1])
    best = min(range(len(grid)), key=lambda code: (abs(grid[code] - size), code % 2))
    return np.float32(np.copysign(grid[best], x))


def round_trip(x, scale, grid):
    """Quantised and back, in float32 arithmetic."""
    scale = np.float32(scale)
    return nearest(np.float32(x) / scale, grid) * scale


def each(array, scales, grid):
    """`round_trip` of every element, the scales broadcast."""
    wide = np.broadcast_to(scales, array.shape)
    out = np.zeros(array.shape, np.float32)
    for index in itertools.product(*map(range, array.shape)):
        out[index] = round_trip(array[index], wide[index], grid)
    return out
