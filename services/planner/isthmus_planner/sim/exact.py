"""Random numbers, logarithm and histogram bins from correctly rounded operations only: the same on any machine.

A C library's `log` may differ from another's in the last bit, and one bit changes who comes first.
"""

from __future__ import annotations

import math

from isthmus_planner.sim.compiled import compiled, u64

MASK = 0xFFFFFFFFFFFFFFFF
LN2 = 0.6931471805599453
SQRT_HALF = 0.7071067811865476

FIRST_EXPONENT = -26
"""Bins begin at 2^-27 s (7 ns); what is below counts in the first."""
OCTAVES = 46
"""Up to 2^19 s (six days); what is above counts in the last."""
BINS_PER_OCTAVE = 256
BINS = OCTAVES * BINS_PER_OCTAVE


@compiled
def mix(value: int) -> int:
    """SplitMix64's finalizer (Steele, Lea, Flood 2014): 64 bits to 64 bits, one to one."""
    value = u64(value)
    value = ((value ^ (value >> u64(30))) * u64(0xBF58476D1CE4E5B9)) & u64(MASK)
    value = ((value ^ (value >> u64(27))) * u64(0x94D049BB133111EB)) & u64(MASK)
    return value ^ (value >> u64(31))


@compiled
def uniform(seed: int, stream: int, counter: int, use: int) -> float:
    """In the open interval (0, 1), 53 bits; a function of its arguments alone."""
    key = mix((u64(seed) + u64(0x9E3779B97F4A7C15) * u64(stream * 8 + use + 1)) & u64(MASK))
    bits = mix((key + u64(0x9E3779B97F4A7C15) * u64(counter + 1)) & u64(MASK))
    return (float(bits >> u64(11)) + 0.5) * 1.1102230246251565e-16


@compiled
def ln(value: float) -> float:
    """Natural logarithm of a number above 0, within 2 ulp: ln m = 2 artanh((m - 1) / (m + 1)) as a series."""
    mantissa, exponent = math.frexp(value)
    if mantissa < SQRT_HALF:
        mantissa *= 2.0
        exponent -= 1
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    total = 0.0
    for k in range(23, 0, -2):
        total = total * square + 1.0 / k
    return exponent * LN2 + 2.0 * s * total


@compiled
def bin_of(value: float) -> int:
    """Of a duration >= 0: its octave and, within that, one of equal parts."""
    if value <= 0.0:
        return 0
    mantissa, exponent = math.frexp(value)
    octave = exponent - FIRST_EXPONENT
    if octave < 0:
        return 0
    if octave >= OCTAVES:
        return BINS - 1
    return octave * BINS_PER_OCTAVE + int((mantissa - 0.5) * (2 * BINS_PER_OCTAVE))


@compiled
def bin_start(index: int) -> float:
    """The least duration of a bin (the first also holds all below)."""
    octave = index // BINS_PER_OCTAVE
    part = index % BINS_PER_OCTAVE
    return math.ldexp(0.5 + part / (2.0 * BINS_PER_OCTAVE), octave + FIRST_EXPONENT)
