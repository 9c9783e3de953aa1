"""Pictures of many ranks: what they draw is what the formulas, the schedule and the meter say."""

import itertools

import pytest
import torch

from memlab.book.ranks_pictures import (
    CARDS,
    MICRO_BATCHES,
    MODELS,
    RANKS,
    backward_of,
    draw_hidden,
    draw_rank_bytes,
    explore_hidden,
    explore_rank_bytes,
    hidden_table,
    rank_bytes_table,
    step_of,
)
from memlab.book.ring_pictures import (
    draw_ring,
    draw_sent,
    explore_ring,
    ring_parts,
    sent_table,
)
from memlab.data_parallelism import rank_step, tokens_to_hide
from memlab.data_parallelism.arithmetic import STAGES
from memlab.memory_timeline import Meter
from memlab.offloading.links import RANK_LINKS
from memlab.ranks import Message
from memlab.units import format_bytes
from tests.harness import refusals, refused

PNG = b"\x89PNG"


def test_a_pictures_bars_are_the_formulas_figures_and_the_alt_text_says_what_fits():
    picture = draw_rank_bytes(8, "1.2 billion", 12, 8, "16 GiB")
    total = 0
    for stage, name in STAGES.items():
        nbytes = rank_step(step_of("1.2 billion", 8), 8, stage).nbytes
        total += nbytes
        fits = "fits" if nbytes <= 16 * 2**30 else "does not fit"
        assert f"{name} {format_bytes(nbytes)} {fits}" in picture.alt
    widths = [patch.get_width() for patch in picture.figure.axes[0].patches]
    assert sum(widths) == pytest.approx(total / 2**30, rel=1e-3)
    rows = rank_bytes_table(ranks=(8,)).rows
    assert [row[1] for row in rows] == list(STAGES.values())
    assert rows[0][-1] == format_bytes(step_of("1.2 billion", 8).peak_bytes)


def test_what_a_rank_holds_can_be_moved_by_every_slider():
    for name in MODELS:
        assert f"{step_of(name, 1).model.parameters / 1e9:.1f} billion" == name
    one = explore_rank_bytes()
    assert one.start == {"ranks": 8, "model": "1.2 billion", "state_bytes": 12, "micro_batch": 8, "card": "16 GiB"}
    for corner in itertools.product(RANKS[::10], list(MODELS)[::4], (4, 12), MICRO_BATCHES[::5], CARDS[:1]):
        picture = draw_rank_bytes(*corner)
        low, high = picture.figure.axes[1].get_ylim()
        assert low < int(corner[4].split()[0]) < high
    assert picture.png().startswith(PNG)


def test_the_tokens_from_which_it_is_hidden_are_the_formulas_and_a_machine_of_ones_own_is_a_point():
    alt = draw_hidden(8192, "InfiniBand 400 Gb/s", 400, 64).alt
    needed = tokens_to_hide(400e12, RANK_LINKS["InfiniBand 400 Gb/s"], 64)
    assert f"16 bits, any stage from {needed:,.0f} tokens" in alt
    backward, reduced, waited = backward_of(8192, 400e12, RANK_LINKS["InfiniBand 400 Gb/s"], 64)
    assert f"backward {1e3 * backward:.3g} ms, all-reduce {1e3 * reduced:.3g} ms" in alt
    assert reduced - backward < waited < reduced
    assert hidden_table(teraflops=(100, 400)).rows[1][3:] == [round(140625), round(1.5 * 140625), round(2 * 140625)]
    one = explore_hidden({"mine": (50e9, 1e9)}, {"USB": 1e9})
    assert one.start == {"tokens": 8192, "link": "USB", "teraflops": 400, "ranks": 64}
    assert f"mine from {tokens_to_hide(50e9, 1e9, 64):,.0f}" in one.picture.alt
    assert explore_hidden().picture.png().startswith(PNG)


def test_every_step_of_the_ring_can_be_drawn_and_says_who_sends_what():
    assert list(explore_ring(4).choices["step"].values()) == list(range(7))
    found = draw_ring(4, 3)
    assert found.png().startswith(PNG)
    assert "4 of 16 pieces are complete" in found.alt and "rank 3 sends piece 3 to rank 0" in found.alt
    assert draw_ring(4, 6).alt.endswith("16 of 16 pieces are complete; the end.")
    scattered, whole = ring_parts(3, 2), ring_parts(3, 4)  # whose parts each rank's pieces have summed
    assert all(set(scattered[rank][rank]) == {0, 1, 2} for rank in range(3)) and scattered[0][1] != scattered[0][0]
    assert {frozenset(piece) for row in whole for piece in row} == {frozenset({0, 1, 2})}


def records_of(events):
    return [Message("send", 100, 100 * (i + 1), 0, 2, True, event) for i, event in enumerate(events)] + [
        Message("receive", 100, 0, 100, 2, True, None),
        Message("all_reduce", 4096, 4096, 4096, 2, False, 1),
    ]


def memory():
    with Meter() as meter:
        x = torch.zeros(1000)
        y = x + 1
        del x, y
    return meter.timeline


def test_what_is_sent_is_drawn_below_the_memory_and_counted_is_told_from_by_formula():
    picture = draw_sent(memory(), records_of([1, 2, 3]), "rank 0")
    assert "sends 4.6 KiB in 4 calls (3 × send (counted), 600 B; 1 × all_reduce (by formula), 4.0 KiB)" in picture.alt
    assert "peak 7.8 KiB" in picture.alt and picture.png().startswith(PNG)
    assert sent_table(records_of([1, 2, 3])).rows == [
        ["send (counted)", 3, "600 B", 600],
        ["all_reduce (by formula)", 1, "4.0 KiB", 4096],
    ]
    assert draw_sent(memory(), []).png().startswith(PNG)


@refusals(
    {
        "another model": (lambda: draw_rank_bytes(model="7B"), ValueError, "expected model to be one of …found '7B'"),
        "another link": (lambda: draw_hidden(link="pigeon"), ValueError, "expected link to be one of"),
        "one rank": (lambda: draw_ring(1, 0), ValueError, "expected at least 2 ranks and a step"),
        "a step too many": (lambda: draw_ring(4, 7), ValueError, "expected at least 2 ranks and a step"),
        "no moments": (lambda: draw_sent(memory(), records_of([None])), ValueError, "open Traffic inside the Meter's"),
    }
)
def test_what_cannot_be_drawn_is_refused(call, error, words):
    refused(call, error, words)
