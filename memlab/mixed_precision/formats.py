"""What a floating-point number is, bit by bit, and what becomes of a value that has to fit into fewer bits.

A number has a sign bit s, an exponent field e and a mantissa field m, and denotes

    (−1)^s · 2^(e − bias) · 1.m        a normal number
    (−1)^s · 2^(1 − bias) · 0.m        a subnormal number or zero, where every bit of e is 0

with bias = 2^(exponent bits − 1) − 1. So the exponent's bits decide how far a format reaches, and the mantissa's how
finely it divides each power of two. A value in between goes to the nearest of its two neighbours, and from halfway to
the one whose last bit is 0. The distance between neighbours is an *ulp* (unit in the last place).

Where every bit of e is 1, m = 0 is infinity and all else is nan. FP8 E4M3 uses those patterns for numbers, all but one.
Sources: IEEE 754-2019, section 3.4; Micikevicius et al. 2022, *FP8 formats for deep learning*, section 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """A number format: its name, the bits of its two fields, and torch's dtype for it, if it has one.

    infinities: True if the exponent with all bits set is kept for infinity and nan. Without them, only the pattern
    with *all* bits set is nan, and what is too large becomes ±max: torch 2.13's cast does so, torch 2.11's made nan.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    dtype: torch.dtype | None
    infinities: bool = True

    @property
    def bits(self) -> int:
        """Sign, exponent and mantissa."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def nbytes(self) -> int:
        """Bytes that one number takes up. TF32's 19 bits lie in an FP32's 4: it is a way to multiply, not to store."""
        return self.dtype.itemsize if self.dtype else 4

    @property
    def bias(self) -> int:
        """What is taken off the exponent field, so that numbers below 1 have one too."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def epsilon(self) -> float:
        """The ulp of 1. A normal number's ulp is at most ε times the number, and more than ε/2 times."""
        return 2.0**-self.mantissa_bits

    @property
    def smallest_subnormal(self) -> float:
        """The last step above zero, and the ulp of every subnormal number."""
        return self.smallest_normal * self.epsilon

    @property
    def smallest_normal(self) -> float:
        """Below it the leading 1 is gone, and with it bits of precision: one for each power of two."""
        return 2.0 ** (1 - self.bias)

    @property
    def largest_exponent(self) -> int:
        """The exponent of max: that of the last field, or of the one before where infinity has the last."""
        return 2**self.exponent_bits - (2 if self.infinities else 1) - self.bias

    @property
    def max(self) -> float:
        """The largest number: a mantissa of ones; in E4M3 the one before, since nan has that."""
        return 2.0**self.largest_exponent * (2 - self.epsilon * (1 if self.infinities else 2))

    @property
    def largest_ulp(self) -> float:
        """The distance from max to the number before it."""
        return 2.0**self.largest_exponent * self.epsilon

    @property
    def last_pattern(self) -> int:
        """What every value that is too large becomes, as an integer: infinity, or where there is none, max."""
        every_bit = 2 ** (self.bits - 1) - 1  # but the sign
        return every_bit - 2**self.mantissa_bits + 1 if self.infinities else every_bit - 1


FORMATS = {
    format.name: format
    for format in (
        Format("FP32", 8, 23, torch.float32),
        Format("TF32", 8, 10, None),
        Format("FP16", 5, 10, torch.float16),
        Format("BF16", 8, 7, torch.bfloat16),
        Format("FP8 E4M3", 4, 3, torch.float8_e4m3fn, infinities=False),
        Format("FP8 E5M2", 5, 2, torch.float8_e5m2),
    )
}
"""The formats in use, by name: exponent and mantissa bits, and the dtype where PyTorch has one."""


def number_format(name: str | Format) -> Format:
    """The format of that name; a Format is its own. Raises ValueError for an unknown name."""
    if isinstance(name, Format):
        return name
    if name not in FORMATS:
        raise ValueError(f"expected a format among {', '.join(FORMATS)}; found {name!r}")
    return FORMATS[name]


# ---- one number


@dataclass(frozen=True)
class Bits:
    """A value as a format keeps it. `asked` is the value before rounding, `value` what the bits denote.

    sign, exponent, mantissa: the fields, as texts of 0 and 1. kind: "zero", "subnormal", "normal", "infinity" or
    "nan". below, above: the neighbours; E4M3 has no number beyond ±max, so there they are nan.
    """

    format: Format
    asked: float
    sign: str
    exponent: str
    mantissa: str
    value: float
    kind: str
    ulp: float
    below: float
    above: float

    @property
    def error(self) -> float:
        """What rounding added."""
        return self.value - self.asked if self.value != self.asked else 0.0

    @property
    def relative_error(self) -> float:
        """The error as a part of the value asked for."""
        return self.error / self.asked if self.error else 0.0


def bits(value: float, format: str | Format) -> Bits:
    """Round a Python float into a format and take the result apart. Exact: rounding is done on integers.

    Raises ValueError for an unknown format.

    >>> tenth = bits(0.1, "FP16")
    >>> tenth.sign, tenth.exponent, tenth.mantissa, tenth.value
    ('0', '01011', '1001100110', 0.0999755859375)
    """
    format = number_format(format)
    try:
        asked = float(value)
    except OverflowError:  # an int too large for FP64
        asked = math.inf if value > 0 else -math.inf
    negative = math.copysign(1, asked) < 0
    pattern = nearest(abs(asked), format)
    number = denoted(pattern, format)
    if math.isnan(number):
        ulp = below = above = math.nan
    else:
        # Patterns count up with their numbers, so the neighbours are the patterns one less and one more.
        place = -pattern if negative else pattern
        below, above = _at(place - 1, format), _at(place + 1, format)
        ulp = format.smallest_subnormal * 2.0 ** max((pattern >> format.mantissa_bits) - 1, 0)
    if math.isinf(number):
        ulp = number
    written = f"{pattern:0{format.bits - 1}b}"
    fields = "01"[negative], written[: format.exponent_bits], written[format.exponent_bits :]
    return Bits(format, asked, *fields, math.copysign(number, asked), _kind(number, format), ulp, below, above)


