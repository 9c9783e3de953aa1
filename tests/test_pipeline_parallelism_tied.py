"""One parameter on several stages: gradients are the sum of its uses, copies stay equal, and bytes are as said."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memlab.data_parallelism import DataParallel, ZeroOptimizer, fully_shard
from memlab.memory_timeline import imagine
from memlab.pipeline_parallelism import (
    Action,
    Pipeline,
    gpipe,
    gpt_layers,
    gpt_loss,
    load_full_state_dict,
    measure_stages,
    one_forward_one_backward,
    plan_pipeline,
    tied,
    with_messages,
)
from memlab.pipeline_parallelism.schedule import BACKWARD, FORWARD
from memlab.pipeline_parallelism.tied import check_tied, tied_names
from memlab.ranks import Traffic, imagined_ranks, mesh, one_rank, run_ranks
from tests.tensor_parallelism_helpers import raised

WIDTH, BATCH = 6, 8
Linear = functools.partial(nn.Linear, WIDTH, WIDTH, bias=False, dtype=torch.float64)
BYTES = WIDTH * WIDTH * 8


class Unused(nn.Module):
    """A weight that no output depends on, laid out the other way round."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64).t())

    def forward(self, x: Tensor) -> Tensor:
        return x


class Turned(nn.Module):
    """A linear layer whose weight is laid out the other way round, and so its gradient."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64).t())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Sparse(nn.Module):
    """A table whose gradient has the rows only that were looked up: one for each sign of the first feature."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return F.embedding((x[:, 0] > 0).long(), self.weight, sparse=True) * x


def frozen() -> nn.Linear:
    return Linear().requires_grad_(False)


LAYERS = {  # some layers, and what is tied of them
    "three": ([Linear, nn.Tanh, Linear, Linear], [("0.weight", "2.weight"), ("2.weight", "3.weight")]),
    "two": ([Linear, Linear, Linear, Linear], [("0.weight", "3.weight")]),
    "one stage": ([Linear, Linear, nn.Tanh, Linear], [("0.weight", "1.weight")]),
    "unused": ([Linear, nn.Tanh, Unused, Linear], [("0.weight", "2.weight")]),
    "turned": ([Turned, nn.Tanh, Turned, Linear], [("0.weight", "2.weight")]),
    "sparse": ([Sparse, nn.Tanh, Linear, Linear], [("0.weight", "2.weight")]),
    "frozen": ([frozen, Linear, frozen, Linear], [("0.weight", "2.weight")]),
}


