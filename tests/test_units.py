"""Bytes as text and text as bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlab.units import GiB, KiB, MiB, TiB, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KiB, "1.0 KiB"),
        (KiB * 3 // 2, "1.5 KiB"),
        (MiB - 1, "1.0 MiB"),
        (GiB - 1, "1.0 GiB"),
        (TiB - 1, "1.0 TiB"),
        (80 * 10**9, "74.5 GiB"),
        (5000 * TiB, "5,000.0 TiB"),
        (-MiB, "-1.0 MiB"),
    ],
)
def test_a_size_is_written_in_powers_of_1024(nbytes, text):
    assert format_bytes(nbytes) == text


@given(st.integers(-(2**60), 2**60), st.integers(0, 6))
def test_a_written_size_is_within_half_of_its_last_digit_and_never_1024_of_a_unit(nbytes, digits):
    number, unit = format_bytes(nbytes, digits).replace(",", "").split()
    scale = {"B": 1, "KiB": KiB, "MiB": MiB, "GiB": GiB, "TiB": TiB}[unit]
    assert abs(float(number) * scale - nbytes) <= scale * 0.5000001 * 10**-digits
    assert abs(float(number)) < 1024 or unit == "TiB"


@given(st.integers(0, 1023), st.sampled_from(["B", "KiB", "MiB", "GiB", "TiB"]))
def test_a_whole_number_of_a_unit_is_read_as_written(count, unit):
    scale = {"B": 1, "KiB": KiB, "MiB": MiB, "GiB": GiB, "TiB": TiB}[unit]
    assert (
        parse_bytes(f"{count} {unit}") == parse_bytes(f" {count}{unit} ") == parse_bytes(count * scale) == count * scale
    )


def test_gb_are_powers_of_ten_and_gib_powers_of_two():
    assert parse_bytes("80 GB") == 80 * 10**9
    assert parse_bytes("80 GiB") - parse_bytes("80 GB") == 80 * (2**30 - 10**9)
    assert parse_bytes("1.5 kB") == parse_bytes("1.5 KB") == 1500


@pytest.mark.parametrize(
    "size", ["", "16", "GiB", "16 gib", "16 Gb", "1e3 MB", "1,000 MB", "16 GiB!", "nan GB", ".5 GB"]
)
def test_text_that_is_no_size_is_refused_with_the_units_there_are(size):
    with pytest.raises(ValueError, match="expected a size such as .*units: B, KiB"):
        parse_bytes(size)


@pytest.mark.parametrize("size", [True, 1.5, None, b"1 B", [1]])
def test_a_size_of_another_type_is_refused(size):
    with pytest.raises(TypeError, match="expected a size as int"):
        parse_bytes(size)


@given(st.integers(0, 10**400), st.integers(0, 10**9 - 1))
def test_text_of_any_length_is_read_to_the_byte(whole, part):
    assert parse_bytes(f"{whole} B") == whole
    assert parse_bytes(f"{whole}.{part:09} GB") == whole * 10**9 + part


@pytest.mark.parametrize("size", [-1, "-1 KiB", "-0.4 B"])
def test_a_size_below_zero_is_refused(size):
    with pytest.raises(ValueError, match="at least 0 bytes"):
        parse_bytes(size)
