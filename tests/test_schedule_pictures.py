"""Pictures of schedules: their boxes are the simulation's spans, and their words its figures."""

import itertools

import pytest

from memlab import pipeline_parallelism as pp
from memlab.book.gantt import draw_schedules
from memlab.book.pipeline_sliders import (
    BACKWARDS,
    LINK_TIMES,
    SCHEDULES,
    SLOW,
    draw_pipeline,
    explore_pipeline,
    play,
)
from memlab.book.schedule_pictures import bound, draw_measured, draw_schedule
from memlab.book.spans import held_micro_batches, idle_share, spans_by_rank, whole_seconds
from memlab.book.style import is_sentence
from tests.harness import refusals, refused

PNG = b"\x89PNG"
COST = pp.StageCost(forward_seconds=1.0, backward_seconds=2.0)


def boxes(axes) -> set[tuple[float, float, int]]:
    """(begin, end, rank) of every box that a chart has, from the filled paths."""
    found = []
    for patch in axes.patches:
        if patch.get_facecolor()[3] and patch.get_linewidth() == 0:
            corners = patch.get_path().vertices.reshape(-1, 5, 2)
            found += [(round(one[0, 0], 6), round(one[1, 0], 6), round(one[:4, 1].mean())) for one in corners]
    assert len(found) == len(set(found))
    return set(found)


def words_in(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def measured(simulation, scale=1e-3, skew=0.0):
    """A simulation's spans as ranks would return them: seconds of a clock; skew: how far ranks' clocks differ."""
    shift = lambda rank, when: 100 + skew * rank + scale * when  # noqa: E731
    return [
        [
            pp.Span(s.rank, s.action, shift(rank, s.begin), shift(rank, s.end))
            for s in simulation.spans
            if s.rank == rank
        ]
        for rank in range(simulation.schedule.ranks)
    ]


@pytest.mark.parametrize("schedule", [pp.one_forward_one_backward(4, 8), pp.interleaved(2, 2, 4)], ids=str)
def test_every_computation_is_one_box_from_its_begin_to_its_end(schedule):
    played = pp.simulate(schedule, COST, 0.25)
    axes = draw_schedule(played).figure.axes[0]
    assert boxes(axes) == {(span.begin, span.end, span.rank) for span in played.spans}
    busy = [sum(span.end - span.begin for span in own) for own in spans_by_rank(played)]
    idle = [f"idle {100 * (1 - seconds / played.seconds):.1f}%" for seconds in busy]
    assert [text for text in words_in(axes) if text.startswith("idle")] == idle


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 2), (3, 1), (3, 9)])
def test_the_line_of_what_is_in_flight_peaks_where_the_simulation_says_and_ends_at_none(stages, micro_batches):
    for make in (pp.gpipe, pp.one_forward_one_backward):
        played = pp.simulate(make(stages, micro_batches), COST, 0.5)
        for rank, own in enumerate(spans_by_rank(played)):
            line = held_micro_batches(own)
            assert max(number for _, number in line) == played.in_flight(rank) == bound(played.schedule, rank)[0]
            assert bound(played.schedule, rank)[0] == pp.in_flight(played.schedule.name, rank, stages, micro_batches)
            assert line[-1] == (own[-1].end, 0)
            assert len({when for when, _ in line}) == len(line)  # no dip where a forward begins as a backward ends
    played = pp.simulate(pp.interleaved(stages, 2, stages * micro_batches), COST)
    for rank, own in enumerate(spans_by_rank(played)):
        assert max(number for _, number in held_micro_batches(own)) == bound(played.schedule, rank)[0]


def with_more_in_flight(stages: int, micro_batches: int) -> pp.Schedule:
    """1F1B in which stage s begins with nearly twice as many forwards, 2·(stages − s) − 1."""
    orders = []
    for stage in range(stages):
        forwards = [f"F{i}" for i in range(micro_batches)]
        ahead = 2 * (stages - stage) - 1
        order = forwards[:ahead]
        for i in range(micro_batches):
            order += [f"B{i}", *forwards[ahead + i : ahead + i + 1]]
        orders.append(" ".join(order))
    return pp.with_messages("1F1B", orders)


def test_the_words_beside_the_lines_are_the_formula_and_its_result_if_the_order_keeps_it():
    texts = words_in(draw_schedule(pp.simulate(pp.one_forward_one_backward(4, 8))).figure.axes[1])
    assert {f"rank {rank}: {4 - rank} = min(4 − {rank}, 8)" for rank in range(4)} <= set(texts)
    assert "ranks 0–3: 8 = m" in words_in(draw_schedule(pp.simulate(pp.gpipe(4, 8))).figure.axes[1])
    eager = with_more_in_flight(3, 6)
    assert bound(eager, 0) is None and bound(eager, 2) == (1, "1 = min(3 − 2, 6)")
    assert "rank 0: 5" in words_in(draw_schedule(pp.simulate(eager)).figure.axes[1])