def rows(step: int) -> tuple[Tensor, Tensor]:
    """x and y, each (BATCH, WIDTH)."""
    x = torch.randn(2, BATCH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return x[0], x[1]


def vee(micro_batches: int):
    """Stages 0 and 3 on rank 0, 1 and 2 on rank 1."""
    orders = []
    for outer, inner in ((0, 3), (1, 2)):
        turns = [(FORWARD, outer), (FORWARD, inner), (BACKWARD, inner), (BACKWARD, outer)]
        orders.append([Action(kind, stage, i) for i in range(micro_batches) for kind, stage in turns])
    return with_messages("V", orders)


def plain(name: str) -> list[dict[str, Tensor | None]]:
    """In one process with really one parameter: gradients after one step, and after a second without zero_grad."""
    made, ties = LAYERS[name]
    torch.manual_seed(0)
    model = nn.Sequential(*[layer() for layer in made])
    for names in tied_names(ties):
        for other in names[1:]:
            model[int(other[0])].weight = model[int(names[0][0])].weight
    found = []
    for step in range(2):
        F.mse_loss(model(rows(step)[0]), rows(step)[1]).backward()
        found.append({n: _copy(p.grad) for n, p in model.named_parameters(remove_duplicate=False)})
    return found


def _copy(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.clone()


def in_stages(name: str, schedule, group, data=None) -> dict:
    """As `plain`, on this rank; and how many parameters and ties there are."""
    made, ties = LAYERS[name]
    mine = slice(None)
    if data is not None:
        share = BATCH // data.size()
        mine = slice(data.rank() * share, (data.rank() + 1) * share)
    plan = plan_pipeline(made, schedule, rows(0)[0][mine], tied=ties)
    torch.manual_seed(0)
    wrap = None if data is None else functools.partial(DataParallel, group=data)
    pipeline = Pipeline(plan, F.mse_loss, group=group, wrap=wrap)
    found = []
    for step in range(2):
        pipeline.step(*(t[mine] for t in rows(step)))
        found.append({})
        for module in pipeline.modules.values():
            for n, p in getattr(module, "module", module).named_parameters(remove_duplicate=False):
                found[-1][n] = _copy(p.grad)
    in_buckets = [
        p.grad.data_ptr() == view.data_ptr()
        for module in pipeline.modules.values()
        for bucket in getattr(module, "buckets", [])
        for p, view in zip(bucket.params, bucket.views, strict=True)
    ]
    return {"gradients": found, "parameters": len(list(pipeline.parameters())), "in buckets": in_buckets}


def unlike(group) -> str:
    """One copy is frozen: told to every rank."""
    plan = plan_pipeline(LAYERS["two"][0], gpipe(2, 2), rows(0)[0], tied=LAYERS["two"][1])
    object.__setattr__(plan, "layers", (*plan.layers[:3], frozen))
    return raised(lambda: Pipeline(plan, F.mse_loss, group=group))


def step_with(group, data, wrap=None, stage=None) -> str:
    """A step of a pipeline whose stages are wrapped, or whose optimizer takes gradients during backward."""
    plan = plan_pipeline(LAYERS["two"][0], gpipe(2, 2), rows(0)[0], tied=LAYERS["two"][1])
    torch.manual_seed(0)
    pipeline = Pipeline(plan, F.mse_loss, group=group, wrap=wrap)
    if stage is not None:
        kept = ZeroOptimizer(pipeline.parameters(), torch.optim.SGD, stage=stage, group=data, lr=0.1)  # noqa: F841
    return raised(lambda: pipeline.step(*rows(0)))


def freezes(rank: int) -> list[str]:
    """The first rank freezes its copy before the first step of a pipeline; of another, all ranks after one."""
    found = []
    for steps, who in ((0, [0]), (1, [0, 1])):
        plan = plan_pipeline(LAYERS["two"][0], gpipe(2, 2), rows(0)[0], tied=LAYERS["two"][1])
        pipeline = Pipeline(plan, F.mse_loss)
        for step in range(steps):
            pipeline.step(*rows(step))
        for name, p in pipeline.named_parameters():
            p.requires_grad_(rank not in who or name not in ("0.weight", "3.weight"))
        found.append(raised(lambda pipeline=pipeline: pipeline.step(*rows(0))))
    return found


def replace(stage: nn.Module) -> nn.Module:
    for layer in stage:
        if hasattr(layer, "weight"):
            layer.weight = nn.Parameter(layer.weight.detach().clone())
    return stage


def on_ranks(rank: int) -> dict:
    four, by = mesh(pipeline=4), mesh(data=2, pipeline=2)
    pipeline, data = by.get_group("pipeline"), by.get_group("data")
    two = one_forward_one_backward(2, 2)
    found = {
        ("three", "4 stages"): in_stages("three", one_forward_one_backward(4, 4), four.get_group("pipeline")),
        ("two", "V"): in_stages("two", vee(2), pipeline),
        ("two", "V, data"): in_stages("two", vee(2), pipeline, data),
    }
    for name in LAYERS:
        found[name, "2 stages"] = in_stages(name, two, pipeline)
        if name != "sparse":  # whose gradients have no place in a bucket
            found[name, "2 stages, data"] = in_stages(name, two, pipeline, data)
    before, tied.SCRATCH_BYTES = tied.SCRATCH_BYTES, 50
    found["three", "in pieces"] = in_stages("three", one_forward_one_backward(4, 4), four.get_group("pipeline"))
    tied.SCRATCH_BYTES = before
    found["unlike"] = unlike(pipeline)
    found["used up"] = step_with(pipeline, data, stage=2)
    found["stage 1"] = step_with(pipeline, data, stage=1)
    found["cut unlike"] = step_with(pipeline, data, lambda stage: fully_shard(stage, group=data))
    found["replaced"] = step_with(pipeline, data, replace)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    return run_ranks(on_ranks, 4)


def test_gradients_of_tied_copies_are_those_of_one_parameter_also_when_steps_accumulate(ranks):
    expected = {name: plain(name) for name in LAYERS}
    for key in [key for key in ranks[0] if isinstance(key, tuple)]:
        seen = set()
        for rank in ranks:
            for after, reference in zip(rank[key]["gradients"], expected[key[0]], strict=True):
                for name, gradient in after.items():
                    seen.add(name)
                    if reference[name] is None:
                        assert gradient is None, (key, name)
                    elif "data" not in key[1]:
                        far = (gradient - reference[name]).norm() / reference[name].norm()
                        assert far <= 1e-12, (key, name, far)
        assert seen == expected[key[0]][0].keys(), key


def test_with_data_parallel_the_average_over_data_is_summed_over_the_stages(ranks):
    for key in [key for key in ranks[0] if "data" in key[1]]:
        expected = plain(key[0])
        for rank in ranks:
            for after, reference in zip(rank[key]["gradients"], expected, strict=True):
                for name, gradient in after.items():
                    if gradient is not None:
                        assert (gradient - reference[name]).norm() <= 1e-12 * reference[name].norm(), (key, name)
            assert all(rank[key]["in buckets"]), key


def test_the_copies_gradients_are_equal_to_the_bit(ranks):
    for key in [key for key in ranks[0] if isinstance(key, tuple)]:
        for names in tied_names(LAYERS[key[0]][1]):
            found = [
                rank[key]["gradients"][-1][name]
                for rank in ranks
                for name in names
                if name in rank[key]["gradients"][-1]
            ]
            assert len(found) >= 2
            assert all(one is found[0] is None or torch.equal(one, found[0]) for one in found), key


def test_in_pieces_the_sum_is_the_same_to_the_bit(ranks):
    for rank in ranks:
        one, other = rank["three", "4 stages"]["gradients"], rank["three", "in pieces"]["gradients"]
        assert all(torch.equal(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in a)


def test_on_one_rank_it_is_one_parameter_unless_stages_are_wrapped_apart(ranks):
    assert [rank["one stage", "2 stages"]["parameters"] for rank in ranks] == [1, 1, 1, 1]
    assert [rank["two", "V"]["parameters"] for rank in ranks] == [1, 2, 1, 2]
    assert [rank["two", "V, data"]["parameters"] for rank in ranks] == [2, 2, 2, 2]
    assert [rank["three", "4 stages"]["parameters"] for rank in ranks] == [1, 0, 1, 1]


def test_what_cannot_stay_equal_is_refused_on_every_rank(ranks):
    for rank in ranks:
        assert re.search(
            r"ValueError: expected 3.weight as 0.weight, which it is tied to.*trained, found .*frozen", rank["unlike"]
        )
        assert rank["stage 1"] == "nothing"
        assert "ValueError: expected 0.weight on rank 1 as 0.weight on rank 0" in rank["cut unlike"]
        assert "RuntimeError: expected the gradient of 0.weight, which is tied to 3.weight" in rank["used up"]
        assert "take ZeroOptimizer's stage 1" in rank["used up"]
        assert "ValueError: expected 0.weight and what is tied to it to stay the same Parameter" in rank["replaced"]


def test_a_copy_that_is_frozen_later_is_refused_and_not_waited_for():
    for early, late in run_ranks(freezes, 2, timeout=20):
        assert re.search(r"ValueError: expected 0.weight on rank 1 as 0.weight on rank 0.*frozen.*trained", early)
        assert "ValueError: expected 0.weight and what is tied to it to stay trained, found a copy that is not" in late


# ---- without processes


@pytest.mark.parametrize("rank", range(4))
def test_holders_send_their_gradient_to_each_other_holder_and_nobody_else_sends(rank):
    made, ties = LAYERS["three"]
    plan = plan_pipeline(made, gpipe(4, 2), rows(0)[0], tied=ties)
    with imagined_ranks(4, rank):
        pipeline = Pipeline(plan, F.mse_loss)
        with Traffic() as traffic:
            pipeline.tied.sum_gradients()
    assert traffic.sent_bytes == {0: 2, 1: 0, 2: 2, 3: 2}[rank] * BYTES


@pytest.mark.parametrize("rank", [0, 1])
def test_on_imagined_hardware_a_tied_table_costs_its_bytes_once_more_each_step(rank):
    sizes, sent = (2, 32, 4, 16, 64), {}
    for ties in ((), [("0.token_embedding.weight", "3.head.weight")]):
        with imagine("H100-80GB"), imagined_ranks(2, rank):
            x = torch.zeros(4, 16, dtype=torch.int64)
            pipeline = Pipeline(plan_pipeline(gpt_layers(*sizes), gpipe(2, 2), x, tied=ties), gpt_loss)
            with Traffic() as traffic:
                pipeline.step(x, x)
        sent[bool(ties)] = traffic.sent_bytes
    assert sent[True] - sent[False] == 64 * 32 * 4


def test_names_that_share_one_are_one_set():
    assert tied_names([("a", "b"), ("c", "d"), ("d", "a"), ("e", "f", "e")]) == [("a", "b", "c", "d"), ("e", "f")]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("0.weight", "1.bias"), "found '1.bias'; layer 1 has 1.weight"),
        (("0.weight", "7.weight"), "found '7.weight'; there are 2 layers"),
        (("0.weight", "weight"), "found 'weight'; there are 2 layers"),
        (("0.weight", "1.weight"), "expected 1.weight as 0.weight, which it is tied to, (3, 2) .*, found (4, 3)"),
    ],
)
def test_ties_that_cannot_be_are_refused_before_any_process(names, words):
    layers = [nn.Linear(2, 3, bias=False), nn.Linear(3, 4, bias=False)]
    pattern = re.escape(words).replace(r"\.\*", ".*")
    with pytest.raises(ValueError, match=pattern):
        check_tied(layers, [names])
    with pytest.raises(ValueError, match=pattern):
        plan_pipeline(layers, gpipe(2, 1), torch.zeros(1, 2), tied=[names])


