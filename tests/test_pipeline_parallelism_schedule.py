"""Schedules: in PyTorch's orders, complete, and refused exactly when ranks that follow them would go wrong."""

from __future__ import annotations

import collections
import functools
import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from memlab import pipeline_parallelism as pp
from memlab.pipeline_parallelism.checking import expected_actions
from memlab.pipeline_parallelism.schedule import COMPUTATIONS, SENDS
from tests.harness import refusals, refused

SIZES = [(stages, micro_batches) for stages in range(1, 6) for micro_batches in (1, 2, 3, 4, 8)]


def made_by(stages: int, micro_batches: int) -> list[pp.Schedule]:
    """Every schedule there is of these sizes."""
    made = [make(stages, micro_batches) for make in (pp.gpipe, pp.one_forward_one_backward)]
    if micro_batches % stages == 0:
        made += [pp.interleaved(stages, chunks, micro_batches) for chunks in (1, 2, 3)]
    return made


def computations(schedule: pp.Schedule, rank: int) -> list[tuple[str, int, int]]:
    return [tuple(action) for action in schedule.actions[rank] if action.kind in COMPUTATIONS]


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


def test_gpipe_and_1f1b_are_in_the_order_of_pytorchs():
    for stages, micro_batches in SIZES:
        mine = pp.gpipe(stages, micro_batches)
        theirs = torch_orders("ScheduleGPipe", stages, micro_batches)
        assert [computations(mine, rank) for rank in range(stages)] == theirs
        if micro_batches < stages:  # theirs lists forwards of no micro-batch then, when asked for its order
            continue
        mine = pp.one_forward_one_backward(stages, micro_batches)
        *theirs, last = torch_orders("Schedule1F1B", stages, micro_batches)
        assert [computations(mine, rank) for rank in range(stages - 1)] == theirs
        turns = [(kind, stages - 1, i) for i in range(micro_batches) for kind in COMPUTATIONS]
        assert computations(mine, stages - 1) == turns
        assert [kind for kind, _, _ in last] == [kind for kind, _, _ in turns]  # theirs begins to count at F1 here


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize(("ranks", "rounds"), [(1, 3), (2, 1), (3, 2), (4, 2)])
def test_interleaved_is_in_the_order_of_pytorchs_and_begins_with_as_many_forwards(ranks, rounds, chunks):
    mine = pp.interleaved(ranks, chunks, ranks * rounds)
    theirs = torch_orders("ScheduleInterleaved1F1B", ranks, ranks * rounds, chunks)
    for rank in range(ranks):
        assert computations(mine, rank) == theirs[rank]
        before = [kind for kind, _, _ in theirs[rank]].index("backward")
        assert before == min(2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1, chunks * ranks * rounds)


def test_every_schedule_of_every_size_is_right():
    for stages, micro_batches in SIZES:
        for schedule in made_by(stages, micro_batches):
            pp.check_schedule(schedule)
            assert schedule.micro_batches == micro_batches and schedule.ranks == stages
            assert [set(actions) for actions in schedule.actions] == expected_actions(schedule)


def test_1f1b_with_fewer_micro_batches_than_stages_begins_with_all_forwards():
    lines = str(pp.one_forward_one_backward(4, 2)).splitlines()
    assert [line.split("  ", 1)[1] for line in lines[1:]] == ["F0 F1 B0 B1"] * 3 + ["F0 B0 F1 B1"]


def test_what_a_schedule_prints_is_read_back_as_the_same_schedule():
    turned = pp.with_messages("last stage first", ["F0@1 B0@1", "F0@0 B0@0"])
    for schedule in (*made_by(4, 8), *made_by(2, 2), turned):
        text = [line.split("  ", 1)[1] for line in str(schedule).splitlines()[1:]]
        assert pp.with_messages(schedule.name, text) == schedule


def follow(schedule: pp.Schedule, rank: int, has: list[set], links: dict) -> Iterator[None]:
    """One rank goes through its list, and yields where it waits: in its messages, until they have met.

    has: what each rank has computed or received. links: (from, to) → what was sent there, and what is expected.
    Between two ranks, one way, the n-th send meets the n-th receive. Raises ValueError for what goes wrong.
    """
    at = schedule.ranks_of_stages
    for alone, run in itertools.groupby(schedule.actions[rank], lambda action: action.kind in COMPUTATIONS):
        run = list(run)
        for group in [[action] for action in run] if alone else [run]:
            met = []
            for kind, stage, i in group:
                if kind in COMPUTATIONS:
                    near = stage - 1 if kind == "forward" else stage + 1
                    needs = {(kind, near, i)} if 0 <= near < len(at) else set()
                    needs |= {("forward", stage, i)} if kind == "backward" else set()
                    if needs - has[rank]:
                        raise ValueError("nothing to compute from")
                    has[rank].add((kind, stage, i))
                    continue
                there = stage + (1 if kind in ("send activation", "receive gradient") else -1)
                sends, made = kind in SENDS, "forward" if kind.endswith("activation") else "backward"
                link = links[(rank, at[there]) if sends else (at[there], rank)]
                link[not sends].append((made, stage if sends else there, i))
                if sends and link[0][-1] not in has[rank]:
                    raise ValueError("nothing to send")
                met.append((link, len(link[not sends]) - 1))
            while any(len(one) <= number for link, number in met for one in link):
                yield
            for (sent, expected), number in met:
                if sent[number] != expected[number]:
                    raise ValueError("another message than expected")
                has[rank].add(sent[number])


