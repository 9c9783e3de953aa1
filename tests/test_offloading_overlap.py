"""Chapter 09's formulas and its simulated step: against counted FLOPs, metered bytes, all sets, cases by hand."""

import itertools
import math
import random

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from memlab.book.workloads import GPT
from memlab.memory_arithmetic import Transformer
from memlab.memory_hierarchy import OpCounter
from memlab.memory_timeline import Meter, imagine
from memlab.offloading import (
    HOST_BYTES,
    LINKS,
    POLICIES,
    Held,
    block_bytes,
    block_flops,
    block_overlap,
    chosen,
    held_in,
    hidden_tokens,
    hidden_width,
    host_step,
    ordered,
    plan_sends,
    simulate,
    transfer_seconds,
)
from tests.harness import refusals, refused
from tests.tiers import pairs

SIZES = {"width": 256, "heads": 2, "vocabulary": 64, "context": 128}
BATCH, TOKENS = 2, 128


@pytest.fixture
def half():
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


def imagined_step(layers, dropout=0.0, watch=None):
    """A step of a GPT on an imagined H100, under a watcher made of the model and its batch."""
    with imagine("H100-80GB"):
        model = GPT(layers=layers, dropout=dropout, **SIZES)
        x, y = (torch.randint(64, (BATCH, TOKENS)) for _ in "xy")
        with watch(model, (x, y)) as seen:
            model(x, y).backward()
    return seen


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_blocks_flops_are_those_that_pytorch_counts(half, phase):
    def counted(layers):
        ops = imagined_step(layers, watch=lambda *_: OpCounter()).ops
        products = ("mm", "addmm", "bmm", "_scaled_dot_product")
        return sum(op.flops for op in ops if op.phase == phase and op.name.startswith(products))

    model = Transformer(layers=2, **SIZES)
    assert block_flops(model, BATCH, TOKENS, phase) == counted(2) - counted(1)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_blocks_bytes_are_those_that_the_meter_sees_kept_for_backward(half, dropout):
    def metered(layers):
        timeline = imagined_step(layers, dropout, lambda model, xy: Meter(model, inputs=xy)).timeline
        turn = next(span.start for span in timeline.phases if span.phase == "backward")
        alive = timeline.on("imagined H100-80GB").alive(turn - 1)
        return sum(storage.nbytes for storage in alive if storage.category == "activation")

    model = Transformer(layers=3, **SIZES)
    assert block_bytes(model, BATCH, TOKENS, dropout=dropout) == metered(3) - metered(2)
    assert block_bytes(model, BATCH, TOKENS, inputs_only=True, dropout=dropout) == 2 * BATCH * TOKENS * 256


