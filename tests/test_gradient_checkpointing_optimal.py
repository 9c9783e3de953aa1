"""Optimal plans: bytes as the Meter counts them, work as counters count it, and no plan at all that is better."""

import itertools
import random
from collections import Counter
from math import comb

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memlab.book.stages import Classified as Loss
from memlab.book.stages import vgg_stages
from memlab.gradient_checkpointing import Chain, Plan, Stage, measure_chain, plan_segments, tradeoff
from memlab.memory_hierarchy import OpCounter
from memlab.memory_timeline import Meter
from tests.tiers import some


class Residual(nn.Module):
    """x: (batch, width)."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def vgg_chain() -> tuple[nn.ModuleList, Tensor, Tensor]:
    """The book's chain of 13 unequal stages, its images and its labels."""
    y = torch.randint(10, (4,))
    return vgg_stages(y), torch.randn(4, 3, 64, 64), y


def random_layers(rng: random.Random, count: int) -> tuple[list[nn.Module], Tensor, Tensor]:
    """Such that save their input, their output, both, or more; the first has weights."""
    batch, width = rng.choice([3, 5]), rng.choice([8, 16])
    x, y, layers = torch.randn(batch, width), torch.randint(10, (batch,)), [nn.Linear(width, width)]
    for _ in range(count - 2):
        wider = rng.choice([8, 24, 40])
        layer, width = rng.choice(
            [
                (nn.Linear(width, wider), wider),
                (nn.Sequential(nn.Linear(width, wider), nn.ReLU()), wider),
                (nn.Sequential(nn.ReLU(), nn.Linear(width, wider)), wider),
                (nn.LayerNorm(width), width),
                (nn.BatchNorm1d(width), width),
                (nn.Dropout(0.3), width),
                (nn.Sigmoid(), width),
                (Residual(width), width),
            ]
        )
        layers.append(layer)
    return [*layers, Loss(width, y)], x, y


def metered(layers, x: Tensor, y: Tensor, plan: Plan) -> int:
    for layer in layers:
        layer.zero_grad()
    with Meter(layers, inputs=(x, y)) as meter:
        loss = plan.run(layers, x)
        loss.backward()
    return meter.timeline.peak_bytes


def counted(layers, x: Tensor, plan: Plan) -> int:
    """FLOPs of a step."""
    for layer in layers:
        layer.zero_grad()
    with OpCounter() as counter:
        plan.run(layers, x).backward()
    return sum(op.flops for op in counter.ops)


def gradients(layers, x: Tensor, plan: Plan) -> list[Tensor]:
    for layer in layers:
        layer.zero_grad()
    torch.manual_seed(1)
    plan.run(layers, x).backward()
    return [p.grad for layer in layers for p in layer.parameters()]


def keep_all(chain: Chain) -> Plan:
    return Plan(chain, tuple(range(len(chain))))


def random_steps(rng: random.Random, i: int, j: int) -> tuple:
    """For stages i … j − 1, ending with a stage that is kept, as good plans do."""
    steps = []
    while i < j - 1:
        s = rng.randint(i + 1, j - 1)
        if rng.random() < 0.5:
            steps.append(i)
            i += 1
        else:
            steps.append(random_steps(rng, i, s))
            i = s
    return (*steps, i)


@pytest.fixture(scope="module")
def vgg():
    torch.manual_seed(0)
    layers, x, y = vgg_chain()
    return layers, x, y, measure_chain(layers, x)


def test_every_plan_of_the_curve_has_the_peak_and_the_work_that_it_says_and_a_smaller_peak_costs_more(vgg):
    layers, x, y, chain = vgg
    plans = tradeoff(chain)
    assert len(plans) > 5 and plans[-1].steps == keep_all(chain).steps
    plain = counted(layers, x, plans[-1])
    for plan in plans:
        assert metered(layers, x, y, plan) == plan.peak_bytes
        assert counted(layers, x, plan) - plain == plan.recomputed
    for less, more in itertools.pairwise(plans):
        assert less.peak_bytes < more.peak_bytes and less.recomputed > more.recomputed


def test_gradients_are_those_without_a_plan_bit_for_bit(vgg):
    layers, x, _, chain = vgg
    expected = gradients(layers, x, keep_all(chain))
    for plan in (tradeoff(chain)[0], Plan(chain, random_steps(random.Random(0), 0, len(chain)))):
        assert all(map(torch.equal, gradients(layers, x, plan), expected))


