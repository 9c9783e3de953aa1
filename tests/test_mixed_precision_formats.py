"""Formats by bits: a pattern means what torch says it means, and a value rounds to where torch's cast puts it."""

import itertools
import math
import random
import struct
from fractions import Fraction

import pytest
import torch

from memlab.mixed_precision import FORMATS, Format, bits, fates, round_to
from memlab.mixed_precision.formats import FATES
from tests.harness import refusals, refused
from tests.tiers import pairs, some

CASTS = [format for format in FORMATS.values() if format.dtype is not None]
SMALL = [format for format in CASTS if format.bits <= 16]
VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
EVERY = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
CAST = pytest.mark.parametrize("format", CASTS, ids=lambda format: format.name)
EVERY_SMALL = pytest.mark.parametrize("format", SMALL, ids=lambda format: format.name)
ALL_PATTERNS = some("format", [FORMATS[name] for name in ("FP8 E4M3", "FP16", "BF16", "FP8 E5M2")], keep=2)  # of 8 bits


def patterns(format):
    """Every pattern of a small format, as a tensor of its dtype."""
    numbers = torch.arange(2**format.bits, dtype=torch.int32)
    return numbers.to(VIEWS[format.nbytes]).view(format.dtype)


def pattern(tensor):
    """The bits of one number, as text."""
    number = int(tensor.view(VIEWS[tensor.dtype.itemsize]))
    return f"{number & (256**tensor.dtype.itemsize - 1):0{8 * tensor.dtype.itemsize}b}"


def written(found):
    return found.sign + found.exponent + found.mantissa


def same(one, other):
    return one == other or (math.isnan(one) and math.isnan(other))


def random_singles(count=1000, seed=0):
    """FP32 numbers with any bits at all, so of every size, and among them infinities and nans."""
    generator = random.Random(seed)
    singles = (struct.unpack("f", struct.pack("I", generator.getrandbits(32)))[0] for _ in range(count))
    return torch.tensor([*singles, math.inf, -math.inf, math.nan, 0.0, -0.0])


def midpoints(format):
    """Halfway between all neighbours of a small format, and halfway beyond its max, which FP32 holds exactly."""
    values = patterns(format).double()
    values = values[values.isfinite() & (values >= 0)].unique()
    halfway = torch.cat([(values[1:] + values[:-1]) / 2, torch.tensor([format.max + format.largest_ulp / 2])])
    assert torch.equal(halfway.float().double(), halfway)
    return halfway.float()


def around(values):
    """Each value, and its two neighbours in FP32, with either sign."""
    up, down = (torch.nextafter(values, torch.tensor(end)) for end in (math.inf, -math.inf))
    every = torch.cat([values, up, down])
    return torch.cat([every, -every])


def tf32(single):
    """FP32 with its 13 last bits rounded away, to nearest even, by struct and integers."""
    number = struct.unpack("I", struct.pack("f", single))[0]
    if not math.isfinite(single):
        return single
    kept, dropped = number >> 13, number & 0x1FFF
    kept += dropped > 0x1000 or (dropped == 0x1000 and kept & 1)
    return struct.unpack("f", struct.pack("I", kept << 13))[0]


@CAST
def test_what_follows_from_the_number_of_bits_is_what_torch_says(format):
    info = torch.finfo(format.dtype)
    assert (format.max, format.smallest_normal, format.epsilon) == (info.max, info.smallest_normal, info.eps)
    assert (format.bits, format.nbytes) == (info.bits, format.dtype.itemsize)
    positive = torch.tensor([1], dtype=VIEWS[format.nbytes]).view(format.dtype)
    assert format.smallest_subnormal == positive.double().item()


def test_tf32_has_fp32s_reach_and_fp16s_steps_in_19_bits_that_take_up_4_bytes():
    assert FORMATS["TF32"].bits == 19 and FORMATS["TF32"].nbytes == 4
    assert FORMATS["TF32"].smallest_normal == FORMATS["FP32"].smallest_normal
    assert FORMATS["TF32"].epsilon == FORMATS["FP16"].epsilon
    assert FORMATS["TF32"].max == tf32(torch.finfo(torch.float32).max * (1 - 2**-11))


def test_e4m3_trades_its_infinities_for_a_power_of_two():
    assert FORMATS["FP8 E4M3"].max == 448
    assert Format("with infinities", 4, 3, None).max == 240


