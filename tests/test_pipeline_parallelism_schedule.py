"""Schedules: in PyTorch's orders, complete, and refused exactly when ranks that follow them would go wrong."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch.distributed.pipelining import schedules as torch_schedules

from memlab.pipeline_parallelism import (
    Action,
    Schedule,
    check_schedule,
    forward_only,
    gpipe,
    interleaved,
    one_forward_one_backward,
    with_messages,
)
from memlab.pipeline_parallelism.checking import expected_actions
from memlab.pipeline_parallelism.orders import read_order
from memlab.pipeline_parallelism.schedule import COMPUTATIONS, SENDS

SIZES = [(stages, micro_batches) for stages in range(1, 7) for micro_batches in (1, 2, 3, 4, 5, 8, 12)]


def made_by(stages: int, micro_batches: int) -> list[Schedule]:
    """Every schedule there is of these sizes."""
    made = [make(stages, micro_batches) for make in (gpipe, one_forward_one_backward, forward_only)]
    if micro_batches % stages == 0:
        made += [interleaved(stages, chunks, micro_batches) for chunks in (1, 2, 3)]
    return made


def computations(schedule: Schedule, rank: int) -> list[tuple[str, int, int]]:
    return [tuple(action) for action in schedule.actions[rank] if action.kind in COMPUTATIONS]


# ---- the orders


def torch_orders(kind: str, ranks: int, micro_batches: int, chunks: int = 1) -> list[list[tuple[str, int, int]]]:
    """What PyTorch's schedule does on each rank, from the class itself, without processes."""
    made = object.__new__(getattr(torch_schedules, kind))
    made._num_stages = made.pp_group_size = ranks
    made._n_microbatches = micro_batches
    if kind == "ScheduleInterleaved1F1B":
        made.n_local_stages = chunks
        made.number_of_rounds = max(1, micro_batches // ranks)
        made.microbatches_per_round = micro_batches // made.number_of_rounds
        orders = {rank: made._calculate_single_rank_operations(rank) for rank in range(ranks)}
    else:
        orders = made._get_pipeline_order()
    names = {"FORWARD": "forward", "FULL_BACKWARD": "backward"}
    return [
        [
            (names[one.computation_type.name], one.stage_index, one.microbatch_index)
            for one in orders[rank]
            if one is not None and one.computation_type.name in names
        ]
        for rank in range(ranks)
    ]


def test_gpipe_is_in_the_order_of_pytorchs():
    for stages, micro_batches in SIZES:
        mine = gpipe(stages, micro_batches)
        assert [computations(mine, rank) for rank in range(stages)] == torch_orders(
            "ScheduleGPipe", stages, micro_batches
        )


def test_1f1b_is_in_the_order_of_pytorchs():
    for stages, micro_batches in SIZES:
        if micro_batches < stages:  # theirs lists forwards of no micro-batch then, when asked for its order
            continue
        mine = one_forward_one_backward(stages, micro_batches)
        *theirs, last = torch_orders("Schedule1F1B", stages, micro_batches)
        assert [computations(mine, rank) for rank in range(stages - 1)] == theirs
        turns = [(kind, stages - 1, i) for i in range(micro_batches) for kind in COMPUTATIONS]
        assert computations(mine, stages - 1) == turns
        assert [kind for kind, _, _ in last] == [kind for kind, _, _ in turns]  # theirs begins to count at F1 here


def test_1f1b_with_fewer_micro_batches_than_stages_does_all_forwards_first():
    lines = str(one_forward_one_backward(4, 2)).splitlines()
    assert [line.split("  ", 1)[1] for line in lines[1:]] == ["F0 F1 B0 B1"] * 3 + ["F0 B0 F1 B1"]


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize(("ranks", "rounds"), [(1, 3), (2, 1), (2, 3), (3, 2), (4, 1), (4, 2), (8, 2)])
def test_interleaved_is_in_the_order_of_pytorchs_and_begins_with_as_many_forwards(ranks, rounds, chunks):
    mine = interleaved(ranks, chunks, ranks * rounds)
    theirs = torch_orders("ScheduleInterleaved1F1B", ranks, ranks * rounds, chunks)
    for rank in range(ranks):
        assert computations(mine, rank) == theirs[rank]
        before = [kind for kind, _, _ in theirs[rank]].index("backward")
        assert before == min(2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1, chunks * ranks * rounds)


def test_every_schedule_of_every_size_is_right_even_if_messages_begin_one_by_one():
    for stages, micro_batches in SIZES:
        for schedule in made_by(stages, micro_batches):
            check_schedule(schedule)
            check_schedule(schedule, together=False)
            assert schedule.micro_batches == micro_batches and schedule.ranks == stages
            assert [set(actions) for actions in schedule.actions] == expected_actions(schedule)


def test_1f1b_with_all_micro_batches_in_flight_is_gpipe():
    for stages, micro_batches in SIZES:
        whole = one_forward_one_backward(stages, micro_batches, in_flight=[micro_batches] * stages)
        assert whole.actions == gpipe(stages, micro_batches).actions


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_interleaving_sends_a_message_for_each_cut_that_it_makes(ranks, chunks):
    schedules = interleaved(ranks, chunks, 2 * ranks), one_forward_one_backward(ranks, 2 * ranks)
    many, few = (sum(action.kind in SENDS for of in each.actions for action in of) for each in schedules)
    assert many * (ranks - 1) == few * (chunks * ranks - 1)


def test_one_chunk_interleaved_is_1f1b_with_nearly_twice_as_much_in_flight():
    eager = one_forward_one_backward(3, 6, in_flight=[5, 3, 1])
    assert interleaved(3, 1, 6).actions == eager.actions


def test_forward_only_sends_no_gradient():
    kinds = {action.kind for actions in forward_only(3, 4).actions for action in actions}
    assert kinds == {"forward", "send activation", "receive activation"}


def test_one_stage_needs_no_message():
    for schedule in (gpipe(1, 3), one_forward_one_backward(1, 3), interleaved(1, 3, 2), forward_only(1, 2)):
        assert all(action.kind in COMPUTATIONS for action in schedule.actions[0])


@pytest.mark.parametrize("make", [gpipe, one_forward_one_backward, forward_only, lambda *sizes: interleaved(*sizes, 4)])
@pytest.mark.parametrize(("bad", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)])
def test_sizes_that_are_none_are_refused(make, bad, error):
    with pytest.raises(error, match="expected (stages|ranks)"):
        make(bad, 2)
    with pytest.raises(error, match="expected (micro_batches|chunks)"):
        make(2, bad)


