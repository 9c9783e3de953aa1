"""Pictures of schedules: their boxes are the simulation's spans, and their words its figures."""

import itertools

import pytest

from memlab.book.gantt import draw_schedules
from memlab.book.pipeline_sliders import (
    BACKWARDS,
    LINK_TIMES,
    MICRO_BATCHES,
    RANKS,
    SCHEDULES,
    SLOW,
    draw_pipeline,
    explore_pipeline,
    pipeline_table,
    play,
)
from memlab.book.schedule_pictures import bound, draw_measured, draw_schedule, draw_trip
from memlab.book.spans import held_micro_batches, idle_share, spans_by_rank, whole_seconds
from memlab.book.style import is_sentence
from memlab.pipeline_parallelism import (
    Action,
    Span,
    StageCost,
    bubble_share,
    forward_only,
    gpipe,
    in_flight,
    interleaved,
    one_forward_one_backward,
    simulate,
    with_messages,
)
from memlab.units import format_bytes

PNG = b"\x89PNG"
COST = StageCost(forward_seconds=1.0, backward_seconds=2.0)


def boxes(axes) -> set[tuple[float, float, int]]:
    """(begin, end, rank) of every box that a chart has, from the filled paths."""
    found = []
    for patch in axes.patches:
        if patch.get_facecolor()[3] and patch.get_linewidth() == 0:
            corners = patch.get_path().vertices.reshape(-1, 5, 2)
            found += [(round(one[0, 0], 6), round(one[1, 0], 6), round(one[:4, 1].mean())) for one in corners]
    assert len(found) == len(set(found))
    return set(found)


def measured(simulation, scale=1e-3, offset=100.0, skew=0.0):
    """A simulation's spans as ranks would return them: seconds of a clock; skew: how far ranks' clocks differ."""
    shift = lambda rank, when: offset + skew * rank + scale * when  # noqa: E731
    return [
        [Span(s.rank, s.action, shift(rank, s.begin), shift(rank, s.end)) for s in simulation.spans if s.rank == rank]
        for rank in range(simulation.schedule.ranks)
    ]


# ---- the chart


@pytest.mark.parametrize(
    "schedule", [gpipe(3, 4), one_forward_one_backward(4, 8), interleaved(2, 2, 4), forward_only(3, 5)], ids=str
)
def test_every_computation_is_one_box_from_its_begin_to_its_end(schedule):
    played = simulate(schedule, COST, 0.25)
    axes = draw_schedule(played).figure.axes[0]
    assert boxes(axes) == {(span.begin, span.end, span.rank) for span in played.spans}
    idle = [text.get_text() for text in axes.texts if text.get_text().startswith("idle")]
    assert idle == [
        f"idle {100 * (1 - played.busy_seconds(rank) / played.seconds):.1f}%" for rank in range(schedule.ranks)
    ]


@pytest.mark.parametrize("stages", range(1, 6))
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 9])
def test_the_line_of_what_is_in_flight_peaks_where_the_simulation_says_and_ends_at_none(stages, micro_batches):
    for make in (gpipe, one_forward_one_backward):
        played = simulate(make(stages, micro_batches), COST, 0.5)
        for rank, own in enumerate(spans_by_rank(played)):
            line = held_micro_batches(own)
            assert max(number for _, number in line) == played.in_flight(rank) == bound(played.schedule, rank)[0]
            assert bound(played.schedule, rank)[0] == in_flight(played.schedule.name, rank, stages, micro_batches)
            assert line[-1] == (own[-1].end, 0)
            assert len({when for when, _ in line}) == len(line)  # no dip where a forward begins as a backward ends


@pytest.mark.parametrize(("ranks", "chunks", "micro_batches"), [(2, 2, 4), (4, 2, 8), (4, 3, 4), (3, 1, 6), (1, 2, 3)])
def test_the_bound_of_an_interleaved_schedule_is_what_its_simulation_has_in_flight(ranks, chunks, micro_batches):
    played = simulate(interleaved(ranks, chunks, micro_batches), COST)
    for rank, own in enumerate(spans_by_rank(played)):
        assert max(number for _, number in held_micro_batches(own)) == bound(played.schedule, rank)[0]


