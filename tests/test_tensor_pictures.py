"""Pictures of a split layer: what they draw is what torch computes and what the formulas say."""

import itertools

import pytest
import torch

from memlab.book.split_pictures import MOST, draw_split, small_tensors, split_parts
from memlab.book.style import is_sentence
from memlab.book.tensor_pictures import (
    HEADS,
    LAYERS,
    RANKS,
    TEXTS,
    TOKENS,
    WAYS,
    WIDTHS,
    draw_kept,
    draw_tensor_ranks,
    explore_tensor_ranks,
    held_by_a_rank,
    kept_by_a_rank,
    of_width,
    tensor_ranks_table,
)
from memlab.data_parallelism.overlap import LINKS
from memlab.tensor_parallelism.activations import block_activations
from memlab.tensor_parallelism.arithmetic import rank_states
from memlab.tensor_parallelism.timing import block_seconds
from memlab.units import format_bytes

PNG = b"\x89PNG"


# ---- the matmul


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_parts_that_are_drawn_are_z_when_they_are_put_together(ranks):
    x, a, b = small_tensors()
    own_a, own_y, own_b, summands = zip(*split_parts(x, a, b, ranks), strict=True)
    assert torch.equal(torch.cat(own_a, 1), a)
    assert torch.equal(torch.cat(own_b, 0), b)
    assert torch.equal(torch.cat(own_y, 1), torch.relu(x @ a))
    assert torch.equal(sum(summands), torch.relu(x @ a) @ b)


def test_the_small_matrices_give_every_rank_something_to_add():
    for ranks in (2, 4):
        assert all(part[3].any() for part in split_parts(*small_tensors(), ranks))


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_picture_of_the_matmul_has_every_number_and_says_every_summand(ranks):
    picture = draw_split(ranks)
    x, a, b = small_tensors()
    y, z = torch.relu(x @ a), torch.relu(x @ a) @ b
    drawn = [text.get_text() for text in picture.figure.axes[0].texts]
    numbers = [one for one in drawn if one.lstrip("-").isdigit()]
    per_rank = x.numel() * ranks + a.numel() + y.numel() + b.numel() + ranks * z.numel()
    assert len(numbers) == x.numel() + a.numel() + y.numel() + b.numel() + z.numel() + per_rank
    assert f"their sum is z, {z.tolist()}" in picture.alt
    for rank, part in enumerate(split_parts(x, a, b, ranks)):
        assert f"rank {rank}'s summand is {part[3].tolist()}" in picture.alt
    assert picture.png().startswith(PNG)


def test_any_matrices_of_fitting_shapes_can_be_drawn():
    tensors = torch.rand(2, 3), torch.rand(3, 6), torch.rand(6, 2)
    assert draw_split(3, tensors).png().startswith(PNG)


def test_matrices_that_cannot_be_split_or_drawn_are_refused():
    with pytest.raises(ValueError, match="a hidden width that 3 ranks divide, found 4"):
        draw_split(3)
    with pytest.raises(ValueError, match="expected x"):
        split_parts(torch.zeros(2, 3), torch.zeros(4, 4), torch.zeros(4, 2), 2)
    with pytest.raises(ValueError, match="expected 2 to 4 ranks"):
        draw_split(1)
    large = torch.zeros(2, 3), torch.zeros(3, MOST + 2), torch.zeros(MOST + 2, 2)
    with pytest.raises(ValueError, match=f"found 2 ranks and a size of {MOST + 2}"):
        draw_split(2, large)


# ---- what a block keeps


@pytest.mark.parametrize("way", WAYS)
def test_what_is_divided_and_what_is_whole_is_all_that_a_block_keeps(way):
    model = of_width(2048, 16)
    divided, whole = kept_by_a_rank(model, 1, way)
    for ranks in (1, 2, 4, 8, 16):
        own = kept_by_a_rank(model, ranks, way)
        assert sum(own) == block_activations(model, TEXTS, TOKENS, ranks, **WAYS[way]).nbytes
        assert own == (divided // ranks, whole)


def test_the_bars_of_what_a_block_keeps_are_the_formulas_figures():
    picture = draw_kept(2048, 16, 8)
    axes = picture.figure.axes[0]
    total = sum(bar.get_width() for bar in axes.patches)
    rows = [(1, "tensor parallel"), *itertools.product((2, 4, 8), WAYS)]
    held = [sum(kept_by_a_rank(of_width(2048, 16), *row)) for row in rows]
    assert total == pytest.approx(sum(held) / 2**20, rel=1e-9)
    for (ranks, way), nbytes in zip(rows[1:], held[1:], strict=True):
        assert f"{ranks} ranks: {way} {format_bytes(nbytes)}" in picture.alt
    assert picture.png().startswith(PNG)
    with pytest.raises(ValueError, match="8 heads cannot be split over 16 ranks"):
        draw_kept(1024, 8, 16)


# ---- what a rank holds, and how long it waits


def test_what_a_rank_holds_is_its_states_and_all_blocks_activations():
    held = held_by_a_rank(2048, 16, 8, "sequence parallel")
    kept = block_activations(of_width(2048, 16), TEXTS, TOKENS, 8, sequence_parallel=True).nbytes
    assert held["activation"] == LAYERS * kept
    assert sum(held.values()) == LAYERS * kept + rank_states(of_width(2048, 16), 8).nbytes


def test_the_sliders_picture_says_what_is_held_and_how_long_a_block_waits():
    picture = draw_tensor_ranks(2048, 16, 8, "NVLink 4")
    for way in ("tensor parallel", "sequence parallel"):
        assert f"{way} {sum(held_by_a_rank(2048, 16, 8, way).values()) / 2**30:.1f} GiB" in picture.alt
    share = block_seconds(TEXTS, TOKENS, 2048, 8, 400e12, LINKS["NVLink 4"]).waiting_share
    assert f"{share:.0%} of its time" in picture.alt
    for line, speed in zip(picture.figure.axes[1].lines, LINKS.values(), strict=False):
        expected = [100 * block_seconds(TEXTS, TOKENS, width, 8, 400e12, speed).waiting_share for width in WIDTHS]
        assert list(line.get_ydata()) == pytest.approx(expected)


def test_every_slider_can_be_moved_and_a_picture_of_what_cannot_be_says_why():
    one = explore_tensor_ranks()
    assert one.start == {"width": 2048, "heads": 16, "ranks": 8, "link": "NVLink 4"}
    for width, heads, ranks, link in itertools.product(WIDTHS[1::3], HEADS[::2], RANKS[::2], LINKS):
        if link == "NVLink 4" or (width, heads) == (2048, 32):
            alt = one.at(width=width, heads=heads, ranks=ranks, link=link).alt
            assert is_sentence(alt)
            assert ("cannot be split" in alt or "256 at most" in alt) == (heads % ranks > 0 or width // heads > 256)
    assert draw_tensor_ranks(2048, 16, 32).png().startswith(PNG)
    assert draw_tensor_ranks(16384, 8, 4).png().startswith(PNG)
    assert draw_tensor_ranks(1024, 8, 1).png().startswith(PNG)
    with pytest.raises(ValueError, match="expected link to be one of"):
        draw_tensor_ranks(link="carrier pigeon")


def test_the_table_has_a_row_for_every_number_of_ranks_that_divides_the_heads():
    rows = tensor_ranks_table(2048, 16).rows
    assert [row[0] for row in rows] == [1, 2, 4, 8, 16]
    assert rows[0][4:] == ["0 B", "0%"]