def test_a_size_of_another_integer_type_is_refused_by_its_name():
    with pytest.raises(TypeError, match="expected stages as an int, found tensor"):
        gpipe(torch.tensor(2), 2)


def test_interleaved_names_the_next_number_of_micro_batches_that_the_ranks_divide():
    with pytest.raises(ValueError, match="expected micro-batches that 4 ranks divide, found 6; pick 8"):
        interleaved(4, 2, 6)


@pytest.mark.parametrize("ahead", [[2], [1, 2], [2, 1, 1], []])
def test_in_flight_needs_a_number_for_each_stage_none_above_the_one_before(ahead):
    with pytest.raises(ValueError, match="expected in_flight for each of 2 stages, none above the one before"):
        one_forward_one_backward(2, 4, in_flight=ahead)


# ---- a schedule of your own


def test_what_a_schedule_prints_is_read_back_as_the_same_schedule():
    turned = with_messages("last stage first", ["F0@1 B0@1", "F0@0 B0@0"])
    for schedule in (*made_by(4, 8), *made_by(2, 2), turned):
        text = [line.split("  ", 1)[1] for line in str(schedule).splitlines()[1:]]
        assert with_messages(schedule.name, text) == schedule


def test_text_and_actions_make_one_schedule():
    text = with_messages("mine", ["F0 B0@0", "F0@1 B0"])
    assert text == with_messages("mine", [read_order("F0 B0", 0), [Action(k, 1, 0) for k in COMPUTATIONS]])
    assert text.ranks_of_stages == (0, 1)


