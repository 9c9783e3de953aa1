"""The map of an allocator's segments and blocks: its figures are the allocator's, at every moment that is shown."""

import pytest
from matplotlib.collections import PolyCollection

from memlab.book.block_map import MOST_LINES, draw_blocks, explore_blocks, history
from memlab.caching_allocator import FREE, CachingAllocator, ExpandableAllocator, replay
from memlab.units import MiB

PROGRAM = [(n, 5 * MiB) for n in range(40)] + [(n, 1000) for n in range(40, 50)] + [(n, FREE) for n in range(0, 40, 2)]


def boxes(picture):
    """The filled, the wasted and the outlined boxes, each as (left, width), of the upper part."""
    shapes = [c for c in picture.figure.axes[0].collections if isinstance(c, PolyCollection)]
    ends = [[path.get_extents() for path in shape.get_paths()] for shape in shapes]
    return [[(box.x0, box.width) for box in kind] for kind in ends]


def test_a_history_holds_the_segments_of_its_moments_the_first_the_fullest_and_the_last_among_them():
    found = history(CachingAllocator(), PROGRAM, moments=7)
    expected = replay(CachingAllocator(), PROGRAM)
    assert found.replay == expected
    assert {0, expected.peak_event, len(PROGRAM)} <= set(found.segments) and len(found.segments) <= 9
    for event, segments in found.segments.items():
        assert sum(segment["total_size"] for segment in segments) == expected.reserved[event]
        assert sum(segment["allocated_size"] for segment in segments) == expected.allocated[event]


@pytest.mark.parametrize("make", [CachingAllocator, ExpandableAllocator])
def test_boxes_are_as_wide_as_what_they_stand_for(make):
    found = history(make(), PROGRAM)
    for event, segments in found.segments.items():
        used, wasted, outlined = boxes(draw_blocks(found, event))
        assert sum(width for _, width in outlined) == pytest.approx(found.replay.reserved[event])
        assert sum(width for _, width in used) == pytest.approx(found.replay.requested[event])
        assert sum(width for _, width in wasted) == pytest.approx(
            found.replay.allocated[event] - found.replay.requested[event]
        )
        assert len(outlined) == len(segments)


def test_hundreds_of_segments_fit_the_figure_and_no_line_is_longer_than_it_says():
    found = history(CachingAllocator(), [(n, 11 * MiB) for n in range(500)], moments=3)
    axes = draw_blocks(found, 500).figure.axes[0]
    lines, width = axes.get_ylim()[0], axes.get_xlim()[1]
    assert lines <= MOST_LINES + 2
    assert all(left + wide <= width for left, wide in boxes(draw_blocks(found, 500))[2])


def test_the_sentence_says_how_many_segments_and_blocks_and_at_which_levels():
    assert "0 blocks in use in 0 segments" in draw_blocks(history(CachingAllocator(), []), 0).alt
    alt = draw_blocks(history(CachingAllocator(), PROGRAM), len(PROGRAM), "a program").alt
    assert "a program" in alt and f"after event {len(PROGRAM)} of {len(PROGRAM)}" in alt
    assert "30 blocks in use in 11 segments" in alt and "202.0 MiB reserved" in alt


def test_several_allocators_share_one_slider_and_one_alone_has_no_buttons():
    both = explore_blocks({"one": CachingAllocator, "other": ExpandableAllocator}, PROGRAM)
    assert list(both.choices) == ["allocator", "event"] and len(both.choices["event"]) <= 83
    alone = explore_blocks({"one": CachingAllocator}, PROGRAM)
    assert list(alone.choices) == ["event"]
    assert both.at(allocator="other", event=len(PROGRAM)).alt != both.at(allocator="one", event=len(PROGRAM)).alt