def test_every_message_is_a_line_from_its_senders_row_to_its_receivers():
    played = pp.simulate(pp.one_forward_one_backward(3, 4), COST, 0.5)
    axes = draw_schedule(played, messages=True).figure.axes[0]
    (ways,) = (one.get_segments() for one in axes.collections if len(getattr(one, "get_segments", list)()) == 16)
    drawn = {(round(way[0][0], 6), round(way[0][1]), round(way[1][0], 6), round(way[1][1])) for way in ways}
    sent = {(one.begin, one.rank, one.end, played.schedule.peer(one.action)) for one in played.messages}
    assert drawn == sent and len(sent) == 2 * 2 * 4


PLAYED = pp.simulate(pp.gpipe(2, 2))
NO_SCHEDULE = {
    "expected held to be one of": lambda: draw_schedule(PLAYED, held="money"),
    "expected time to be one of": lambda: draw_schedules({"one": PLAYED}, time="days"),
    "expected at least one span": lambda: draw_measured([[], []]),
    "expected at least one schedule": lambda: draw_schedules({}),
    "expected slow to be one of": lambda: play(slow="all"),
    "expected schedule to be one of": lambda: play("DualPipe"),
}


@refusals({words: (call, ValueError, words) for words, call in NO_SCHEDULE.items()})
def test_a_schedule_that_cannot_be_drawn_is_refused(call, error, words):
    refused(call, error, words)


def test_measured_spans_are_drawn_from_the_first_begin_on_and_say_the_same_bubble():
    played = pp.simulate(pp.gpipe(3, 4), COST, 0.5)
    picture = draw_measured(measured(played), title="three ranks")
    drawn = boxes(picture.figure.axes[0])
    assert drawn == {(round(span.begin, 6), round(span.end, 6), span.rank) for span in played.spans}  # in ms
    share = f"{100 * played.bubble_share:.1f}%"
    assert f"three ranks: 3 ranks, 4 micro-batches: {played.seconds:.4g} ms, idle {share} of the time" in picture.alt
    one = [pp.Span(0, pp.Action("forward", 0, 0), 1.0, 2.0)]
    assert idle_share(spans_by_rank([one, []])) == 0.5 and draw_measured([one, []]).png().startswith(PNG)
    assert idle_share(spans_by_rank([[pp.Span(0, pp.Action("forward", 0, 0), 1.0, 1.0)]])) == 0, "no time passes"


def test_clocks_that_differ_are_set_by_each_ranks_first_forward():
    played = pp.simulate(pp.one_forward_one_backward(3, 4), COST)
    apart = spans_by_rank(measured(played, skew=7.0), same_clock=False)
    for own, other in zip(apart, spans_by_rank(measured(played)), strict=True):
        assert [span.action for span in own] == [span.action for span in other]
        assert [span.begin for span in own] == pytest.approx([span.begin for span in other], abs=1e-9)
    assert whole_seconds(spans_by_rank(measured(played, skew=7.0))) > 14


def test_slow_links_and_ranks_cost_1f1b_less_with_more_in_flight_and_never_more_than_gpipe():
    for link in LINK_TIMES[1:]:
        usual = play("1F1B", link=link).seconds
        assert pp.simulate(with_more_in_flight(4, 8), COST, link).seconds < usual < play("GPipe", link=link).seconds
    assert play("1F1B", slow="first").seconds < play("GPipe", slow="first").seconds


def test_every_slider_can_be_moved_and_the_picture_says_what_is_played():
    one = explore_pipeline()
    assert list(one.start.values()) == ["1F1B", 4, 8, 2.0, 0.0, "none"]
    assert set(SLOW) == set(one.choices["slow"])
    for name, labels in one.choices.items():
        ends = list(labels.values())
        for value in (ends[0], ends[-1]):
            assert is_sentence(one.at(**one.start | {name: value}).alt)
    others = ((BACKWARDS[0], LINK_TIMES[-1], "middle"), (BACKWARDS[-1], 0.1, "last"))
    for schedule, m, (backward, link, slow) in itertools.product(SCHEDULES, (1, 6), others):
        picture, played = (
            draw_pipeline(schedule, 4, m, backward, link, slow),
            play(schedule, 4, m, backward, link, slow),
        )
        assert f"A backward takes {backward:g} forwards, a message {link:g}; slow rank: {slow}." in picture.alt
        assert f"{played.seconds:.4g} forwards long, idle {100 * played.bubble_share:.1f}%" in picture.alt
        assert ("rounded up" in picture.alt) == (schedule == "interleaved" and m % 4 > 0)