@pytest.mark.parametrize("word", ["F", "f0", "G0", "F0@", "F-1", "F0,B0"])
def test_other_words_are_refused(word):
    with pytest.raises(ValueError, match="expected F or B and a micro-batch, as in F0 or B3@2, found "):
        with_messages("mine", [f"F0 {word} B0"])


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        (["F0 B0", "F0"], "expected B0 of stage 1 on rank 1, found none; put it in"),
        (["F0 F1 B0 B1", "F0 B0 B1"], "expected F1 of stage 1 on rank 1, found none"),
        (["F0 F2 B0 B2"], "expected F1 of stage 0 on rank 0, found none"),
        (["F0 B0 F0", "F0 B0"], "expected each computation once, found F0 of stage 0 twice on rank 0"),
        (["F0 B0", "F0@0 F0 B0"], "expected stage 0 on one rank, found F0 of stage 0 on rank 1 and others on rank 0"),
        (["F0 B0", "F0@2 B0@2"], "expected stages 0 to 2, found stage 1 on no rank"),
        (["F0 B0", ""], "expected a stage on each of 2 ranks, found stages on ranks .0."),
        ([], "expected micro_batches of at least 1, found 0"),
        (
            ["B0 F0", "F0 B0"],
            "rank 0 waits with B0 of stage 0 for F0 of stage 0; rank 1 waits with F0 of stage 1 for F0 of stage 0",
        ),
        (
            ["F0 B0 F1 B1", "F0 F1 B0 B1"],
            "rank 0 waits with B0 of stage 0 for B0 of stage 1; rank 1 waits with F1 of stage 1 for F1 of stage 0",
        ),
    ],
)
def test_orders_that_cannot_be_are_refused_by_rank_and_action(orders, message):
    with pytest.raises(ValueError, match=message):
        with_messages("mine", orders)


def test_orders_with_messages_or_other_kinds_are_refused():
    with pytest.raises(
        ValueError, match="forwards and backwards only, found send F0 of stage 0 on rank 0; take it out"
    ):
        with_messages("mine", [[Action("send activation", 0, 0)]])
    with pytest.raises(ValueError, match="found weights0 of stage 0 on rank 0"):
        with_messages("mine", [[Action("weights", 0, 0)]])


@pytest.mark.parametrize(("ranks_of", "lists"), [((0, 2), 2), ((0, 0), 2), ((), 0), ((0, 1, 2), 2), ((0, -1), 2)])
def test_a_schedule_has_a_list_for_every_rank_and_a_stage_on_each(ranks_of, lists):
    with pytest.raises(ValueError, match="expected a stage on each of"):
        Schedule("mine", 1, ranks_of, ((),) * lists)


# ---- is it right?