@some("seed", range(12), keep=4)
def test_plans_of_any_layers_stay_within_what_they_say_and_hardly_below(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    layers, x, y = random_layers(rng, rng.randint(2, 8))
    chain = measure_chain(layers, x)
    plain = counted(layers, x, keep_all(chain))
    for plan in (*tradeoff(chain), *(Plan(chain, random_steps(rng, 0, len(chain))) for _ in range(4))):
        found = metered(layers, x, y, plan)
        assert 0.9 * plan.peak_bytes <= found <= plan.peak_bytes
        assert counted(layers, x, plan) - plain == plan.recomputed
    assert metered(layers, x, y, keep_all(chain)) == keep_all(chain).peak_bytes


def test_each_stage_runs_as_often_as_the_plan_says():
    runs, layers = Counter(), [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(6)]
    for i, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, i=i: runs.update([i]))
    x = torch.randn(2, 4)
    chain = measure_chain(layers, x)
    for steps in ((0, (1, 2), 3, 4, 5), (((0,), 1), ((2,), 3, 4), 5), (0, (1, 2, (3,)), (4, (5,)))):
        runs.clear()
        plan = Plan(chain, steps)
        plan.run(layers, x).sum().backward()
        assert plan.runs == [runs[i] for i in range(6)], steps


def test_a_plan_draws_itself():
    chain = random_chain(random.Random(0), 7)
    assert str(Plan(chain, ((0, 1), ((2,), 3, 4), 5, 6))) == "[0 1] [[2] 3 4] 5 6"


def test_measuring_leaves_gradients_statistics_and_random_numbers_as_they_were():
    layers = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), Loss(8, torch.randint(10, (6,)))]
    layers[0].weight.grad = held = torch.ones(8, 4)
    before = [buffer.clone() for buffer in layers[1].buffers()]
    state = torch.get_rng_state()
    measure_chain(layers, torch.randn(6, 4, generator=torch.Generator().manual_seed(0)))
    assert layers[0].weight.grad is held and held.eq(1).all() and layers[0].bias.grad is None
    assert all(map(torch.equal, layers[1].buffers(), before)) and layers[1].num_batches_tracked == 0
    assert torch.equal(torch.get_rng_state(), state)


def random_chain(rng: random.Random, count: int) -> Chain:
    stages = []
    for _ in range(count):
        output, tape, gradient = (
            rng.choice([1, 2, 4, 9, 30]) * rng.randint(1, 9),
            rng.randint(0, 150),
            rng.randint(0, 9),
        )
        saves_input, saves_output, cost = rng.random() < 0.6, rng.random() < 0.5, rng.randint(1, 100)
        backward = tape + output * saves_output + output + gradient + rng.randint(0, 60)
        own = backward + rng.randint(0, 20)
        stages.append(
            Stage(
                output_bytes=output,
                tape_bytes=tape,
                saves_input=saves_input,
                saves_output=saves_output,
                gradient_bytes=gradient,
                forward_bytes=output + rng.randint(0, 20),
                taped_bytes=output + tape + rng.randint(0, 20),
                again_bytes=tape + output * saves_output,
                backward_bytes=backward,
                waiting_bytes=output + rng.randint(0, 9),
                arriving_bytes=output,
                working_bytes=backward,
                own_backward_bytes=own,
                own_working_bytes=own,
                cost=cost,
                again_cost=rng.randint(0, cost),
            )
        )
    return Chain(tuple(stages), 1000, 8, ())