@pairs("rate, link, inputs_only", [50e12, 100e12, 400e12], LINKS, [False, True])
def test_the_width_of_the_formula_is_where_exact_bytes_and_flops_cross(rate, link, inputs_only):
    tokens, speed = 512, LINKS[link]

    def hidden(width):
        model = Transformer(4, width, width // 128, vocabulary=64, context=tokens)
        return block_overlap(model, 1, tokens, rate, speed, inputs_only=inputs_only, dropout=0.1).hidden

    kept = 2 if inputs_only else 34 + 4 / 128  # log-sums of the attention, a number for each head of 128
    width = hidden_width(rate, speed, bytes_per_width=kept, tokens=tokens)
    below, above = (128 * round_(width / 128 + by) for round_, by in ((math.floor, -0.05), (math.ceil, 0.05)))
    assert hidden(above + 128)  # the statistics, 16 bytes a token, weigh where widths are small
    assert below < 128 or not hidden(below)


def test_longer_texts_are_hidden_at_smaller_widths_and_at_last_at_any():
    widths = [hidden_width(400e12, 55e9, tokens=tokens) for tokens in (0, 2048, 8192, 2**16)]
    assert widths == sorted(widths, reverse=True) and widths[-1] == 0
    assert widths[0] == pytest.approx(34 * 400e12 / (24 * 55e9))


@pytest.mark.parametrize(("moved", "work"), [(2, 2), (2, 4), (HOST_BYTES, 6)])
def test_with_as_many_tokens_as_the_formula_says_arithmetic_and_transfer_last_equally_long(moved, work):
    tokens = hidden_tokens(400e12, 55e9, moved, work)
    assert work * tokens / 400e12 == pytest.approx(transfer_seconds(moved, 55e9))


def test_a_step_on_the_host_is_6_flops_a_token_and_28_bytes_and_2_bytes_each_way_a_parameter():
    step = host_step(10**9, 1000, 400e12, 55e9, 200e9)
    assert step.forward_seconds + step.backward_seconds == pytest.approx(6e9 * 1000 / 400e12)
    assert step.update_seconds == pytest.approx(0.14)
    assert step.gradients_seconds == step.weights_seconds == pytest.approx(2e9 / 55e9)


NONSENSE = {
    "no bandwidth": lambda: transfer_seconds(1, 0),
    "NaN": lambda: hidden_tokens(1, math.nan),
    "another phase": lambda: hidden_width(1, 1, phase="optimizer"),
    "another direction": lambda: block_flops(Transformer(layers=2, **SIZES), 1, 1, "sideways"),
    "no link": lambda: simulate([], [], 0),
    "what stays": lambda: simulate([Held(1, 0, 1)], [0], 1),
    "another policy": lambda: ordered([], "by colour"),
    "no pass": lambda: held_in(metered_sum()),
}


@refusals({name: (call, ValueError, "expected …found") for name, call in NONSENSE.items()})
def test_what_makes_no_sense_is_refused_in_a_sentence(call, error, words):
    refused(call, error, words)


def metered_sum():
    with Meter() as meter:
        torch.ones(3) + 1
    return meter.timeline


def chain(sizes, seconds=1.0):
    """Layers one after another, forward then backward twice as long: what is born first is needed last."""
    n, turn = len(sizes), len(sizes) * seconds
    return [
        Held(
            nbytes,
            born=i * seconds,
            leaves=(i + 1) * seconds,
            needed=turn + 2 * (n - 1 - i) * seconds,
            freed=turn + 2 * (n - i) * seconds,
        )
        for i, nbytes in enumerate(sizes)
    ]


def any_order(seed, n=8):
    """Tensors of all sizes that leave, are needed and die in any order; and two that stay."""
    rng = random.Random(seed)
    found = [Held(50, 0.0, 24.0), Held(80, 7.0, 9.0)]
    for _ in range(n):
        born, needed = rng.uniform(0, 8), rng.uniform(8, 22)
        found.append(Held(rng.randint(1, 400), born, rng.uniform(needed, 24), rng.uniform(born, 8), needed))
    return found


def may_leave(tensors):
    return ordered(tensors, "first come")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sent", [[], [2, 3, 5, 8]])
def test_over_an_endless_link_or_with_nothing_sent_what_is_used_is_there_and_nothing_waits(seed, sent):
    tensors = any_order(seed)
    run = simulate(tensors, sent, 1e15)
    assert run.step_seconds == pytest.approx(max(t.freed for t in tensors)) and run.stall_seconds < 1e-9
    spans = [(t.nbytes, t.born, t.freed) for i, t in enumerate(tensors) if i not in sent]
    for i in sent:
        t = tensors[i]
        spans += [(t.nbytes, t.born, t.leaves), (t.nbytes, t.needed - 1e-9, t.freed)]
    assert run.peak_bytes == max(sum(n for n, start, stop in spans if start <= now <= stop) for _, now, _ in spans)
    assert sent or not (run.transfers or run.stalls or run.sent_bytes or run.stall_seconds)


def test_a_tensor_that_is_needed_at_once_costs_both_ways_whole():
    run = simulate([Held(50, 0.0, 3.0, leaves=1.0, needed=1.0)], [0], 10.0)
    assert run.step_seconds == 3 + 5 + 5 and run.stalls == [(1.0, 11.0)]
    assert [(t.way, t.start, t.stop) for t in run.transfers] == [("down", 1.0, 6.0), ("up", 6.0, 11.0)]
    assert run.curve == [(0.0, 50), (6.0, 0), (6.0, 50), (13.0, 0)]


def test_three_layers_by_hand():
    tensors = chain([10, 10, 10])  # forward until 3; needed at 7, 5, 3; freed at 9, 7, 5
    run = simulate(tensors, [0, 1], 10.0)  # a second for each copy
    found = {(t.tensor, t.way): (t.start, t.stop) for t in run.transfers}
    assert found == {(0, "down"): (1, 2), (1, "down"): (2, 3), (1, "up"): (4, 5), (0, "up"): (6, 7)}
    assert run.step_seconds == 9 and run.peak_bytes == 20


@pairs("seed, limit", range(8), [None, 900])
def test_a_link_carries_one_tensor_at_a_time_and_none_is_used_while_away(seed, limit):
    tensors = any_order(seed)
    sent = random.Random(seed).sample(may_leave(tensors), 6)
    run = simulate(tensors, sent, 100.0, limit_bytes=limit)
    for way in ("down", "up"):
        mine = [t for t in run.transfers if t.way == way]
        assert sorted(t.tensor for t in mine) == sorted(sent)
        for one, after in zip(mine, mine[1:], strict=False):
            assert one.stop <= after.start + 1e-12
        for t in mine:
            assert t.stop - t.start == pytest.approx(tensors[t.tensor].nbytes / 100)
    down, up = ({t.tensor: t for t in run.transfers if t.way == way} for way in ("down", "up"))

    def real(clock):  # the moment at which the arithmetic gets past this second of its own
        waited = 0.0
        for start, stop in run.stalls:
            if start - waited <= clock + 1e-9:
                waited += stop - start
        return clock + waited

    for i in sent:
        assert down[i].stop <= up[i].start and up[i].stop <= real(tensors[i].needed) + 1e-9
    assert run.stall_seconds == pytest.approx(sum(stop - start for start, stop in run.stalls))
    assert run.step_seconds == pytest.approx(max(t.freed for t in tensors) + run.stall_seconds)
    assert run.peak_bytes == max(held for _, held in run.curve) and run.curve[-1][1] == 0


def test_under_a_limit_what_is_born_waits_until_what_leaves_has_left():
    tensors = chain([10, 10, 10])
    free, held_up = (simulate(tensors, [0], 4.0, limit_bytes=limit) for limit in (None, 20))
    assert (free.peak_bytes, free.stall_seconds) == (30, 0)  # gone at 3.5; at 2 the third is born
    # The third waits from 2 to 3.5. Room to come back is there when it is freed, half a second after it was asked for.
    assert (held_up.peak_bytes, held_up.stalls) == (20, [(2, 3.5), (8.5, 9)])
    nothing_leaves = simulate(tensors, [], 4.0, limit_bytes=20)
    assert (nothing_leaves.peak_bytes, nothing_leaves.stall_seconds) == (30, 0)


@pytest.mark.parametrize("seed", range(6))
def test_what_has_left_in_time_comes_back_in_time_if_the_link_can_and_as_late_as_it_can(seed):
    rng = random.Random(seed)
    tensors = chain([rng.randint(10, 100) for _ in range(10)])
    run = simulate(tensors, may_leave(tensors)[:7], 120.0)  # no copy takes longer than the layer beside it
    assert all(t.stop <= 10 for t in run.transfers if t.way == "down")  # the turn: backward begins
    assert run.stall_seconds == 0
    later = math.inf
    for t in reversed([t for t in run.transfers if t.way == "up"]):
        assert t.stop == pytest.approx(min(tensors[t.tensor].needed, later))
        later = t.start


def test_over_a_link_that_cannot_keep_up_what_has_left_comes_back_while_the_rest_still_leaves():
    run = simulate(chain([100] * 10), range(10), 25.0)  # four seconds a copy, one a layer; ten to the turn
    down = max(t.stop for t in run.transfers if t.way == "down")
    assert min(t.start for t in run.transfers if t.way == "up") == 21 < down == 41  # when the fifth has left


def test_of_what_was_asked_for_at_one_moment_the_first_to_be_needed_comes_first():
    tensors = [Held(20, 0, 12, leaves=1, needed=11), Held(20, 0, 12, 2, 10.5), Held(20, 0, 12, 3, 10)]
    run = simulate(tensors, [0, 1, 2], 10.0)
    assert [t.tensor for t in run.transfers if t.way == "up"] == [2, 1, 0]
    assert simulate(tensors, [1, 1, 0, 1], 10.0) == simulate(tensors, [0, 1], 10.0)


def test_where_a_step_has_two_losses_nothing_comes_back_before_it_has_left():
    tensors = chain([100] * 4) + [Held(t.nbytes, *(12.0 + seconds for seconds in t[1:5])) for t in chain([100] * 6)]
    run = simulate(tensors, range(10), 150.0)
    down, up = ({t.tensor: t for t in run.transfers if t.way == way} for way in ("down", "up"))
    assert all(down[i].stop <= up[i].start and down[i].start >= tensors[i].leaves for i in range(10))


def test_what_the_arithmetic_waits_for_comes_whether_it_fits_or_not():
    run = simulate(chain([10, 10, 10]), [0, 1], 10.0, limit_bytes=1)
    assert run.step_seconds == 9 + 2  # each of the two is sent for when it is needed
    assert [t.tensor for t in run.transfers if t.way == "up"] == [1, 0]


def best_sends(tensors, limit, bytes_per_second):
    """The fastest step within the limit over every set of the tensors that may leave; None if none fits."""
    may, runs = may_leave(tensors), []
    for count in range(len(may) + 1):
        for sent in itertools.combinations(may, count):
            run = simulate(tensors, sent, bytes_per_second, limit_bytes=limit)
            if run.peak_bytes <= limit:
                runs.append((round(run.step_seconds, 12), run.sent_bytes, list(sent), run))
    return min(runs, key=lambda entry: entry[:2])[2:] if runs else None


def test_in_a_chain_that_grows_the_factor_of_bytes_prefers_what_comes_late_and_so_costs_time():
    tensors = chain([10, 20, 40, 80, 160, 80, 40, 20])
    limit = simulate(tensors, [], 1.0).peak_bytes - 60
    steps = {policy: plan_sends(tensors, limit, policy, 15.0)[1].step_seconds for policy in POLICIES}
    assert steps["first come"] == best_sends(tensors, limit, 15.0)[1].step_seconds == 24
    assert steps["idle time × bytes"] > 24 and steps["largest first"] > 24


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "make", [any_order, lambda seed: chain([random.Random(seed).randint(1, 99) for _ in range(8)])]
)
def test_no_policy_beats_the_best_of_all_sets_and_all_keep_the_limit(make, seed):
    tensors = make(seed)
    most, least = (simulate(tensors, sent, 1e9).peak_bytes for sent in ([], may_leave(tensors)))
    limit = (most + least) // 2
    best = best_sends(tensors, limit, 60.0)
    for policy in POLICIES:
        found = plan_sends(tensors, limit, policy, 60.0)
        if found is not None:
            assert found[1].peak_bytes <= limit
            assert best[1].step_seconds <= found[1].step_seconds + 1e-9
    assert plan_sends(tensors, 0, "first come", 60.0) is None is best_sends(tensors, 0, 60.0)