def went_wrong(schedule: Schedule, together: bool) -> str | None:
    """Play ranks that follow their lists, with what each message has inside. None if all ends well.

    Between two ranks, one way, the n-th send meets the n-th receive. A rank waits in its messages until they have met.
    """
    ranks, at = range(schedule.ranks), schedule.ranks_of_stages
    wait_in = []
    for actions in schedule.actions:
        runs = [(kind, list(run)) for kind, run in itertools.groupby(actions, lambda one: one.kind in COMPUTATIONS)]
        wait_in.append(
            [part for alone, run in runs for part in ([[a] for a in run] if alone or not together else [run])]
        )
    position = [0] * schedule.ranks
    begun = [False] * schedule.ranks
    has: list[list[tuple]] = [[] for _ in ranks]
    sends: dict[tuple, list] = {}
    receives: dict[tuple, list] = {}
    met: dict[tuple, int] = {}
    while True:
        moved = False
        for rank in ranks:
            if position[rank] == len(wait_in[rank]):
                continue
            group = wait_in[rank][position[rank]]
            if not begun[rank]:
                moved = begun[rank] = True
                for kind, stage, i in group:
                    if not (0 <= stage < len(at) and at[stage] == rank and 0 <= i < schedule.micro_batches):
                        return "not its own"
                    if kind in COMPUTATIONS:
                        near = stage - 1 if kind == "forward" else stage + 1
                        if 0 <= near < len(at) and (kind, near, i) not in has[rank]:
                            return "nothing to compute from"
                        if kind == "backward" and ("forward", stage, i) not in has[rank]:
                            return "no forward before it"
                        if (kind, stage, i) in has[rank]:
                            return "computed twice"
                        has[rank].append((kind, stage, i))
                        continue
                    there = stage + (1 if kind in ("send activation", "receive gradient") else -1)
                    if not 0 <= there < len(at) or at[there] == rank:
                        return "a message to nobody"
                    content = ("forward" if kind.endswith("activation") else "backward", None, i)
                    if kind in SENDS:
                        content = (content[0], stage, i)
                        if content not in has[rank]:
                            return "nothing to send"
                        sends.setdefault((rank, at[there]), []).append((rank, content))
                    else:
                        receives.setdefault((at[there], rank), []).append((rank, (content[0], there, i)))
            for pair in sends:
                while met.get(pair, 0) < min(len(sends[pair]), len(receives.get(pair, []))):
                    number = met[pair] = met.get(pair, 0) + 1
                    sent, wanted = sends[pair][number - 1][1], receives[pair][number - 1][1]
                    if sent != wanted:
                        return "another message than expected"
                    if sent in has[pair[1]]:
                        return "received twice"
                    has[pair[1]].append(sent)
            open_sends = [who for pair, all_ in sends.items() for who, _ in all_[met.get(pair, 0) :]]
            open_receives = [who for pair, all_ in receives.items() for who, _ in all_[met.get(pair, 0) :]]
            if rank not in open_sends + open_receives:
                position[rank], begun[rank], moved = position[rank] + 1, False, True
        if not moved:
            break
    if any(position[rank] < len(wait_in[rank]) for rank in ranks):
        return "stuck"
    kinds = COMPUTATIONS if any(a.kind == "backward" for actions in schedule.actions for a in actions) else ("forward",)
    for stage, rank in enumerate(at):
        for i in range(schedule.micro_batches):
            if any((kind, stage, i) not in has[rank] for kind in kinds):
                return "not computed"
    return None


def changed(schedule: Schedule, chance: random.Random) -> Schedule:
    """With one action dropped, doubled, swapped, moved, moved to another rank, or made another."""
    lists = [list(actions) for actions in schedule.actions]
    rank = chance.randrange(len(lists))
    other = chance.randrange(len(lists))
    mine = lists[rank]
    if not mine:
        return schedule
    here, there = chance.randrange(len(mine)), chance.randrange(len(mine))
    what = chance.choice(["drop", "double", "swap", "neighbours", "move", "other rank", "another"])
    if what == "drop":
        del mine[here]
    elif what == "double":
        mine.insert(there, mine[here])
    elif what == "swap":
        mine[here], mine[there] = mine[there], mine[here]
    elif what == "neighbours":
        mine[here - 1], mine[here] = mine[here], mine[here - 1]
    elif what == "move":
        mine.insert(there, mine.pop(here))
    elif what == "other rank":
        lists[other].insert(chance.randint(0, len(lists[other])), mine.pop(here))
    else:
        mine[here] = mine[here]._replace(
            **chance.choice([{"stage": mine[here].stage + 1}, {"micro_batch": mine[there].micro_batch}])
        )
    return replace(schedule, actions=tuple(map(tuple, lists)))