def nearest(magnitude: float, format: Format) -> int:
    """The pattern (exponent field, then mantissa field) of the number nearest to a `magnitude` ≥ 0."""
    if math.isnan(magnitude):
        return 2 ** (format.bits - 1) - 1
    if magnitude in (0, math.inf):
        return format.last_pattern if magnitude else 0
    exponent = max(math.frexp(magnitude)[1] - 1, 1 - format.bias)  # 2^exponent ≤ magnitude, unless that is subnormal
    numerator, denominator = magnitude.as_integer_ratio()
    shift = format.mantissa_bits - exponent  # an ulp here is 2^−shift
    numerator, denominator = numerator << max(shift, 0), denominator << max(-shift, 0)
    ulps, rest = divmod(numerator, denominator)
    if 2 * rest > denominator or (2 * rest == denominator and ulps % 2 == 1):
        ulps += 1
    # A normal number's ulps begin with the leading 1, which the exponent field stands for. If they have grown to the
    # next power of two, they carry into that field by themselves, and from the last one into infinity.
    return min(ulps + ((exponent + format.bias - 1) << format.mantissa_bits), format.last_pattern)


def denoted(pattern: int, format: Format) -> float:
    """The number ≥ 0, infinity or nan that a pattern (exponent field, then mantissa field) stands for."""
    exponent, mantissa = divmod(pattern, 2**format.mantissa_bits)
    if pattern > format.last_pattern:
        return math.nan
    if pattern == format.last_pattern and format.infinities:
        return math.inf
    if exponent == 0:
        return 2.0 ** (1 - format.bias) * (0 + mantissa * format.epsilon)
    return 2.0 ** (exponent - format.bias) * (1 + mantissa * format.epsilon)


def _at(place: int, format: Format) -> float:
    """The number so many steps above zero, or below it: infinity stays where it is, and beyond E4M3's max is nan."""
    furthest = format.last_pattern + (not format.infinities)
    return math.copysign(denoted(min(abs(place), furthest), format), place)


def _kind(number: float, format: Format) -> str:
    if math.isnan(number):
        return "nan"
    if math.isinf(number):
        return "infinity"
    if number >= format.smallest_normal:
        return "normal"
    return "subnormal" if number else "zero"


# ---- many numbers


def round_to(tensor: Tensor, format: str | Format) -> Tensor:
    """What is left of a tensor's values in a format, as FP32, which holds every number of every format here.

    tensor: of any shape and floating dtype; the result has its shape and device, and no gradient. torch's own cast
    does it, and like it rounds an FP64 tensor to FP32 first. TF32 is no dtype: its 13 missing bits are rounded off
    as integers, to nearest even (a GPU's multiplication may cut them off instead).

    Raises ValueError for an unknown format.
    """
    format, single = number_format(format), tensor.detach().float()
    if format.dtype is None:
        missing = 23 - format.mantissa_bits
        pattern = single.view(torch.int32)
        last_kept = (pattern >> missing) & 1
        rounded = (pattern + (2 ** (missing - 1) - 1) + last_kept) & -(2**missing)
        return torch.where(single.isfinite(), rounded.view(torch.float32), single)
    if not format.infinities:
        single = single.clamp(-format.max, format.max)  # torch's releases differ in what the cast makes of the rest
    return single.to(format.dtype).float()


FATES = ("lost to zero", "subnormal", "normal", "overflow")
"""What can become of a value other than zero."""


def fates(tensor: Tensor, format: str | Format, scale: float = 1.0) -> dict[str, int]:
    """How many of a tensor's nonzero values, times `scale`, meet each of the FATES in a format; they sum to all.

    A value goes to zero up to and including half the smallest subnormal number (a tie goes to the even one: zero), and
    it is normal from half a step below the smallest normal one. It overflows half an ulp beyond max: at that very
    tie to infinity, but not in E4M3, whose max has an even mantissa. Infinity and nan count as overflow.

    tensor: of any shape and floating dtype. Scaled and compared in FP64: FP32 times a power of two is exact.
    Raises ValueError for an unknown format, or a scale that is not a finite number above 0.
    """
    format = number_format(format)
    if not 0 < scale < math.inf:
        raise ValueError(f"expected a finite scale above 0, such as 2.0**16; found {scale!r}")
    values = tensor.detach().double().abs()
    values = values[values != 0] * scale
    half_step, too_far = format.smallest_subnormal / 2, format.max + format.largest_ulp / 2
    fits = values < too_far if format.infinities else values <= too_far
    lost = values <= half_step
    normal = (values >= format.smallest_normal - half_step) & fits
    subnormal = fits & ~(lost | normal)
    counts = torch.stack([fate.sum() for fate in (lost, subnormal, normal, ~fits)])
    return dict(zip(FATES, counts.tolist(), strict=True))