class Machine:
    """Goes through a step, event by event: what is held by how many, what it comes to, what work is done again."""

    def __init__(self, chain: Chain):
        self.stages, self.holders, self.peak, self.work = chain.stages, Counter(), 0, 0
        self.sizes = {("input", 0): 0, "result": chain.result_bytes}

    def hold(self, name, size: int | None = None) -> None:
        self.sizes.setdefault(name, size)
        self.holders[name] += 1

    def drop(self, name) -> None:
        self.holders[name] -= 1

    def touch(self, more: int) -> None:
        held = sum(self.sizes[name] for name, holders in self.holders.items() if holders)
        self.peak = max(self.peak, held + more)

    def forward(self, steps: tuple, again: bool) -> list:
        """Leaves behind what backward needs; returns it. The caller's variable holds the first input."""
        here = list(flat(steps))
        last = here[-1]
        done = []
        self.hold(("input", here[0]))
        for step in steps:
            k = step if isinstance(step, int) else next(flat(step))
            if k > last:
                break
            stage = self.stages[k]
            if isinstance(step, int):
                stops = again and k == last
                self.touch(stage.again_bytes if stops else stage.taped_bytes)
                self.work += (stage.again_cost if stops else stage.cost) if again else 0
                mine = [("tape", k)] + [("input", k)] * stage.saves_input + [("input", k + 1)] * stage.saves_output
                self.sizes["tape", k] = stage.tape_bytes
                self.hold(("input", k + 1), stage.output_bytes)
                for name in mine:
                    self.hold(name)
                done.append((step, mine, stops))
                self.drop(("input", k))
            else:
                self.hold(("input", k))
                for m in flat(step):
                    self.touch(self.stages[m].forward_bytes)
                    self.work += self.stages[m].cost if again else 0
                    self.hold(("input", m + 1), self.stages[m].output_bytes)
                    self.drop(("input", m))
                done.append((step, [("input", k)], False))
        self.drop(("input", last + 1))
        return done

    def backward(self, done: list) -> None:
        for step, mine, stops in reversed(done):
            if isinstance(step, int):
                self.backward_of(step, mine, stops)
            else:
                stages = list(flat(step))
                last = stages[-1]
                self.touch(self.stages[last].waiting_bytes)
                flying = ("flying", last)
                self.hold(flying, self.stages[last].arriving_bytes)
                inner = self.forward(step, again=True)
                self.drop(flying)
                self.backward(inner)
                self.drop(mine[0])

    def backward_of(self, k: int, mine: list, stops: bool) -> None:
        for name in mine:
            self.drop(name)
        stage, elsewhere = self.stages[k], self.holders["input", k] > 0 or k == 0
        own = stage.own_working_bytes if stops else stage.own_backward_bytes
        self.touch((stage.working_bytes if stops else stage.backward_bytes) if elsewhere else own)
        self.hold(("gradient", k), stage.gradient_bytes)

    def step(self, steps: tuple) -> tuple[int, int]:
        done = self.forward(steps, again=False)
        self.hold("result")
        self.backward(done)
        return self.peak, self.work


def flat(steps: tuple):
    for step in steps:
        yield from ((step,) if isinstance(step, int) else flat(step))


def every_plan(i: int, j: int):
    """All plans of stages i … j − 1 that end with a stage kept."""
    if j == i + 1:
        yield (i,)
        return
    for rest in every_plan(i + 1, j):
        yield (i, *rest)
    for s in range(i + 1, j):
        for inside, rest in itertools.product(every_plan(i, s), every_plan(s, j)):
            yield (inside, *rest)


def best_of(found) -> list[tuple[int, int]]:
    front = []
    for peak, work in sorted(set(found)):
        if not front or work < front[-1][1]:
            front.append((peak, work))
    return front


@some("seed", range(8), keep=4)
def test_no_plan_whatever_is_better_than_the_curve_by_a_machine_that_goes_through_each(seed):
    rng = random.Random(seed)
    chain = random_chain(rng, 3 + seed % 5)
    found = []
    for steps in every_plan(0, len(chain)):
        peak, work = Machine(chain).step(steps)
        found.append((chain.resident_bytes + peak, work))
    assert [(plan.peak_bytes, plan.recomputed) for plan in tradeoff(chain)] == best_of(found)


@some("seed", range(4), keep=2)
def test_the_machine_agrees_on_plans_of_twelve_stages(seed):
    rng = random.Random(seed)
    chain = random_chain(rng, 12)
    for _ in range(200):
        plan = Plan(chain, random_steps(rng, 0, 12))
        assert (plan.peak_bytes - chain.resident_bytes, plan.recomputed) == Machine(chain).step(plan.steps)


def forwards(n: int, c: int) -> int:
    """Griewank and Walther 2000: extra forward steps for n steps with c states remembered."""
    r = next(r for r in itertools.count() if n <= comb(c + r, c))
    return r * n - comb(c + r, r - 1) if r else 0


def equal_stages(n: int, tape: int) -> Chain:
    """Outputs of one byte, and tapes so large that no two fit."""
    stage = Stage(1, tape, True, False, 0, 1, tape, tape, tape, 0, 0, tape, tape + 1, tape + 1, 1, 1)
    return Chain((stage,) * n, 0, 0, ())