class Twice(nn.Module):
    """A layer that has its weight under two names."""

    def __init__(self):
        super().__init__()
        self.a, self.b = Linear(), Linear()
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


@pytest.mark.parametrize(
    "schedule", [gpipe(1, 1), with_messages("one rank", ["F0@0 F0@1 B0@1 B0@0"])], ids=["one stage", "two"]
)
@pytest.mark.parametrize("name", ["a", "b"])
def test_a_weight_that_a_layer_has_under_two_names_is_tied_under_both(schedule, name):
    x, y = rows(0)
    torch.manual_seed(0)
    model = nn.Sequential(Linear(), Twice())
    model[1].a.weight = model[1].b.weight = model[0].weight
    loss = F.mse_loss(model(x), y)
    loss.backward()
    plan = plan_pipeline([Linear, Twice], schedule, x, tied=[("0.weight", f"1.{name}.weight")])
    with one_rank():
        torch.manual_seed(0)
        pipeline = Pipeline(plan, F.mse_loss)
        torch.testing.assert_close(pipeline.step(x, y), loss.detach())
    (p,) = pipeline.parameters()
    torch.testing.assert_close(p.grad, model[0].weight.grad, rtol=1e-13, atol=1e-15)
    costs = measure_stages(plan, x, y, F.mse_loss, repeats=1)
    assert [cost.static_bytes for cost in costs] == [2 * BYTES] * schedule.stages