def test_the_words_beside_the_lines_are_the_formula_and_its_result():
    texts = [text.get_text() for text in draw_schedule(simulate(one_forward_one_backward(4, 8))).figure.axes[1].texts]
    assert {f"rank {rank}: {4 - rank} = min(4 − {rank}, 8)" for rank in range(4)} <= set(texts)
    texts = [text.get_text() for text in draw_schedule(simulate(gpipe(4, 8))).figure.axes[1].texts]
    assert "ranks 0–3: 8 = m" in texts


def test_the_alt_text_says_time_bubble_and_what_is_held():
    picture = draw_schedule(simulate(one_forward_one_backward(4, 8), COST), title="mine")
    assert "mine: 4 ranks, 8 micro-batches: 33 forwards long, idle 27.3% of the time" in picture.alt
    assert "At most held: 4 on rank 0; 3 on rank 1; 2 on rank 2; 1 on rank 3." in picture.alt
    assert is_sentence(picture.alt)
    assert picture.png().startswith(PNG)


def test_no_formula_is_shown_for_orders_that_do_not_keep_it():
    assert bound(one_forward_one_backward(3, 6, in_flight=[5, 3, 1]), 0) is None
    assert bound(one_forward_one_backward(3, 6, in_flight=[5, 3, 1]), 2) == (1, "1 = min(3 − 2, 6)")
    assert bound(with_messages("mine", ["F0 B0 F1 B1"]), 0) is None
    played = simulate(one_forward_one_backward(3, 6, in_flight=[5, 3, 1]))
    assert "rank 0: 5" in [text.get_text() for text in draw_schedule(played).figure.axes[1].texts]


def test_the_line_of_bytes_is_the_simulations_and_its_words_are_the_peaks():
    costs = [
        StageCost(static_bytes=5 * 2**20, saved_bytes=3 * 2**20, output_bytes=2**20, backward_extra_bytes=7 * 2**20),
        StageCost(static_bytes=6 * 2**20, saved_bytes=2 * 2**20, input_bytes=2**20, forward_extra_bytes=2**20),
    ]
    played = simulate(one_forward_one_backward(2, 3), costs, 0.5)
    picture = draw_schedule(played, held="bytes", time="s", messages=True)
    for rank, line in enumerate(picture.figure.axes[1].lines[: 2 * 2 : 2]):
        own = [(costs[rank].static_bytes, 0.0), *((one.nbytes, one.seconds) for one in played.line(rank))]
        assert list(line.get_ydata())[:-1] == pytest.approx([nbytes / 2**20 for nbytes, _ in own])
        assert list(line.get_xdata())[:-1] == pytest.approx([seconds for _, seconds in own])
        assert f"{format_bytes(played.peak_bytes(rank))} on rank {rank}" in picture.alt
        texts = [text.get_text() for text in picture.figure.axes[1].texts]
        assert f"rank {rank}: peak {format_bytes(played.peak_bytes(rank))}" in texts
    assert played.peak_bytes(0) != played.peak_bytes(1)


def test_ranks_that_hold_as_much_are_named_together():
    played = simulate(one_forward_one_backward(4, 8, in_flight=[4, 2, 2, 1]))
    assert "4 on rank 0; 2 on ranks 1, 2; 1 on rank 3" in draw_schedule(played).alt
    assert "8 on ranks 0–3." in draw_schedule(simulate(gpipe(4, 8))).alt


def test_every_message_is_a_line_from_its_senders_row_to_its_receivers():
    played = simulate(one_forward_one_backward(3, 4), COST, 0.5)
    axes = draw_schedule(played, messages=True).figure.axes[0]
    (ways,) = (one.get_segments() for one in axes.collections if len(getattr(one, "get_segments", list)()) == 16)
    drawn = {(round(way[0][0], 6), round(way[0][1]), round(way[1][0], 6), round(way[1][1])) for way in ways}
    sent = {(one.begin, one.rank, one.end, played.schedule.peer(one.action)) for one in played.messages}
    assert drawn == sent
    assert all(abs(way[1][1] - way[0][1]) == pytest.approx(0.28) for way in ways)  # in the white between two rows
    assert len(sent) == 2 * 2 * 4


def test_a_forward_without_a_backward_keeps_nothing():
    for own in spans_by_rank(simulate(forward_only(3, 4), COST)):
        assert max(number for _, number in held_micro_batches(own)) == 1