@ALL_PATTERNS
def test_every_pattern_comes_back_with_its_own_bits_value_and_kind(format):
    every = patterns(format)
    for one, value in zip(every, every.double().tolist(), strict=True):
        found = bits(value, format)
        assert same(found.value, value)
        if math.isnan(value):
            assert found.kind == "nan" and math.isnan(found.ulp) and math.isnan(found.error)
            continue
        assert written(found) == pattern(one)
        assert found.error == found.relative_error == 0.0
        normal, empty = abs(value) >= torch.finfo(format.dtype).smallest_normal, set(found.exponent) == {"0"}
        kind = "infinity" if math.isinf(value) else "normal" if normal else "subnormal" if value else "zero"
        assert found.kind == kind
        assert empty == (found.kind in ("subnormal", "zero"))


@CAST
def test_random_fp32_numbers_round_to_where_torchs_cast_puts_them(format):
    for single, expected in zip(singles := random_singles(), round_to(singles, format).tolist(), strict=True):
        found = bits(single.item(), format)
        assert same(found.value, expected)
        assert math.isnan(expected) or math.copysign(1, found.value) == math.copysign(1, expected)
    if format.infinities:
        assert torch.equal(round_to(singles, format).nan_to_num(7), singles.to(format.dtype).float().nan_to_num(7))


@ALL_PATTERNS
def test_from_halfway_it_goes_to_the_even_neighbour_and_from_beside_it_to_the_nearer(format):
    halfway = midpoints(format)
    asked = torch.cat([halfway, -halfway, around(halfway[:: 1 if format.bits == 8 else 7])])
    expected = asked.clamp(-format.max, format.max) if not format.infinities else asked
    for one, value in zip(asked.tolist(), expected.to(format.dtype).double().tolist(), strict=True):
        assert bits(one, format).value == value