@some("n", [1, 2, 12, 3, 7, 40, 21], keep=4)
def test_equal_stages_are_run_as_often_as_the_binomial_closed_form_says(n):
    chain = equal_stages(n, tape=1000)
    for c in range(1, 9):
        # The chain's input is one of the c and has no bytes here; the state at hand is none of them and has one.
        assert plan_segments(chain, 1000 + c).recomputed == forwards(n, c)


def test_a_budget_below_the_smallest_is_refused_and_the_smallest_named_is_enough(vgg):
    *_, chain = vgg
    least = tradeoff(chain)[0].peak_bytes
    with pytest.raises(ValueError, match=f"at least {least:,} bytes"):
        plan_segments(chain, least - 1)
    assert plan_segments(chain, least).peak_bytes == least
    assert plan_segments(chain, "1 GiB").recomputed == 0


def test_another_batch_dtype_or_number_of_layers_than_was_measured_is_refused(vgg):
    layers, x, _, chain = vgg
    plan = keep_all(chain)
    with pytest.raises(ValueError, match=r"\(4, 3, 64, 64\) of torch.float32 on cpu, .*; found \(2, .*measure_chain"):
        plan.run(layers, x[:2])
    with pytest.raises(ValueError, match="found .* of torch.float64"):
        plan.run(layers, x.double())
    with pytest.raises(ValueError, match="expected the 13 stages that were measured, found 12; measure again"):
        plan.run(layers[1:], x)
    with pytest.raises(TypeError, match="expected x as a tensor, found list"):
        plan.run(layers, [x])


def settings():
    """Of a plain stack: a name, what is done before measuring, what is done after, and what is then said."""
    off = lambda module: module.requires_grad_(False)  # noqa: E731
    yield "x", lambda m, x: x.requires_grad_(), lambda m, x: x.requires_grad_(False), "the input.*=True; found .*=False"
    yield "training", lambda m, x: m[2].eval(), lambda m, x: m.train(), r"layers\[2\].training as.* False; found True"
    norm = r"layers\[2\].norm.weight.requires_grad as it was measured, True; found False"
    yield "inside", lambda m, x: m, lambda m, x: off(m[2].norm), norm
    extra = "layers.*new.requires_grad as it was measured, nothing there; found True"
    yield "extra", lambda m, x: m, lambda m, x: m[2].down.register_parameter("new", nn.Parameter(x)), extra


@pytest.mark.parametrize(("before", "after", "message"), [pytest.param(*s, id=name) for name, *s in settings()])
def test_a_step_with_other_flags_than_were_measured_is_refused_since_it_needs_other_bytes(before, after, message):
    layers, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), Residual(8)), torch.randn(4, 8)
    before(layers, x)
    plan = keep_all(measure_chain(layers, x))
    plan.run(layers, x)
    after(layers, x)
    with pytest.raises(ValueError, match=f"expected {message}.*measure_chain"):
        plan.run(layers, x)


def test_a_step_outside_of_the_autocast_that_was_measured_is_refused_and_the_other_way_round():
    layers, x = [nn.Linear(8, 8), nn.ReLU()], torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        low = keep_all(measure_chain(layers, x))
        assert low.run(layers, x).dtype == torch.bfloat16
    full = keep_all(measure_chain(layers, x))
    with pytest.raises(
        ValueError, match="expected autocast as it was measured, torch.bfloat16; found off: .*measure_chain"
    ):
        low.run(layers, x)
    with torch.autocast("cpu", torch.float16), pytest.raises(ValueError, match="measured, off; found torch.float16"):
        full.run(layers, x)


@pytest.mark.parametrize("inputs_want_gradients", [False, True])
def test_the_last_stage_need_not_be_a_loss(inputs_want_gradients):
    x = torch.randn(32, 64)
    for last in ([nn.Sequential(nn.Linear(64, 64), nn.Flatten(0))], [nn.Sigmoid()], [nn.BatchNorm1d(64), nn.ReLU()]):
        layers, x = [nn.Linear(64, 64), *last], x.detach().requires_grad_(inputs_want_gradients)
        chain = measure_chain(layers, x)
        for plan in (keep_all(chain), *tradeoff(chain), Plan(chain, ((0,), *range(1, len(chain))))):
            x.grad = None
            for module in layers:
                module.zero_grad()
            with Meter(layers, inputs=x) as meter:
                out = plan.run(layers, x)
                gradient = torch.ones_like(out)
                out.backward(gradient)
                del out, gradient
            assert meter.timeline.peak_bytes == plan.peak_bytes