def test_one_parameter_in_two_groups_is_refused():
    ties = [("0.weight", "1.a.weight"), ("1.b.weight", "2.weight")]
    with pytest.raises(
        ValueError, match=r"'1.b.weight' is a parameter of \(0.weight, 1.a.weight\), too; make one group"
    ):
        plan_pipeline([Linear, Twice, Linear], gpipe(3, 1), rows(0)[0], tied=ties)


def test_an_optimizer_of_named_parameters_has_a_tied_one_once():
    schedule = with_messages("one rank", ["F0@0 F0@1 B0@1 B0@0"])
    with one_rank():
        pipeline = Pipeline(
            plan_pipeline([Linear, Linear], schedule, rows(0)[0], tied=[("0.weight", "1.weight")]), F.mse_loss
        )
    (name, p) = next(pipeline.named_parameters())
    assert name == "0.weight" and [q is p for _, q in pipeline.named_parameters()] == [True]


def loaded(rank: int) -> list:
    """A state whose copies differ, from each rank and from the first; and from the second alone, which is refused."""
    pipeline = Pipeline(
        plan_pipeline([Linear] * 4, gpipe(2, 2), rows(0)[0], tied=[("0.weight", "3.weight")]), F.mse_loss
    )
    state = {f"{n}.weight": torch.full((WIDTH, WIDTH), n + 1.0, dtype=torch.float64) for n in range(4)}
    found = []
    for given in (state, state if rank == 0 else {}):
        load_full_state_dict(pipeline, given)
        found.append({name: p[0, 0].item() for name, p in pipeline.named_parameters()})
    found.append(raised(lambda: load_full_state_dict(pipeline, {n: t + 1 for n, t in state.items()} if rank else {})))
    return [*found, {name: p[0, 0].item() for name, p in pipeline.named_parameters()}]


def test_copies_are_equal_after_loading_a_state_in_which_they_differ():
    for every, first, error, after in run_ranks(loaded, 2):
        assert every == first == after
        assert {1.0, 2.0} == set(every.values()) or {1.0, 3.0} == set(every.values())
        assert "found one on rank 1 and none on rank 0" in str(error)
