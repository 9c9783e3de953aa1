"""The tiles of chapter 03: their bytes are those of a closed form."""

import pytest

from memlab.book.tiles import attention_traffic, draw_tiles, fast_bytes
from memlab.units import MiB


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