def test_a_limit_is_kept_if_the_peak_is_just_as_high_and_all_may_have_to_go_for_it():
    tensors = [Held(50, 0, 9, leaves=1, needed=5), Held(60, 2, 4)]
    assert plan_sends(tensors, 60, "first come", 50.0)[0] == best_sends(tensors, 60, 50.0)[0] == [0]
    assert plan_sends(tensors, 110, "first come", 50.0)[0] == []
    assert plan_sends(tensors, 59, "first come", 50.0) is None


def test_chosen_is_the_head_of_the_order_and_never_more_than_was_asked_for():
    tensors = chain([10, 20, 30])
    found = [chosen(tensors, "first come", nbytes) for nbytes in (9, 10, 30, 59, 60)]
    assert found == [[], [0], [0, 1], [0, 1], [0, 1, 2]]
    assert chosen(tensors, "largest first", 55) == [2, 1]


@pytest.fixture(scope="module")
def metered():
    torch.manual_seed(0)
    model = GPT(layers=3, width=64, heads=2, context=32, vocabulary=64)
    x, y = (torch.randint(64, (2, 32)) for _ in "xy")
    optimizer = torch.optim.AdamW(model.parameters())
    owned = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers(), x, y)}
    saved = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in owned:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    with Meter(model, optimizer, inputs=(x, y)) as meter:
        with saved_tensors_hooks(note, lambda tensor: tensor):
            loss = model(x, y)
        loss.backward()
        optimizer.step()
    return meter.timeline, sorted(saved.values())