def went_wrong(schedule: pp.Schedule) -> str | None:
    """Play all ranks with what each message has inside. None if all ends well."""
    has, links = [set() for _ in schedule.actions], collections.defaultdict(lambda: ([], []))
    playing = [follow(schedule, rank, has, links) for rank in range(schedule.ranks)]
    try:
        for _ in range(sum(map(len, schedule.actions)) + 1):  # in each round one goes on, or none can
            playing = [one for one in playing if next(one, "end") != "end"]
    except ValueError as wrong:
        return str(wrong)
    return "stuck" if playing else None


def moved(schedule: pp.Schedule, chance: random.Random) -> pp.Schedule:
    """With one action at another place in its rank's list, mostly a near one."""
    lists = [list(actions) for actions in schedule.actions]
    mine = chance.choice(lists)
    here = chance.randrange(len(mine))
    mine.insert(chance.choice([here + 1, max(here - 1, 0), chance.randrange(len(mine))]), mine.pop(here))
    return replace(schedule, actions=tuple(map(tuple, lists)))


def test_a_complete_schedule_is_refused_exactly_if_ranks_that_follow_it_go_wrong():
    chance = random.Random(15)
    seen: dict[str | None, int] = {}
    right = [s for sizes in [(1, 2), (2, 2), (2, 4), (3, 4), (4, 3), (3, 6)] for s in made_by(*sizes)]
    for _ in range(1500):
        schedule = chance.choice(right)
        for _ in range(chance.choice([1, 1, 1, 2, 3])):
            schedule = moved(schedule, chance)
        wrong = went_wrong(schedule)
        seen[wrong] = seen.get(wrong, 0) + 1
        try:
            pp.check_schedule(schedule)
            refused = None
        except ValueError as error:
            refused = str(error)
        assert (wrong is None) == (refused is None), (wrong, refused, schedule.actions)
    assert min(seen[None], seen["stuck"], seen["another message than expected"]) > 20, seen


def check(*lists: str) -> None:
    """A schedule from text with messages: ">" before what is sent, "<" before what is received."""
    kinds = {"F": "forward", "B": "backward", ">F": "send activation", "<F": "receive activation"}
    kinds |= {">B": "send gradient", "<B": "receive gradient"}
    turn = lambda word, rank: pp.Action(kinds[word[:-1]], rank, int(word[-1]))  # noqa: E731
    actions = [tuple(turn(word, rank) for word in text.split()) for rank, text in enumerate(lists)]
    count = max(one.micro_batch for own in actions for one in own) + 1
    pp.check_schedule(pp.Schedule("by hand", count, tuple(range(len(lists))), tuple(actions)))


RIGHT = ("F0 >F0 F1 >F1 <B0 B0 <B1 B1", "<F0 F0 B0 >B0 <F1 F1 B1 >B1")


SAID = {
    "expected send F1 of stage 0 on rank 0, found none (1 of its 8 actions": (RIGHT[0].replace(" >F1", ""), RIGHT[1]),
    "expected each action once, found B0 of stage 0 2 times on rank 0": (RIGHT[0] + " B0", RIGHT[1]),
    "what rank 0 has to do with stages [0], found send B0 of stage 0; take it out": (RIGHT[0] + " >B0", RIGHT[1]),
    "expected F0 of stage 0 before B0 of stage 0 on rank 0, found it after": ("B0 >F0 F0 <B0", "<F0 F0 B0 >B0"),
    "expected receive F0 of stage 1 before F0 of stage 1 on rank 1": ("F0 >F0 <B0 B0", "F0 <F0 B0 >B0"),
    "expected B0 of stage 1 before send B0 of stage 1 on rank 1": ("F0 >F0 <B0 B0", "<F0 F0 >B0 B0"),
    "messages from rank 0 to rank 1 in one order on both, found send F0 of stage 0 on rank 0 where rank 1 has": (
        "F0 F1 >F0 >F1 <B0 B0 <B1 B1",
        "<F1 <F0 F0 B0 >B0 F1 B1 >B1",
    ),
    # rank 1 has F1 before it sends B0; rank 0 sends F2, and computes F3, before it receives that
    "some that wait for each other: rank 0 → send F2 of stage 0 → rank 1 → send B0 of stage 1 → rank 0; give these "
    "messages one order on all ranks, or let them stand side by side": (
        "F0 >F0 F1 >F1 F2 >F2 F3 <B0 B0 >F3 <B1 B1 <B2 B2 <B3 B3",
        "<F0 F0 B0 <F1 F1 >B0 B1 >B1 <F2 F2 B2 >B2 <F3 F3 B3 >B3",
    ),
}


@refusals({words: (functools.partial(check, *lists), ValueError, words) for words, lists in SAID.items()})
def test_what_is_wrong_is_said_with_rank_and_action(call, error, words):
    refused(call, error, words)
