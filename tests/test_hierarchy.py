"""The staircase and the table of chapter 03: each plateau and each GPU with its figures."""

from types import SimpleNamespace

import pytest
import torch

from memlab.book.hierarchy import card_at_hand, named, published, ridge, staircase
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
    assert [row[1] for row in published().rows] == [card.multiprocessors for card in PUBLISHED.values()]
    for name, card in PUBLISHED.items():
        assert ridge(name) * card.memory_bandwidth == pytest.approx(card.half_flops_per_second)


def test_a_gpu_is_known_by_its_model_and_its_memory_and_one_of_the_same_name_for_pcie_is_another():
    found = {
        "Tesla T4": (15_828_320_256, "T4-16GB"),
        "Tesla V100-SXM2-16GB": (16_935_682_048, "V100-16GB"),
        "NVIDIA GeForce RTX 4090": (25_393_692_672, "RTX4090-24GB"),
        "NVIDIA A100-SXM4-80GB": (84_987_740_160, "A100-80GB"),
        "NVIDIA H100 80GB HBM3": (85_017_755_648, "H100-80GB"),
        "NVIDIA H200": (150_123_184_128, "H200-141GB"),
        "NVIDIA H100 PCIe": (85_017_755_648, None),
        "NVIDIA GH200 144G HBM3e": (150_123_184_128, None),
        "NVIDIA GeForce RTX 4090 Laptop GPU": (17_171_480_576, None),
        "NVIDIA T400": (4_000_000_000, None),
    }
    assert {name: named(name, nbytes) for name, (nbytes, _) in found.items()} == {k: v for k, (_, v) in found.items()}


def test_the_card_at_hand_is_none_without_one_and_else_what_it_calls_itself(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert card_at_hand() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=150_123_184_128))
    assert card_at_hand() == "H200-141GB"
