"""PyTorch's pipeline schedules on two real ranks beside this book's: equal weights, and what each holds and sends."""

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime
from torch.nn import functional as F

from memlab.book.measures.pipeline_parallelism import simulated_beside_metered
from memlab.book.pipeline_frameworks import CHUNKS, MEMLAB, train_piped, ways_to_pipe
from memlab.book.workloads import GPT, GPTConfig, gpt_in_layers, name_in_layers, text_batch
from memlab.memory_timeline import Meter
from memlab.pipeline_parallelism import Action, Schedule, check_schedule, one_forward_one_backward
from memlab.pipeline_parallelism.schedule import BACKWARD, FORWARD
from memlab.ranks import imagined_ranks, run_ranks
from tests.nbval_policy import RECORDED_WITH

RANKS, STEPS, BATCH, ITEM, MICRO_BATCHES, UNEVEN = 2, 2, 12, 8, 4, 6
CONFIG = GPTConfig(layers=2, width=32, heads=2, context=16)
BATCHES = [text_batch(BATCH, CONFIG.context, seed=step) for step in range(STEPS)]
STREAM = BATCH * CONFIG.context * CONFIG.width * ITEM
"""What crosses a cut in a step, one way."""
CUTS = {"GPipe": 1, "1F1B": 1, "interleaved": 2 * CHUNKS - 1}
"""Which each rank sends over, forward or back."""

as_recorded = pytest.mark.skipif(
    not torch.__version__.startswith(RECORDED_WITH["torch"]), reason="another PyTorch's pipelining may do otherwise"
)


def build():
    torch.manual_seed(0)
    return GPT(CONFIG).double()


def compare(rank):
    """Everything once on a rank: training, and habits of PyTorch's."""
    torch.set_num_threads(1)
    found = {name: train_piped(name, build, BATCHES, micro_batches=MICRO_BATCHES) for name in ways_to_pipe()}
    uneven = {
        name: train_piped(name, build, BATCHES, micro_batches=UNEVEN).weights
        for name in ("memlab, 1F1B", "torch, 1F1B")
    }
    habits = {"counted": counted(rank), "grown": grown(rank), "tied": tied(rank), "outputs": outputs(rank)}
    return found, uneven, habits


def torchs(rank, modules, micro_batches, schedule=ScheduleGPipe):
    """A function that takes a step with one of two modules on each rank."""
    stage = PipelineStage(modules[rank], rank, RANKS, torch.device("cpu"))
    run = schedule(stage, micro_batches, loss_fn=F.mse_loss)

    def step(x, y, **options):
        return run.step(x, **options) if rank == 0 else run.step(target=y, losses=[], **options)

    return step


def counted(rank):
    """How many micro-batches a BatchNorm on rank 0 has seen after one step of two."""
    modules = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4)]
    torchs(rank, modules, 2)(torch.randn(8, 4), torch.randn(8, 4))
    return modules[0][1].num_batches_tracked.item()


def grown(rank):
    """The gradient after two steps without zero_grad(), over that after one, of four micro-batches."""
    torch.manual_seed(0)
    modules, x, y = [nn.Linear(4, 4), nn.Linear(4, 4)], torch.randn(8, 4), torch.randn(8, 4)
    step, norms = torchs(rank, modules, 4), []
    for _ in range(2):
        step(x, y)
        norms.append(modules[rank].weight.grad.norm().item())
    return norms[1] / norms[0]


def tied(rank):
    """A weight on both stages after a step of SGD."""
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    torchs(rank, [first, second], 2)(torch.randn(8, 4), torch.randn(8, 4))
    torch.optim.SGD([first.weight], lr=0.1).step()
    return first.weight.detach()


