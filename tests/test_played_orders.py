"""Orders that an exercise's check plays: they take the turns that closed forms say, and those that stop are told."""

import pytest

from memlab.book.checks.answers import Wrong
from memlab.book.checks.pipeline_parallelism.orders import complete, in_flight, played, words
from memlab.pipeline_parallelism import Action, bubble_share, gpipe, interleaved, one_forward_one_backward


def computed(schedule):
    return [[a for a in actions if a.kind in ("forward", "backward")] for actions in schedule.actions]


@pytest.mark.parametrize("make", [gpipe, one_forward_one_backward])
@pytest.mark.parametrize(("stages", "micro_batches"), [(4, 8), (4, 2), (1, 3), (6, 7)])
def test_a_step_takes_as_many_turns_as_micro_batches_and_bubble(make, stages, micro_batches):
    assert played(computed(make(stages, micro_batches)), "") == 3 * (micro_batches + stages - 1)


@pytest.mark.parametrize(("ranks", "chunks", "micro_batches"), [(4, 2, 8), (2, 3, 2), (3, 2, 6)])
def test_interleaved_orders_have_a_bubble_so_many_times_shorter(ranks, chunks, micro_batches):
    turns = played(computed(interleaved(ranks, chunks, micro_batches)), "")
    assert 1 - 3 * chunks * micro_batches / turns == pytest.approx(bubble_share(ranks, micro_batches, chunks))


def test_orders_that_wait_for_each_other_are_told():
    first = [Action(kind, 0, i) for kind, i in (("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0))]
    last = [Action(kind, 1, i) for kind, i in (("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1))]
    assert played([first, last], "") == 11  # B0 is back long before its turn
    with pytest.raises(Wrong, match="together they stop. There wait rank 0 with B0 of stage 0, rank 1 with F1"):
        played([first[:1] + first[3:] + first[1:3], [last[2], *last[:2], last[3]]], "")


def test_a_text_is_read_word_by_word():
    turns = words("F0 F1\nB0  B1", "")
    assert turns == [("F", 0), ("F", 1), ("B", 0), ("B", 1)] and in_flight(turns) == 2
    complete(turns, 2, "")
    for text in ("F0B0", "F-1", "f0", "F0,", ""):
        with pytest.raises(Wrong):
            complete(words(text, ""), 1, "")
