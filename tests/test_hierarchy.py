"""The pictures of chapter 03: what they draw is what was counted, and the tiles' bytes are those of a closed form."""

import pytest

from memlab.book.hierarchy import (
    GROUPS,
    attention_traffic,
    counted,
    draw_roofline,
    draw_tiles,
    fast_bytes,
    group_of,
    grouped,
    published,
    ridge,
    staircase,
    waiting,
)
from memlab.memory_hierarchy import PUBLISHED, Level
from memlab.memory_timeline import CARDS
from memlab.units import KiB, MiB

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


def test_every_op_of_a_step_is_in_one_group_and_groups_lose_nothing():
    for attention in ("fused", "by hand"):
        ops = counted(1, attention)
        groups = grouped(ops, "H100-80GB")
        assert set(groups) <= {*GROUPS, "the rest"} and {"linear", "attention", "LayerNorm", "AdamW"} <= set(groups)
        assert sum(flops for flops, _, _ in groups.values()) == sum(op.flops for op in ops)
        assert sum(nbytes for _, nbytes, _ in groups.values()) == sum(op.nbytes for op in ops)
    assert {group_of(op) for op in counted(1, "by hand") if op.name in ("bmm", "_softmax")} == {"attention"}
    assert all(group_of(op) == "the rest" for op in counted(1) if op.name.startswith(("_log_softmax", "embedding")))


def test_nearly_all_flops_and_by_far_not_all_time_are_in_ops_that_wait_for_no_memory():
    of_flops, of_time = waiting(counted(1), "H100-80GB")
    assert of_flops < 0.02 and 0.2 < of_time < 0.8
    by_hand = waiting(counted(1, "by hand"), "H100-80GB")
    assert by_hand[0] > of_flops and by_hand[1] > of_time


def test_the_roofline_says_in_words_what_it_draws():
    alt = draw_roofline("T4-16GB", 1).alt
    assert "T4-16GB" in alt and "linear" in alt and "% of the FLOPs" in alt


@pytest.mark.parametrize(("tokens", "head_dim"), [(512, 64), (1000, 32)])
def test_attentions_traffic_is_what_walking_over_the_tiles_adds_up_to(tokens, head_dim):
    matrix, scores = tokens * head_dim, tokens * tokens
    by_hand = (2 * matrix + scores) + 2 * scores + (scores + 2 * matrix)  # q kᵀ; softmax; · v
    assert attention_traffic(tokens, head_dim) == 2 * by_hand
    for tile in (16, 64, 128):
        moved = 0
        for start in range(0, tokens, tile):
            rows = min(tile, tokens - start)
            moved += 2 * rows * head_dim + 2 * matrix  # this tile of q and of the result; all of k and v
        assert attention_traffic(tokens, head_dim, tile) == 2 * moved


def test_a_tile_takes_its_q_k_and_v_in_shared_memory_and_its_sums_and_scores_in_registers():
    assert fast_bytes(64, 128) == (3 * 128 * 64 * 2, (128 * 64 + 128 * 128) * 4)
    alt = draw_tiles(4096, 64, 64).alt
    assert "by hand" in alt and "tiles of 512" in alt
    assert attention_traffic(4096, 64) == 2 * (4 * 4096**2 + 4 * 4096 * 64) == 130 * MiB