def outputs(rank):
    """By schedule, the peak of a step whose outputs are returned, and of one whose are not; they outweigh the rest."""
    peaks = {}
    for schedule in (ScheduleGPipe, Schedule1F1B):
        for kept in (True, False):
            torch.manual_seed(0)
            with Meter() as meter:
                step = torchs(rank, [nn.Linear(8, 8), nn.Linear(8, 512)], 8, schedule)
                x, y = torch.randn(32, 8), torch.randn(32, 512)
                step(x, y, return_outputs=kept)
                begin = meter.event
                step(x, y, return_outputs=kept)
            peaks[schedule.__name__, kept] = max(meter.timeline.totals[begin:])
    return peaks


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As the ranks have: how many there are decides the order of sums, and so the last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(compare, RANKS)


def truth(micro_batches):
    """One process that accumulates the same micro-batches."""
    model, losses = build(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in BATCHES:
        parts = [
            model(*part) / micro_batches for part in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True)
        ]
        for loss in parts:
            loss.backward()
        losses.append(sum(parts).item())
        optimizer.step()
        optimizer.zero_grad()
    return {name: weight.detach() for name, weight in model.state_dict().items()}, losses


def test_every_way_ends_with_the_weights_of_one_process_that_accumulates_bit_for_bit(ranks):
    weights, losses = truth(MICRO_BATCHES)
    for found, *_ in ranks:
        for way, piped in found.items():
            assert list(piped.weights) == list(weights)
            assert all(torch.equal(piped.weights[name], weight) for name, weight in weights.items()), way
    first, last = ([piped.losses for piped in found.values()] for found, *_ in ranks)
    assert first == [[None] * STEPS] * len(ways_to_pipe())
    for said in last:
        assert [loss.item() for loss in said] == pytest.approx(losses, rel=1e-15)


@as_recorded
def test_where_a_division_rounds_it_matters_that_torch_divides_the_sum_and_memlab_each_loss(ranks):
    weights, _ = truth(UNEVEN)
    for _, uneven, _ in ranks:
        same = {way: all(torch.equal(uneven[way][name], weight) for name, weight in weights.items()) for way in uneven}
        assert same == {"memlab, 1F1B": True, "torch, 1F1B": False}
        for name, weight in weights.items():
            assert (uneven["torch, 1F1B"][name] - weight).norm() <= 1e-12 * weight.norm()


def test_both_send_what_crosses_the_cuts_and_nothing_else(ranks):
    for found, *_ in ranks:
        for way, piped in found.items():
            cuts = CUTS[way.split(", ")[1]]
            assert piped.sent == {"send": cuts * STREAM}, way
            assert piped.messages == {"send": cuts * MICRO_BATCHES, "receive": cuts * MICRO_BATCHES}, way


@as_recorded
def test_torch_keeps_room_for_everything_that_a_step_receives_and_memlab_nothing(ranks):
    for found, *_ in ranks:
        for schedule, cuts in CUTS.items():
            ours, theirs = found[f"memlab, {schedule}"].trained, found[f"torch, {schedule}"].trained
            assert ours.held == theirs.held
            apart = theirs.other_bytes - ours.other_bytes - cuts * STREAM
            assert 0 <= apart <= 64, schedule  # a loss or two


def both_peaks(ranks):
    """(schedule, memlab's peak, torch's) on each rank."""
    for found, *_ in ranks:
        for schedule in MEMLAB:
            yield schedule, *(found[f"{who}, {schedule}"].trained.peak_bytes for who in ("memlab", "torch"))


def test_memlab_peaks_no_higher_with_any_schedule(ranks):
    assert all(ours <= theirs for _, ours, theirs in both_peaks(ranks)), list(both_peaks(ranks))


@as_recorded
def test_memlab_peaks_lower_with_each_schedule(ranks):
    assert all(ours < theirs for _, ours, theirs in both_peaks(ranks)), list(both_peaks(ranks))


@as_recorded
def test_torchs_first_step_runs_a_micro_batch_more_which_a_batch_norm_counts(ranks):
    (*_, habits), _ = ranks
    assert habits["counted"] == 2 + 1


@as_recorded
def test_torch_divides_by_the_micro_batches_whatever_gradient_was_there_before(ranks):
    for *_, habits in ranks:
        assert habits["grown"] == pytest.approx(1 + 1 / 4, rel=1e-5)