def test_other_words_for_what_is_held_and_for_time_are_refused():
    played = simulate(gpipe(2, 2))
    with pytest.raises(ValueError, match="expected held to be one of"):
        draw_schedule(played, held="money")
    with pytest.raises(ValueError, match="expected time to be one of"):
        draw_schedule(played, time="days")
    with pytest.raises(ValueError, match="expected time to be one of"):
        draw_schedules({"one": played}, time="days")


# ---- measured


def test_measured_spans_are_drawn_from_the_first_begin_on_and_say_the_same_bubble():
    played = simulate(gpipe(3, 4), COST, 0.5)
    picture = draw_measured(measured(played), title="three ranks")
    drawn = boxes(picture.figure.axes[0])
    assert drawn == {(round(span.begin, 6), round(span.end, 6), span.rank) for span in played.spans}  # in ms
    share = f"{100 * played.bubble_share:.1f}%"
    assert f"three ranks: 3 ranks, 4 micro-batches: {played.seconds:.4g} ms, idle {share} of the time" in picture.alt
    assert picture.png().startswith(PNG)


def test_clocks_that_differ_are_set_by_each_ranks_first_forward():
    played = simulate(one_forward_one_backward(3, 4), COST)
    apart = spans_by_rank(measured(played, skew=7.0), same_clock=False)
    together = spans_by_rank(measured(played))
    for own, other in zip(apart, together, strict=True):
        assert [span.action for span in own] == [span.action for span in other]
        assert [span.begin for span in own] == pytest.approx([span.begin for span in other], abs=1e-9)
    assert whole_seconds(spans_by_rank(measured(played, skew=7.0))) > 14


def test_a_rank_without_spans_idles_all_the_time_and_none_at_all_are_refused():
    one = [Span(0, Action("forward", 0, 0), 1.0, 2.0)]
    assert idle_share(spans_by_rank([one, []])) == 0.5
    assert draw_measured([one, []]).png().startswith(PNG)
    assert idle_share(spans_by_rank([[Span(0, Action("forward", 0, 0), 1.0, 1.0)]])) == 0, "no time passes"
    with pytest.raises(ValueError, match="expected at least one span"):
        draw_measured([[], []])


# ---- several


def test_a_batchs_trip_is_one_at_a_time_when_it_is_whole_and_shorter_in_micro_batches():
    picture = draw_trip(4, 4)
    whole, *cut = (boxes(axes) for axes in picture.figure.axes)
    ends = sorted(whole)
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(ends))  # never two ranks at once
    assert max(end for _, end, _ in whole) == 48
    for drawn in cut:
        assert max(end for _, end, _ in drawn) == (4 + 3) * 3
    assert "the whole batch at once: 48 forwards long, idle 75.0%" in picture.alt
    words = "21 forwards long, idle 42.9%, at most in flight on each rank"
    assert f"GPipe, 4 micro-batches: {words} 4, 4, 4, 4" in picture.alt
    assert f"1F1B, 4 micro-batches: {words} 4, 3, 2, 1" in picture.alt
    assert picture.png().startswith(PNG)


def test_panels_share_one_axis_of_time_and_may_be_simulated_or_measured():
    played = simulate(gpipe(2, 3), StageCost(forward_seconds=0.001, backward_seconds=0.002))
    panels = {"simulated": played, "measured": measured(played, scale=2.0)}
    picture = draw_schedules(panels, time="ms", title="two ranks")
    for axes in picture.figure.axes:
        assert axes.get_xlim() == pytest.approx((0, 2e3 * played.seconds))
    assert f"simulated: {1e3 * played.seconds:.4g} ms" in picture.alt
    assert picture.png().startswith(PNG)
    with pytest.raises(ValueError, match="expected at least one schedule"):
        draw_schedules({})


def test_the_key_names_every_look_that_any_panel_has():
    panels = {"one": simulate(gpipe(2, 4)), "other": simulate(interleaved(2, 2, 4))}
    first, second = draw_schedules(panels).figure.axes
    names = [text.get_text() for text in first.get_legend().get_texts()]
    assert names == [f"{kind}, {which} stage" for kind in ("forward", "backward") for which in ("1st", "2nd")]
    assert second.get_legend() is None
    alone = draw_schedule(panels["one"]).figure.axes[0].get_legend()
    assert [text.get_text() for text in alone.get_texts()] == ["forward", "backward"]


