"""The simulator against closed forms, and the bytes it draws against a ledger that is kept tensor by tensor."""

from __future__ import annotations

import itertools
import random

import pytest

from memlab.pipeline_parallelism import (
    Action,
    Schedule,
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
from memlab.pipeline_parallelism.schedule import COMPUTATIONS, SENDS

SIZES = [(stages, micro_batches) for stages in range(1, 7) for micro_batches in (1, 2, 3, 5, 8, 12)]
RATIOS = [(1, 1), (1, 2), (3, 2)]


def some_costs(chance: random.Random, stages: int) -> list[StageCost]:
    return [
        StageCost(
            forward_seconds=chance.randint(1, 9),
            backward_seconds=chance.randint(1, 9),
            saved_bytes=chance.randint(0, 99),
            static_bytes=chance.randint(0, 999),
            input_bytes=chance.randint(1, 30) if stage else 0,
            output_bytes=chance.choice([0, chance.randint(1, 30)]),
            gradient_bytes=chance.choice([None, chance.randint(0, 30)]) if stage else 0,
            received_gradient_bytes=chance.choice([None, chance.randint(0, 60)]) if stage else 0,
            forward_extra_bytes=chance.randint(0, 200),
            backward_extra_bytes=chance.randint(0, 200),
        )
        for stage in range(stages)
    ]


def some_schedules() -> list[Schedule]:
    made = [
        make(p, m) for p, m in [(1, 3), (2, 1), (2, 5), (4, 3), (4, 8)] for make in (gpipe, one_forward_one_backward)
    ]
    made += [forward_only(3, 4), interleaved(2, 3, 4), interleaved(4, 2, 8), interleaved(3, 1, 6)]
    return [*made, with_messages("mine", ["F0 F1 B1 B0", "F0 F0@2 F1 F1@2 B0@2 B1@2 B1 B0"])]


# ---- time


@pytest.mark.parametrize(("forward", "backward"), RATIOS)
def test_the_bubble_is_the_closed_form_whatever_a_backward_takes(forward, backward):
    cost = StageCost(forward, backward)
    for p, m in SIZES:
        for make in (gpipe, one_forward_one_backward):
            run = simulate(make(p, m), cost)
            assert run.seconds == (m + p - 1) * (forward + backward)
            assert run.bubble_share == pytest.approx(bubble_share(p, m), abs=1e-12)
        for chunks in (1, 2, 3):
            if m % p == 0:
                run = simulate(interleaved(p, chunks, m), cost)
                assert run.seconds == (chunks * m + p - 1) * (forward + backward)
                assert run.bubble_share == pytest.approx(bubble_share(p, m, chunks), abs=1e-12)


def test_in_flight_is_the_closed_form():
    for p, m in SIZES:
        for name, make in (("GPipe", gpipe), ("1F1B", one_forward_one_backward)):
            run = simulate(make(p, m))
            assert [run.in_flight(s) for s in range(p)] == [in_flight(name, s, p, m) for s in range(p)]
        for chunks in (1, 2, 3):
            if m % p == 0:
                run = simulate(interleaved(p, chunks, m))
                found = [run.rank_in_flight(rank) for rank in range(p)]
                assert found == [in_flight("interleaved 1F1B", rank, p * chunks, m, chunks) for rank in range(p)]


def test_without_backwards_nothing_is_in_flight():
    run = simulate(forward_only(3, 4), StageCost(saved_bytes=5))
    assert [run.in_flight(stage) for stage in range(3)] == [run.peak_bytes(rank) for rank in range(3)] == [0, 0, 0]


def test_each_rank_is_busy_with_all_its_micro_batches():
    chance = random.Random(0)
    for one in some_schedules():
        costs = some_costs(chance, one.stages)
        run = simulate(one, costs)
        for rank in range(one.ranks):
            of_stages = [costs[s] for s in one.stages_of(rank)]
            each = [c.forward_seconds + c.backward_seconds * (one.name != "forward only") for c in of_stages]
            assert run.busy_seconds(rank) == one.micro_batches * sum(each)
        assert run.bubble_share == 1 - sum(map(run.busy_seconds, range(one.ranks))) / (one.ranks * run.seconds)


def test_with_unequal_stages_gpipe_takes_one_pass_and_then_the_slowest_turns():
    chance = random.Random(1)
    for p, m in SIZES:
        costs = some_costs(chance, p)
        forwards, backwards = [c.forward_seconds for c in costs], [c.backward_seconds for c in costs]
        one_pass = sum(forwards) + sum(backwards)
        assert simulate(gpipe(p, m), costs).seconds == one_pass + (m - 1) * (max(forwards) + max(backwards))


def test_with_unequal_stages_1f1b_is_never_slower_than_gpipe_nor_faster_than_its_slowest_stage():
    chance = random.Random(2)
    for p, m in SIZES * 4:
        costs = some_costs(chance, p)
        turns = [c.forward_seconds + c.backward_seconds for c in costs]
        seconds = simulate(one_forward_one_backward(p, m), costs).seconds
        assert max(sum(turns[:s]) + m * turns[s] for s in range(p)) <= seconds
        assert sum(turns) <= seconds <= simulate(gpipe(p, m), costs).seconds


def test_a_slow_last_stage_costs_1f1b_more_than_a_slow_first():
    slow, others = StageCost(2, 4), [StageCost(1, 2)] * 3
    times = [simulate(one_forward_one_backward(4, 8), [*others[:s], slow, *others[s:]]).seconds for s in range(4)]
    assert times == sorted(times) and times[0] < times[3] == sum([3, 3, 3, 6]) + 7 * 6


# ---- the link


def test_each_turn_of_gpipe_pays_the_link_for_a_receive_begins_after_the_computation_before_it():
    for (p, m), link in itertools.product(SIZES, (0.25, 1.0, 3.0)):
        if p > 1:
            seconds = simulate(gpipe(p, m), link_seconds=link).seconds
            assert seconds == 3 * (m + p - 1) + 2 * link * (m + p - 2)


@pytest.mark.parametrize("link", [0.125, 0.5, 1.0])
def test_1f1b_pays_the_link_there_and_back_for_each_micro_batch(link):
    for p, m in [(3, 6), (4, 8), (4, 32), (6, 24), (8, 32)]:
        run = simulate(one_forward_one_backward(p, m), link_seconds=link)
        assert run.seconds == 3 * (m + p - 1) + 2 * link * (m + p - 3)
        one_more = one_forward_one_backward(p, m, in_flight=[p - s + 1 for s in range(p)])
        assert simulate(one_more, link_seconds=link).seconds == run.seconds
        most = one_forward_one_backward(p, m, in_flight=[2 * (p - s) - 1 for s in range(p)])
        assert simulate(most, link_seconds=link).seconds < run.seconds


def test_a_message_takes_its_latency_and_its_bytes_over_the_bandwidth():
    costs = [StageCost(), StageCost(input_bytes=600, gradient_bytes=300)]
    run = simulate(gpipe(2, 1), costs, link_seconds=0.5, link_bytes_per_second=100)
    assert [(one.rank, one.begin, one.end) for one in run.messages] == [(0, 1.0, 7.5), (1, 10.5, 14.0)]
    assert run.seconds == 16.0


def test_two_messages_that_begin_together_follow_each_other_on_their_link():
    first = [Action(kind, 0, i) for kind in ("forward", "send activation") for i in range(2)]
    last = [Action(kind, 1, i) for kind in ("receive activation", "forward") for i in range(2)]
    run = simulate(Schedule("by hand", 2, (0, 1), (tuple(first), tuple(last))), link_seconds=1.5)
    assert [(one.begin, one.end) for one in run.messages] == [(2.0, 3.5), (3.5, 5.0)]
    assert run.seconds == 6.0


def test_messages_leave_when_both_ends_have_begun_and_follow_each_other_on_a_link():
    chance = random.Random(3)
    for one in some_schedules():
        run = simulate(one, some_costs(chance, one.stages), link_seconds=0.5, link_bytes_per_second=7)
        when = {
            (rank, action): moment
            for rank, actions in enumerate(one.actions)
            for action, moment in zip(actions, run.moments[rank], strict=True)
        }
        links: dict[tuple[int, int], list] = {}
        for message in run.messages:
            peer = one.peer(message.action)
            assert message.begin >= max(when[message.rank, message.action], when[peer, message.action.counterpart])
            links.setdefault((message.rank, peer), []).append(message)
        for on_link in links.values():
            assert all(a.end <= b.begin for a, b in itertools.pairwise(on_link))
        assert len(run.messages) == sum(action.kind in SENDS for actions in one.actions for action in actions)


def test_computations_follow_each_other_on_a_rank_and_begin_when_what_they_need_is_there():
    chance = random.Random(4)
    for one in some_schedules():
        run = simulate(one, some_costs(chance, one.stages), link_seconds=1.5)
        end = {span.action: span.end for span in run.spans} | {m.action: m.end for m in run.messages}
        for rank in range(one.ranks):
            mine = [span for span in run.spans if span.rank == rank]
            assert [span.action for span in mine] == [a for a in one.actions[rank] if a.kind in COMPUTATIONS]
            assert all(a.end <= b.begin for a, b in itertools.pairwise(mine))
        for span in run.spans:
            kind, stage, i = span.action
            near = stage - 1 if kind == "forward" else stage + 1
            if 0 <= near < one.stages:
                same = one.ranks_of_stages[near] == span.rank
                source = Action(kind if same else f"send {'activation' if near < stage else 'gradient'}", near, i)
                assert end[source] <= span.begin


def test_a_rank_waits_after_its_next_computation_until_what_it_sent_has_been_received():
    """Rank 1 begins to receive F2 after a long B0. Rank 0 computes F3 meanwhile, and only then waits."""
    lists = ["F0 F1 F2 F3 B0 B1 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]
    run = simulate(with_messages("mine", lists), [StageCost(1, 1), StageCost(1, 50)])
    ends = {str(span.action): span.end for span in run.spans}
    done, begun = ({str(action): moment for moment, _, action in run.line(rank)} for rank in (0, 1))
    assert done["F2 of stage 0"] == ends["F2 of stage 0"] == 3.0
    assert ends["F3 of stage 0"] == 4.0
    assert done["F3 of stage 0"] == begun["receive F2 of stage 1"] == ends["B0 of stage 1"] == 52.0


# ---- bytes


def ledger(one: Schedule, costs: list[StageCost], rank: int) -> tuple[list[int], int]:
    """What a rank holds after each action, and its peak: a name for each tensor, put in and taken out."""
    held = {("static", stage): costs[stage].static_bytes for stage in one.stages_of(rank)}
    actions, total, peak = one.actions[rank], [], sum(held.values())
    trains = any(action.kind == "backward" for action in actions)
    sent: list = []
    received: list = []
    for action in actions:
        kind, stage, i = action
        cost = costs[stage]
        peak = max(peak, sum(held.values()))
        if kind == "forward":
            peak = max(peak, sum(held.values()) + cost.forward_extra_bytes)
            held.pop(("arrived F", stage, i), None)
            held.pop(("made F", stage - 1, i), None)
            held["saved", stage, i] = cost.saved_bytes if trains else 0
            held["made F", stage, i] = cost.output_bytes
        elif kind == "backward":
            outputs = [name for name in sent if name[:2] == ("made F", stage)]
            if ("arrived B", stage, i) in received:  # its sender has begun to receive them
                for name in outputs:
                    sent.remove(name)
                    del held[name]
            peak = max(peak, sum(held.values()) + cost.backward_extra_bytes)
            held.pop(("arrived B", stage, i), None)
            held.pop(("made B", stage + 1, i), None)
            del held["saved", stage, i]
            if stage:
                held["made B", stage, i] = cost.gradient_bytes
        elif kind == "receive activation":
            held["arrived F", stage, i] = cost.input_bytes
        elif kind == "receive gradient":
            held["arrived B", stage, i] = costs[stage + 1].received_gradient_bytes
            received.append(("arrived B", stage, i))
        if kind in COMPUTATIONS:
            for name in sent:
                del held[name]
            sent, received = [], []
        elif kind in SENDS:
            sent.append(("made F" if kind == "send activation" else "made B", stage, i))
        total.append(sum(held.values()))
    for number in reversed(range(len(actions) - 1)):  # messages side by side begin together
        if actions[number].kind not in COMPUTATIONS and actions[number + 1].kind not in COMPUTATIONS:
            total[number] = total[number + 1]
    return total, max(peak, *total)


def test_the_line_and_the_peak_are_those_of_a_ledger_kept_tensor_by_tensor():
    chance = random.Random(5)
    for one in some_schedules() * 5:
        costs = some_costs(chance, one.stages)
        run = simulate(one, costs)
        for rank in range(one.ranks):
            total, peak = ledger(one, costs, rank)
            drawn = run.line(rank)
            assert [nbytes for _, nbytes, _ in drawn] == total
            assert [action for _, _, action in drawn] == list(one.actions[rank])
            assert all(a.seconds <= b.seconds for a, b in itertools.pairwise(drawn))
            assert run.peak_bytes(rank) == peak


def test_without_messages_bytes_the_peak_is_what_is_in_flight():
    for p, m in SIZES:
        for name, make in (("GPipe", gpipe), ("1F1B", one_forward_one_backward)):
            run = simulate(make(p, m), StageCost(saved_bytes=10, static_bytes=7))
            assert [run.peak_bytes(s) for s in range(p)] == [7 + 10 * in_flight(name, s, p, m) for s in range(p)]


def test_before_a_backward_the_first_rank_has_let_go_of_all_that_it_sent():
    costs = [StageCost(saved_bytes=1, output_bytes=100, backward_extra_bytes=1000), StageCost(gradient_bytes=5)]
    for make in (gpipe, one_forward_one_backward):
        run = simulate(make(2, 3), costs)
        assert run.peak_bytes(0) == run.in_flight(0) * 1 + 5 + 1000


def test_after_a_step_a_rank_holds_its_static_bytes_the_losses_and_what_it_sent_last():
    costs = [StageCost(static_bytes=5), StageCost(static_bytes=7, output_bytes=4, input_bytes=30, gradient_bytes=20)]
    run = simulate(one_forward_one_backward(2, 3), costs)
    assert run.line(0)[-1].nbytes == 5
    assert run.line(1)[-1].nbytes == 7 + 3 * 4 + 20


def test_bytes_do_not_depend_on_time():
    one = one_forward_one_backward(4, 6)
    costs = some_costs(random.Random(6), 4)
    fast, slow = simulate(one, costs), simulate(one, costs, 10.0)
    for rank in range(4):
        assert [x.nbytes for x in fast.line(rank)] == [x.nbytes for x in slow.line(rank)]
        assert fast.peak_bytes(rank) == slow.peak_bytes(rank)


# ---- what is refused


def test_a_wrong_schedule_is_refused_before_it_is_played():
    right = gpipe(2, 2)
    wrong = Schedule("wrong", 2, right.ranks_of_stages, (right.actions[0][:-1], right.actions[1]))
    with pytest.raises(ValueError, match="expected B1 of stage 0 on rank 0, found none"):
        simulate(wrong)


def test_costs_and_links_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="expected a cost for each of 3 stages, found 2"):
        simulate(gpipe(3, 2), [StageCost()] * 2)
    with pytest.raises(ValueError, match="expected saved_bytes of at least 0, found -1"):
        StageCost(saved_bytes=-1)
    with pytest.raises(ValueError, match="expected forward_seconds of at least 0, found nan"):
        StageCost(float("nan"))
    for link in (
        {"link_seconds": -1.0},
        {"link_seconds": float("inf")},
        {"link_bytes_per_second": 0},
        {"link_seconds": float("nan")},
    ):
        with pytest.raises(ValueError, match="expected link_seconds of at least 0 and link_bytes_per_second above 0"):
            simulate(gpipe(2, 2), **link)


def test_closed_forms_refuse_what_they_do_not_know():
    with pytest.raises(
        ValueError, match="expected schedule to be one of 'GPipe', '1F1B', 'interleaved 1F1B'; found 'gpipe'"
    ):
        in_flight("gpipe", 0, 2, 2)
    with pytest.raises(ValueError, match="expected a stage from 0 to 3, found 4"):
        in_flight("1F1B", 4, 4, 2)
    with pytest.raises(ValueError, match="expected stages that 3 chunks divide, found 4"):
        in_flight("interleaved 1F1B", 0, 4, 4, chunks=3)
    for sizes in ((0, 2), (2, 0), (2, 2, 0)):
        with pytest.raises(ValueError, match="of at least 1, found 0"):
            bubble_share(*sizes)


def test_stages_that_cost_no_time_have_no_bubble():
    assert simulate(gpipe(2, 2), StageCost(0, 0)).bubble_share == 0.0