@pytest.mark.parametrize("together", [True, False], ids=["messages together", "one by one"])
def test_a_schedule_is_refused_exactly_if_ranks_that_follow_it_go_wrong(together):
    chance = random.Random(15)
    seen: dict[str | None, int] = {}
    right = [s for sizes in [(1, 2), (2, 2), (2, 4), (3, 4), (4, 3), (3, 6)] for s in made_by(*sizes)]
    for _ in range(4000):
        schedule = chance.choice(right)
        for _ in range(chance.choice([1, 1, 1, 2, 3])):
            schedule = changed(schedule, chance)
        wrong = went_wrong(schedule, together)
        seen[wrong] = seen.get(wrong, 0) + 1
        try:
            check_schedule(schedule, together=together)
            refused = None
        except ValueError as error:
            refused = str(error)
        assert (wrong is None) == (refused is None), (wrong, refused, schedule.actions)
    assert min(seen[None], seen["stuck"], seen["another message than expected"]) > 50, seen


# ---- what it says


def by_hand(*lists: str, stages_of_ranks: list[int] | None = None) -> Schedule:
    """From text with messages: ">" before what is sent, "<" before what is received."""
    kinds = {"F": "forward", "B": "backward", ">F": "send activation", "<F": "receive activation"}
    kinds |= {">B": "send gradient", "<B": "receive gradient"}
    actions = []
    for rank, text in enumerate(lists):
        words = [(word.split("@") + [str(rank)])[:2] for word in text.split()]
        actions.append(tuple(Action(kinds[word[:-1]], int(stage), int(word[-1])) for word, stage in words))
    count = max(one.micro_batch for own in actions for one in own) + 1
    return Schedule("by hand", count, tuple(stages_of_ranks or range(len(lists))), tuple(actions))


RIGHT = ("F0 >F0 F1 >F1 <B0 B0 <B1 B1", "<F0 F0 B0 >B0 <F1 F1 B1 >B1")


def test_a_schedule_by_hand_is_accepted():
    check_schedule(by_hand(*RIGHT))


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (
            (RIGHT[0].replace(" >F1", ""), RIGHT[1]),
            "expected send F1 of stage 0 on rank 0, found none (1 of its 8 actions",
        ),
        ((RIGHT[0] + " B0", RIGHT[1]), "expected each action once, found B0 of stage 0 2 times on rank 0"),
        ((RIGHT[0] + " >B0", RIGHT[1]), "what rank 0 has to do with stages [0], found send B0 of stage 0; take it out"),
        ((RIGHT[0], RIGHT[1] + " F0@0"), "what rank 1 has to do with stages [1], found F0 of stage 0"),
        (("B0 >F0 F0 <B0", "<F0 F0 B0 >B0"), "expected F0 of stage 0 before B0 of stage 0 on rank 0, found it after"),
        (("F0 >F0 B0 <B0", "<F0 F0 B0 >B0"), "expected receive B0 of stage 0 before B0 of stage 0 on rank 0"),
        (("F0 >F0 <B0 B0", "F0 <F0 B0 >B0"), "expected receive F0 of stage 1 before F0 of stage 1 on rank 1"),
        ((">F0 F0 <B0 B0", "<F0 F0 B0 >B0"), "expected F0 of stage 0 before send F0 of stage 0 on rank 0"),
        (("F0 >F0 <B0 B0", "<F0 F0 >B0 B0"), "expected B0 of stage 1 before send B0 of stage 1 on rank 1"),
        (
            ("F0 F1 >F0 >F1 <B0 B0 <B1 B1", "<F1 <F0 F0 B0 >B0 F1 B1 >B1"),
            "expected messages from rank 0 to rank 1 in one order on both, found send F0 of stage 0 on rank 0 where "
            "rank 1 has receive F1 of stage 1",
        ),
    ],
)
def test_what_is_wrong_is_said_with_rank_and_action(lists, message):
    with pytest.raises(ValueError) as caught:
        check_schedule(by_hand(*lists))
    assert message in str(caught.value)


