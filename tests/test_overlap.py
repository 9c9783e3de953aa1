"""The pictures of chapter 09's arithmetic: what they draw is what the formulas and the simulated step say."""

import pytest

from memlab.book.overlap import (
    PARTS,
    WIDTHS,
    block_of,
    draw_overlap,
    draw_schedule,
    draw_too_much,
    explore_overlap,
    explore_schedule,
    knee,
    may_leave_bytes,
    overlap_table,
    part_runs,
    send_part,
    too_much_table,
)
from memlab.book.style import is_sentence
from memlab.offloading import LINKS, POLICIES, Held, hidden_tokens, hidden_width

MiB = 2**20


def layers(sizes):
    """A chain, forward then backward twice as long, and a weight that stays."""
    n = len(sizes)
    found = [Held(nbytes, i, 3 * n - 2 * i, i + 1, 3 * n - 2 * i - 2) for i, nbytes in enumerate(sizes)]
    return [Held(100 * MiB, 0, 3 * n), *found]


STEP = layers([64 * MiB] * 10)
SPEEDS = {"fast": 128.0 * MiB, "slow": 16.0 * MiB}


def test_the_width_from_which_it_is_free_is_said_and_is_the_formulas():
    picture = draw_overlap(4096, "PCIe Gen5 x16", 400, 2048, measured={"this machine": (60e9, 1.5e9)})
    alt, axes = picture.alt, picture.figure.axes[0]
    curves = [line.get_ydata() for line in axes.lines if len(line.get_xdata()) == len(WIDTHS)]
    low, high = axes.get_ylim()
    assert low < 1 < high and all(low < y < high for curve in curves for y in curve) and len(curves) == 2
    assert is_sentence(alt)
    free = hidden_width(400e12, 55e9, bytes_per_width=32, tokens=2048)
    assert f"all that is saved free from width {free:,.0f} on" in alt
    one, mine = block_of(4096, 2048, 400e12, 55e9), block_of(4096, 2048, 60e9, 1.5e9)
    assert f"forward {1e3 * one.compute_seconds:.3g} ms, transfer, all {1e3 * one.transfer_seconds:.3g} ms" in alt
    times = mine.transfer_seconds / mine.compute_seconds
    assert f"this machine at width 4,096: transfer is {times:.3g} times the forward" in alt
    assert "all that is saved free at any width" in draw_overlap(512, "NVLink-C2C", 50, 32768).alt


def test_the_overlap_sliders_offer_every_link_and_start_at_one_that_there_is():
    assert explore_overlap().start == {"width": 4096, "link": "PCIe Gen5 x16", "teraflops": 400, "tokens": 2048}
    mine = explore_overlap({"mine": (1e12, 1e9)}, links={"USB": 1e9})
    assert mine.start["link"] == "USB" and "mine at width" in mine.picture.alt


def test_the_table_has_every_link_at_every_rate_and_the_formulas_figures():
    table = overlap_table(teraflops=(100, 400))
    assert len(table.rows) == 2 * len(LINKS)
    row = next(row for row in table.rows if row[0] == "PCIe Gen5 x16" and row[2] == "400")
    assert row[3:] == [10303, 5152, 606, 7273]
    assert row[6] == round(hidden_tokens(400e12, 55e9))


def test_a_schedule_says_its_peak_its_step_and_its_waits_and_draws_every_copy():
    run = send_part(STEP, SPEEDS["slow"], 0.5, "first come")
    picture = draw_schedule(STEP, SPEEDS["slow"], 50)
    assert f"step {run.step_seconds:.3g} s, of which {run.stall_seconds:.2g} s waits" in picture.alt
    assert "10 copies" in picture.alt and "of 740.0 MiB" in picture.alt
    lanes = [len(boxes.get_paths()) for boxes in picture.figure.axes[0].collections]
    assert lanes == [len(run.stalls) + 1, 5, 5]


def test_the_schedule_sliders_have_every_part_policy_and_link_and_draw_them_all():
    one = explore_schedule(STEP, SPEEDS, "a chain")
    assert one.start == {"part": 50, "policy": "first come", "link": "fast"}
    assert list(one.choices["policy"].values()) == list(POLICIES)
    for values in [*explore_schedule(STEP, SPEEDS, parts=(0, 50, 100)).grid()][::6]:
        assert one.at(**values).png().startswith(b"\x89PNG")


def test_the_knee_is_the_most_that_costs_less_than_the_slack_and_stands_in_the_table_with_nothing_and_all():
    runs = part_runs(STEP, SPEEDS)
    assert may_leave_bytes(STEP) == 640 * MiB
    for name, row in runs.items():
        at = knee(row)
        assert row[at].step_seconds <= 1.01 * 30
        assert at == len(row) - 1 or row[at + 1].step_seconds > 1.01 * 30
        assert f"{name}: {PARTS[at]} % cost less than 1 %" in draw_too_much(runs).alt
    assert knee(runs["slow"]) < knee(runs["fast"])
    rows = too_much_table(runs).rows
    assert [row[1] for row in rows if row[0] == "slow"] == ["0 %", f"{PARTS[knee(runs['slow'])]} %", "100 %"]
    assert rows[0][2:4] == ["0 B", "740.0 MiB"]


@pytest.mark.parametrize("draw", [lambda: draw_overlap(link="carrier pigeon"), lambda: draw_overlap(width=100)])
def test_what_the_sliders_do_not_offer_is_refused(draw):
    with pytest.raises(ValueError, match="expected .* found"):
        draw()
