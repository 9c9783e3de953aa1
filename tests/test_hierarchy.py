"""The staircase and the table of chapter 03: each plateau and each GPU with its figures."""

import pytest

from memlab.book.hierarchy import published, ridge, staircase
from memlab.memory_hierarchy import PUBLISHED, Level
from memlab.memory_timeline import CARDS
from memlab.units import KiB

CURVE = [(2**i * KiB, 100e9 if i < 6 else 10e9) for i in range(2, 14)]
LEVELS = [Level("L1", 32 * KiB), Level("main memory", 2**34)]


def test_the_staircase_names_each_plateau_with_its_figure():
    alt = staircase({"read": CURVE, "copy": [(n, speed / 2) for n, speed in CURVE]}, LEVELS).alt
    assert "L1 100 GB/s" in alt and "main memory 10 GB/s" in alt


def test_every_published_gpu_is_a_card_and_the_ridge_is_where_both_speeds_meet():
    assert set(PUBLISHED) <= set(CARDS)
    assert len(published().rows) == len(PUBLISHED)
    for name, card in PUBLISHED.items():
        assert ridge(name) * card.memory_bandwidth == pytest.approx(card.half_flops_per_second)