# ---- sliders


@pytest.mark.parametrize("ranks", RANKS)
def test_what_the_sliders_play_has_the_formulas_bubble_when_links_are_free_and_no_rank_is_slow(ranks):
    for schedule, m in itertools.product(SCHEDULES, MICRO_BATCHES[::7]):
        played = play(schedule, ranks, m)
        chunks = 2 if schedule == "interleaved" else 1
        assert played.schedule.micro_batches == (-(-m // ranks) * ranks if chunks == 2 else m)
        formula = bubble_share(ranks, played.schedule.micro_batches, chunks)
        assert idle_share(spans_by_rank(played)) == pytest.approx(formula, abs=1e-9), (schedule, ranks, m)


def test_on_eight_ranks_the_bubble_is_below_a_fifth_from_as_many_micro_batches_on_as_chapter_15_says():
    short = lambda schedule, m: play(schedule, 8, m).bubble_share < 0.2 - 1e-9  # noqa: E731
    below = {schedule: [m for m in MICRO_BATCHES if short(schedule, m)] for schedule in SCHEDULES}
    assert below["GPipe"] == below["1F1B"] == [29, 30, 31, 32]
    assert play("interleaved", 8, below["interleaved"][0]).schedule.micro_batches == 16


def test_a_slow_link_costs_1f1b_less_with_more_in_flight_and_never_more_than_gpipe():
    for link in LINK_TIMES[1:]:
        most, usual = one_forward_one_backward(4, 8, in_flight=[7, 5, 3, 1]), play("1F1B", link=link).seconds
        assert simulate(most, COST, link).seconds < usual < play("GPipe", link=link).seconds


def test_1f1b_and_gpipe_idle_alike_with_equal_stages_and_free_links_only():
    """What chapter 15's claim says, and its condition."""
    for ranks, m in itertools.product(RANKS, MICRO_BATCHES[::7]):
        assert play("1F1B", ranks, m).seconds == play("GPipe", ranks, m).seconds
    assert play("1F1B", slow="first").seconds < play("GPipe", slow="first").seconds


def test_every_slider_can_be_moved_and_the_picture_says_what_is_played():
    one = explore_pipeline()
    assert one.start == {
        "schedule": "1F1B",
        "ranks": 4,
        "micro_batches": 8,
        "backward": 2.0,
        "link": 0.0,
        "slow": "none",
    }
    for name, labels in one.choices.items():
        for value in list(labels.values())[:: 10 if name == "micro_batches" else 1]:
            assert is_sentence(one.at(**one.start | {name: value}).alt)
    others = ((BACKWARDS[0], LINK_TIMES[-1], "middle"), (BACKWARDS[-1], 0.1, "last"))
    for schedule, ranks, m, (backward, link, slow) in itertools.product(SCHEDULES, RANKS[1::4], (1, 6), others):
        picture = draw_pipeline(schedule, ranks, m, backward, link, slow)
        played = play(schedule, ranks, m, backward, link, slow)
        assert f"A backward takes {backward:g} forwards, a message {link:g}; slow rank: {slow}." in picture.alt
        assert f"{played.seconds:.4g} forwards long, idle {100 * played.bubble_share:.1f}%" in picture.alt
        assert ("rounded up" in picture.alt) == (schedule == "interleaved" and m % ranks > 0)
    assert set(SLOW) == set(one.choices["slow"])
    with pytest.raises(ValueError, match="expected slow to be one of"):
        play(slow="all")
    with pytest.raises(ValueError, match="expected schedule to be one of"):
        play("DualPipe")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("size", [(1, 1), (8, 32)])
def test_the_smallest_and_the_largest_can_be_drawn(schedule, size):
    assert draw_pipeline(schedule, *size, 2.0, 0.25, "first").png().startswith(PNG)


def test_the_table_of_the_sliders_has_all_schedules():
    rows = pipeline_table(4, 8).rows
    assert [row[0] for row in rows] == ["GPipe", "1F1B", "interleaved 1F1B"]
    assert [row[3:5] for row in rows] == [["27.3%", "27.3%"], ["27.3%", "27.3%"], ["15.8%", "15.8%"]]
    assert [row[5] for row in rows] == ["8, 8, 8, 8", "4, 3, 2, 1", "5.5, 4.5, 3.5, 2.5"]