def test_what_may_leave_of_a_metered_step_is_what_autograd_saved(metered):
    timeline, saved = metered
    may = sorted(t.nbytes for t in held_in(timeline) if t.needed is not None)
    scalar = [nbytes for nbytes in saved if nbytes not in may]
    assert [n for n in saved if n > 8] == [n for n in may if n > 8]
    assert all(nbytes <= 8 for nbytes in scalar)


def test_a_metered_step_with_nothing_sent_peaks_where_the_timeline_does(metered):
    timeline, _ = metered
    end = max(span.stop for span in timeline.phases if span.phase == "backward")
    assert simulate(held_in(timeline), [], 1.0).peak_bytes == max(timeline.totals[: end + 1])
    assert simulate(held_in(timeline, 5.0, 7.0), [], 1.0).step_seconds == pytest.approx(12.0)


def test_a_tensor_leaves_when_the_next_is_born_and_is_needed_just_before_it_is_freed(metered):
    timeline, _ = metered
    turn = next(span.start for span in timeline.phases if span.phase == "backward")
    births = [i for i in range(1, turn) if timeline.events[i - 1].delta > 0]
    end = max(span.stop for span in timeline.phases if span.phase == "backward")
    may = [t for t in held_in(timeline, turn, end - turn + 1) if t.needed is not None]
    turn += 1  # a second an event, and one more for the turn
    for t in may:
        assert t.leaves == min((born for born in births if born > t.born), default=turn)
        assert t.needed == pytest.approx(max(turn, t.freed - 1))
    assert max(t.leaves for t in may) == turn


def test_the_least_bytes_that_may_leave_leave_and_what_was_held_by_a_variable_alone_stays(metered):
    size = 2 * 32 * 64 * 4
    may = [t.nbytes for t in held_in(metered[0], min_bytes=size) if t.needed is not None]
    assert min(may) == size
    weight = torch.nn.Parameter(torch.ones(100))
    with Meter(torch.nn.ParameterList([weight])) as meter:
        tripled = weight * 3
        loss = tripled.sum()
        loss.backward()
        del tripled
        meter.timeline  # noqa: B018
        (torch.ones(1, requires_grad=True) * 2).sum().backward()
    assert all(t.needed is None for t in held_in(meter.timeline) if t.nbytes == 400)