def test_tf32_is_fp32_with_13_bits_rounded_away():
    numbers = random_singles(seed=1)
    halfway = torch.tensor([0x3F801000, 0x3F803000, 0x00001000, 0x00003000, 0x7F7FF000, 0x7F7FEFFF], dtype=torch.int32)
    numbers = torch.cat([numbers, around(halfway.view(torch.float32))])
    for single, rounded in zip(numbers.tolist(), round_to(numbers, "TF32").tolist(), strict=True):
        assert same(rounded, tf32(single)) and same(bits(single, "TF32").value, tf32(single))
    nans = torch.tensor([0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    assert round_to(nans, "TF32").isnan().all()


@EVERY
def test_an_fp64_number_goes_to_the_nearest_and_is_rounded_only_once(format):
    generator = random.Random(2)
    for _ in range(500):
        asked = math.ldexp(generator.uniform(-2, 2), generator.randint(-30, 30))
        found = bits(asked, format)
        if abs(asked) > format.max:
            continue
        off = abs(Fraction(found.value) - Fraction(asked))
        for beside in (found.below, found.above):
            assert not math.isfinite(beside) or off <= abs(Fraction(beside) - Fraction(asked))
        assert off <= Fraction(found.ulp) / 2
    # Through FP32 this one would lie halfway, and go down to 1.
    assert bits(1 + format.epsilon / 2 + 2**-50, format).value == 1 + format.epsilon


@ALL_PATTERNS
def test_the_neighbours_are_the_next_patterns_and_an_ulp_is_what_lies_between_them(format):
    values = patterns(format).double()
    ordered = values[~values.isnan()].unique().tolist()
    for before, value, after in zip(ordered, ordered[1:], ordered[2:], strict=False):
        found = bits(value, format)
        assert (found.below, found.above) == (before, after)
        if 0 <= value < format.max:
            assert found.ulp == after - value
        assert bits(-value, format).ulp == found.ulp
    assert bits(format.max, format).ulp == format.max - bits(format.max, format).below
    top = bits(ordered[-1], format)
    assert top.above == math.inf if format.infinities else math.isnan(top.above)


def test_the_error_of_a_rounded_value_is_absolute_and_relative():
    found = bits(1e-10 * 1024, "FP16")
    assert found.value == 2 * found.ulp == 2**-23 and found.kind == "subnormal"
    assert found.error == 2**-23 - 1e-10 * 1024
    assert found.relative_error == found.error / (1e-10 * 1024) == pytest.approx(0.1642, abs=1e-4)
    assert bits(2e-8, "FP16").relative_error == -1.0 and bits(2e-8, "FP16").kind == "zero"
    assert bits(65_520, "FP16").error == math.inf and bits(65_519.99, "FP16").value == 65_504
    assert bits(1000, "FP8 E4M3").error == 448 - 1000
    assert bits(0.0, "BF16").relative_error == 0.0 and bits(math.inf, "BF16").error == 0.0


@some("format, dtype", itertools.product(CASTS, [torch.float64, torch.float16, torch.bfloat16]), keep=8)
def test_rounding_a_tensor_gives_fp32_of_the_same_shape_and_leaves_the_tensor_alone(format, dtype):
    tensor = torch.linspace(-500, 500, 60, dtype=dtype).view(3, 4, 5).transpose(0, 2).requires_grad_()
    before = tensor.detach().clone()
    rounded = round_to(tensor, format)
    assert rounded.dtype is torch.float32 and rounded.shape == (5, 4, 3) and not rounded.requires_grad
    expected = [bits(one, format).value for one in before.float().flatten().tolist()]
    assert rounded.flatten().tolist() == expected and torch.equal(tensor, before)


def looked_at(tensor, format, scale=1.0):
    """The same counts, by rounding and looking at what came out."""
    scaled = tensor[tensor != 0].double() * scale
    kinds = [(abs(one) > format.max, bits(one, format)) for one in scaled.tolist()]
    counts = dict.fromkeys(FATES, 0)
    for beyond, found in kinds:
        over = math.isinf(found.value) or math.isnan(found.value)
        over |= beyond and abs(found.asked) > format.max + format.largest_ulp / 2
        counts["overflow" if over else {"zero": "lost to zero"}.get(found.kind, found.kind)] += 1
    return counts


@pairs("format, scale", FORMATS.values(), [1.0, 2.0**10, 3.0])
def test_what_becomes_of_values_is_what_rounding_each_of_them_shows(format, scale):
    small = torch.randn(500, generator=torch.manual_seed(0)) * 1e-4
    tensor = torch.cat([random_singles(seed=3), small, torch.zeros(9)])
    found = fates(tensor.view(2, -1), format, scale)
    assert found == looked_at(tensor, format, scale)
    assert list(found) == list(FATES) and sum(found.values()) == int((tensor != 0).sum())


@EVERY_SMALL
def test_at_the_edges_of_its_range_it_counts_what_torchs_cast_leaves(format):
    smallest, normal = format.smallest_subnormal, format.smallest_normal
    edges = [smallest / 2, smallest, normal - smallest / 2, normal - smallest, normal, format.max]
    edges.append(format.max + format.largest_ulp / 2)
    asked = around(torch.tensor(edges))
    left = asked.clamp(-format.max, format.max) if not format.infinities else asked
    left = left.to(format.dtype).double().abs()
    beyond = left.isinf() if format.infinities else asked.abs() > format.max + format.largest_ulp / 2
    assert fates(asked, format) == {
        "lost to zero": int((left == 0).sum()),
        "subnormal": int(((left > 0) & (left < normal)).sum()),
        "normal": int(((left >= normal) & ~beyond).sum()),
        "overflow": int(beyond.sum()),
    }
    assert all(fates(asked, format).values())


def test_zeros_are_not_counted_and_what_is_not_finite_overflows():
    assert fates(torch.zeros(5), "FP16") == dict.fromkeys(FATES, 0)
    found = fates(torch.tensor([math.nan, math.inf, -math.inf, 0.0, 1.0]), "FP8 E4M3")
    assert found == {"lost to zero": 0, "subnormal": 0, "normal": 1, "overflow": 3}


def test_scaling_is_not_rounded_by_the_tensors_own_dtype():
    tensor = torch.tensor([2.0**-24], dtype=torch.float16)
    assert fates(tensor, "FP32", 2.0**-20) == fates(torch.tensor([1.0]), "FP32")
    assert fates(tensor, "BF16", 2.0**150)["normal"] == 1 and fates(tensor, "FP16", 2.0**150)["overflow"] == 1


FORMAT = "a format among FP32, TF32, FP16, BF16, FP8 E4M3, FP8 E5M2; found 'FP64'"
REFUSALS = {
    "bits of FP64": (lambda: bits(1, "FP64"), ValueError, FORMAT),
    "a scale of 0": (lambda: fates(torch.ones(3), "FP16", 0.0), ValueError, "above 0, such as 2.0**16; found"),
    "a scale of nan": (lambda: fates(torch.ones(3), "FP16", math.nan), ValueError, "above 0, such as 2.0**16; found"),
}


@refusals(REFUSALS)
def test_another_format_or_scale_is_refused(call, error, words):
    refused(call, error, words)
