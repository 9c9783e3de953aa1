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
)
from memlab.offloading.links import RANK_LINKS
from memlab.tensor_parallelism import block_activations, rank_states
from tests.harness import refusals, refused

PNG = b"\x89PNG"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_parts_that_are_drawn_are_z_when_they_are_put_together(ranks):
    x, a, b = small_tensors()
    own_a, own_y, own_b, summands = zip(*split_parts(x, a, b, ranks), strict=True)
    assert torch.equal(torch.cat(own_a, 1), a)
    assert torch.equal(torch.cat(own_b, 0), b)
    assert torch.equal(torch.cat(own_y, 1), torch.relu(x @ a))
    assert torch.equal(sum(summands), torch.relu(x @ a) @ b)


def test_the_picture_of_the_matmul_has_every_number_and_says_every_summand():
    picture = draw_split(2)
    x, a, b = small_tensors()
    y, z = torch.relu(x @ a), torch.relu(x @ a) @ b
    numbers = [one for one in (text.get_text() for text in picture.figure.axes[0].texts) if one.lstrip("-").isdigit()]
    assert (
        len(numbers) == 3 * x.numel() + 2 * (a.numel() + y.numel() + b.numel()) + 3 * z.numel()
    )  # whole, and on ranks
    assert f"their sum is z, {z.tolist()}" in picture.alt
    for rank, part in enumerate(split_parts(x, a, b, 2)):
        assert part[3].any() and f"rank {rank}'s summand is {part[3].tolist()}" in picture.alt
    others = torch.rand(2, 3), torch.rand(3, 6), torch.rand(6, 2)
    assert draw_split(3, others).png().startswith(PNG)


LARGE = torch.zeros(2, 3), torch.zeros(3, MOST + 2), torch.zeros(MOST + 2, 2)
NO_MATMUL = {
    "a hidden width that 3 ranks divide, found 4": lambda: draw_split(3),
    "expected x": lambda: split_parts(torch.zeros(2, 3), torch.zeros(4, 4), torch.zeros(4, 2), 2),
    "expected 2 to 4 ranks": lambda: draw_split(1),
    f"found 2 ranks and a size of {MOST + 2}": lambda: draw_split(2, LARGE),
    "8 heads cannot be split over 16 ranks": lambda: draw_kept(1024, 8, 16),
    "expected link to be one of": lambda: draw_tensor_ranks(link="carrier pigeon"),
}


@refusals({words: (call, ValueError, words) for words, call in NO_MATMUL.items()})
def test_a_matmul_that_cannot_be_split_or_drawn_is_refused(call, error, words):
    refused(call, error, words)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_divided_and_what_is_whole_is_all_that_a_block_keeps(way):
    model = of_width(2048, 16)
    divided, whole = kept_by_a_rank(model, 1, way)
    for ranks in (1, 2, 4, 8, 16):
        own = kept_by_a_rank(model, ranks, way)
        assert sum(own) == block_activations(model, TEXTS, TOKENS, ranks, **WAYS[way]).nbytes
        assert own == (divided // ranks, whole)


def test_what_a_rank_holds_is_its_states_and_all_blocks_activations():
    held = held_by_a_rank(2048, 16, 8, "sequence parallel")
    kept = block_activations(of_width(2048, 16), TEXTS, TOKENS, 8, sequence_parallel=True).nbytes
    assert held["activation"] == LAYERS * kept
    assert sum(held.values()) == LAYERS * kept + rank_states(of_width(2048, 16), 8).nbytes


def test_every_slider_can_be_moved_and_a_picture_of_what_cannot_be_says_why():
    one = explore_tensor_ranks()
    assert one.start == {"width": 2048, "heads": 16, "ranks": 8, "link": "NVLink 4"}
    for width, heads, ranks, link in itertools.product(WIDTHS[1::4], HEADS[::3], RANKS[::2], list(RANK_LINKS)[::2]):
        alt = one.at(width=width, heads=heads, ranks=ranks, link=link).alt
        assert is_sentence(alt)
        assert ("cannot be split" in alt or "256 at most" in alt) == (heads % ranks > 0 or width // heads > 256)
    assert draw_tensor_ranks(2048, 16, 32).png().startswith(PNG)
    assert draw_tensor_ranks(16384, 8, 4).png().startswith(PNG)