def test_activations_and_gradients_on_one_link_keep_one_order():
    """Two ranks with two stages each: from rank 0 to rank 1 go activations of 0 and 2, and gradients of 2."""
    schedule = interleaved(2, 2, 4)
    sender = [one for one in schedule.actions[0] if one.kind in SENDS]
    assert {one.kind for one in sender} == {"send activation", "send gradient"}
    lists = [list(actions) for actions in schedule.actions]
    receives = [i for i, one in enumerate(lists[1]) if one.kind.startswith("receive")]
    a, b = next((a, b) for a, b in itertools.pairwise(receives) if lists[1][a].kind != lists[1][b].kind)
    lists[1].insert(a, lists[1].pop(b))
    with pytest.raises(ValueError, match="expected messages from rank 0 to rank 1 in one order on both, found send"):
        check_schedule(replace(schedule, actions=tuple(map(tuple, lists))))


def test_two_neighbours_that_each_send_before_they_receive_are_refused_with_the_circle():
    """Rank 1 has F1 before it sends B0; rank 0 sends F2, and computes F3, before it receives that."""
    first = "F0 >F0 F1 >F1 F2 >F2 F3 <B0 B0 >F3 <B1 B1 <B2 B2 <B3 B3"
    for last, refused in (("<F0 F0 B0 <F1 F1 >B0", True), ("<F0 F0 B0 <F1 F1 >B0 <F2", False)):
        rest = " B1 >B1 <F2 F2 B2 >B2 <F3 F3 B3 >B3" if refused else " B1 >B1 F2 B2 >B2 <F3 F3 B3 >B3"
        schedule = by_hand(first, last + rest)
        if not refused:
            check_schedule(schedule)
            continue
        with pytest.raises(ValueError) as caught:
            check_schedule(schedule)
        assert str(caught.value) == (
            "expected ranks that all come to their end, found some that wait for each other: "
            "rank 0 → send F2 of stage 0 → rank 1 → send B0 of stage 1 → rank 0; "
            "give these messages one order on all ranks, or let them stand side by side"
        )


def received_late(schedule: Schedule) -> Schedule:
    """Each receive right before the computation that needs it, as one would write it down first."""
    lists = []
    for actions in schedule.actions:
        mine = [one for one in actions if not one.kind.startswith("receive")]
        for receive in (one for one in actions if one.kind.startswith("receive")):
            needs_it = Action("forward" if receive.kind == "receive activation" else "backward", *receive[1:])
            mine.insert(mine.index(needs_it), receive)
        lists.append(tuple(mine))
    return replace(schedule, actions=tuple(lists))


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_1f1b_with_late_receives_ends_only_because_neighbours_exchange_at_once(stages):
    late = received_late(one_forward_one_backward(stages, 2 * stages))
    check_schedule(late)
    with pytest.raises(ValueError) as caught:
        check_schedule(late, together=False)
    a, b = stages - 2, stages - 1
    circle = f"rank {a} → send F1 of stage {a} → rank {b} → send B0 of stage {b} → rank {a}"
    assert str(caught.value).endswith(f"{circle}; give these messages one order on all ranks")


def test_a_circle_of_three_ranks_is_named_from_its_lowest():
    """Rank 0 has the first and the last of four stages, so a circle may lead all around."""
    turns = "F0 F1 F2 F3"
    around = [f"{turns} F0@3 F1@3 F2@3 F3@3", turns, turns]
    with pytest.raises(ValueError) as caught:
        check_schedule(received_late(with_messages("around", around)), together=False)
    assert "rank 0 → send F2 of stage 0 → rank 1 → send F1 of stage 1 → rank 2 → send F0 of stage 2 → rank 0;" in str(
        caught.value
    )


def test_the_circle_is_named_from_its_lowest_rank_though_another_waits_for_it():
    """Stage 1 is on rank 2, stage 2 on rank 1: rank 0 waits for rank 2, which is in a circle with rank 1."""
    turned = received_late(
        with_messages("turned", ["F0 F1 F2 B0 B1 B2", "F0@2 B0@2 F1@2 B1@2 F2@2 B2@2", "F0@1 F1@1 B0@1 F2@1 B1@1 B2@1"])
    )
    with pytest.raises(ValueError) as caught:
        check_schedule(turned, together=False)
    assert ": rank 1 → send B0 of stage 2 → rank 2 → send F1 of stage 1 → rank 1;" in str(caught.value)