@as_recorded
def test_a_tied_weight_silently_becomes_two_in_torch(ranks):
    one, two = (habits["tied"] for *_, habits in ranks)
    assert not torch.equal(one, two)


@as_recorded
def test_torchs_1f1b_that_returns_outputs_peaks_on_the_last_stage_as_high_as_gpipe(ranks):
    _, (*_, habits) = ranks
    peaks = habits["outputs"]
    assert peaks["Schedule1F1B", True] == peaks["ScheduleGPipe", True]
    assert peaks["Schedule1F1B", False] < peaks["ScheduleGPipe", False] < peaks["ScheduleGPipe", True]


# ---- what each refuses


def prepared(orders):
    """PyTorch's schedule from the order in which each rank computes."""
    with imagined_ranks(RANKS):
        stage = PipelineStage(nn.Linear(4, 4), 0, RANKS, torch.device("cpu"))
        schedule = _PipelineScheduleRuntime([stage], 2, loss_fn=F.mse_loss)
        schedule._prepare_schedule_with_comms(
            {rank: [_Action.from_str(f"{rank}{turn}") for turn in order.split()] for rank, order in enumerate(orders)}
        )


@as_recorded
def test_torch_refuses_an_order_that_stops_without_a_name_and_takes_a_doubled_forward():
    prepared(["F0 F1 B0 B1", "F0 F1 B0 B1"])
    prepared(["F0 F1 F1 B0 B1", "F0 F1 B0 B1"])
    with pytest.raises(AssertionError, match="expected 2 total backwards"):
        prepared(["F0 F1 B0", "F0 F1 B0 B1"])
    with pytest.raises(AssertionError, match="Malformed compute schedule, can't schedule sends/recvs$"):
        prepared(["F0 B0 F1 B1", "F1 F0 B1 B0"])


def test_memlab_refuses_a_doubled_forward_by_name():
    schedule = one_forward_one_backward(2, 2)
    doubled = (*schedule.actions[0], Action(FORWARD, 0, 1))
    with pytest.raises(ValueError, match="each action once, found F1 of stage 0"):
        check_schedule(Schedule("", 2, schedule.ranks_of_stages, (doubled, schedule.actions[1])))


def test_torchs_1f1b_wants_as_many_micro_batches_as_stages_and_memlabs_takes_fewer():
    with imagined_ranks(RANKS), pytest.raises(ValueError, match="greater than or equal to the number of stages"):
        Schedule1F1B(PipelineStage(nn.Linear(4, 4), 0, RANKS, torch.device("cpu")), 1, loss_fn=F.mse_loss)
    assert [a.kind for a in one_forward_one_backward(2, 1).actions[1] if a.kind in (FORWARD, BACKWARD)] == [
        FORWARD,
        BACKWARD,
    ]


def test_an_unknown_way_and_a_missing_group_are_named():
    with pytest.raises(KeyError):
        train_piped("GPipe", build, BATCHES)
    with pytest.raises(RuntimeError, match="expected a process group, found none"):
        train_piped("memlab, 1F1B", build, BATCHES)


# ---- the model in layers


def test_a_gpt_in_layers_draws_a_gpts_weights_and_computes_what_it_computes():
    plain = build()
    torch.manual_seed(0)
    layers = nn.Sequential(*[make() for make in gpt_in_layers(CONFIG)]).double()
    renamed = {name_in_layers(name, CONFIG.layers): weight for name, weight in plain.state_dict().items()}
    state = layers.state_dict()
    assert list(state) == list(renamed) and all(torch.equal(state[name], renamed[name]) for name in state)
    x, _ = BATCHES[0]
    assert torch.equal(layers(x), plain(x))


def test_the_benchmark_finds_no_byte_between_simulation_and_meter():
    ((_, figure, reach),) = simulated_beside_metered("cpu", rounds=1)
    assert figure == "in flight 0, bytes after an action 0, peak 0" and reach == "0"
