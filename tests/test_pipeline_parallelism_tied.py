"""One parameter on several stages: gradients are the sum of its uses, copies stay equal, and bytes are as said."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memlab import pipeline_parallelism as pp
from memlab.data_parallelism import DataParallel, ZeroOptimizer
from memlab.pipeline_parallelism.tied import tied_names
from memlab.ranks import Traffic, imagined_ranks, mesh, run_ranks
from tests.tensor_parallelism_helpers import raised

WIDTH, BATCH = 6, 8
Linear = functools.partial(nn.Linear, WIDTH, WIDTH, bias=False, dtype=torch.float64)
BYTES = WIDTH * WIDTH * 8


class Weight(nn.Module):
    """A weight, and what is computed with it."""

    def __init__(self, function, turned: bool = False):
        super().__init__()
        values = torch.randn(WIDTH, WIDTH, dtype=torch.float64)
        self.weight, self.function = nn.Parameter(values.t() if turned else values), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


class Twice(Weight):
    """A layer that has its weight under two names."""

    def __init__(self):
        super().__init__(F.linear)
        self.again = self.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(super().forward(x)), self.again)


Turned = functools.partial(Weight, F.linear, turned=True)  # laid out the other way round, and so is its gradient
Unused = functools.partial(Weight, lambda x, weight: x)
# a table whose gradient has the rows only that were looked up: one for each sign of the first feature
Sparse = functools.partial(Weight, lambda x, weight: F.embedding((x[:, 0] > 0).long(), weight, sparse=True) * x)
OUTER, INNER = "F0@0 F0@3 B0@3 B0@0 F1@0 F1@3 B1@3 B1@0", "F0@1 F0@2 B0@2 B0@1 F1@1 F1@2 B1@2 B1@1"
VEE = pp.with_messages("V", [OUTER, INNER])  # stages 0 and 3 on rank 0, 1 and 2 on rank 1


def frozen() -> nn.Linear:
    return Linear().requires_grad_(False)


LAYERS = {  # some layers, and what is tied of them
    "three": ([Linear, nn.Tanh, Linear, Linear], [("0.weight", "2.weight"), ("2.weight", "3.weight")]),
    "two": ([Linear, Linear, Linear, Linear], [("0.weight", "3.weight")]),
    "one stage": ([Linear, Linear, nn.Tanh, Linear], [("0.weight", "1.weight")]),
    "unused": ([Linear, nn.Tanh, Unused, Linear], [("0.weight", "2.weight")]),
    "two names": ([Linear, nn.Tanh, Twice, Linear], [("0.weight", "2.again")]),
    "turned": ([Turned, nn.Tanh, Turned, Linear], [("0.weight", "2.weight")]),
    "sparse": ([Sparse, nn.Tanh, Linear, Linear], [("0.weight", "2.weight")]),
    "frozen": ([frozen, Linear, frozen, Linear], [("0.weight", "2.weight")]),
}


def rows(step: int) -> tuple[Tensor, Tensor]:
    """x and y, each (BATCH, WIDTH)."""
    x = torch.randn(2, BATCH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return x[0], x[1]


def plain(name: str) -> list[dict[str, Tensor | None]]:
    """In one process with really one parameter: gradients after one step, and after a second without zero_grad."""
    made, ties = LAYERS[name]
    torch.manual_seed(0)
    model = nn.Sequential(*[layer() for layer in made])
    for names in tied_names(ties):
        for other in names[1:]:
            layer = model[int(other[0])]
            for own in {"weight", "again"} & layer._parameters.keys():
                setattr(layer, own, model[int(names[0][0])].weight)
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
    plan = pp.plan_pipeline(made, schedule, rows(0)[0][mine], tied=ties)
    torch.manual_seed(0)
    wrap = None if data is None else functools.partial(DataParallel, group=data)
    pipeline = pp.Pipeline(plan, F.mse_loss, group=group, wrap=wrap)
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


def pipeline_of(group=None, wrap=None, schedule=None) -> pp.Pipeline:
    plan = pp.plan_pipeline(LAYERS["two"][0], schedule or pp.gpipe(2, 2), rows(0)[0], tied=LAYERS["two"][1])
    torch.manual_seed(0)
    return pp.Pipeline(plan, F.mse_loss, group=group, wrap=wrap)


def step_with(group, data, wrap=None, stage=None) -> str:
    """A step of a pipeline whose stages are wrapped, or whose optimizer takes gradients during backward."""
    pipeline = pipeline_of(group, wrap)
    if stage is not None:
        kept = ZeroOptimizer(pipeline.parameters(), torch.optim.SGD, stage=stage, group=data, lr=0.1)  # noqa: F841
    return raised(lambda: pipeline.step(*rows(0)))


def freezes(group, when: int) -> str:
    """Before the first step the first rank freezes its copy; or all ranks theirs after one."""
    pipeline = pipeline_of(group)
    if when:
        pipeline.step(*rows(0))
    for name, p in pipeline.named_parameters():
        p.requires_grad_(name not in ("0.weight", "3.weight") or not when and pipeline.rank > 0)
    return raised(lambda: pipeline.step(*rows(0)))


def loads(group) -> list:
    """A state whose copies differ, from each rank and from the first; and from the second alone, which is refused."""
    pipeline = pipeline_of(group)
    state = {f"{n}.weight": torch.full((WIDTH, WIDTH), n + 1.0, dtype=torch.float64) for n in range(4)}
    values = lambda: {name: p[0, 0].item() for name, p in pipeline.named_parameters()}  # noqa: E731
    found = []
    for given in (state, {} if pipeline.rank else state):
        pp.load_full_state_dict(pipeline, given)
        found.append(values())
    other = {n: t + 1 for n, t in state.items()} if pipeline.rank else {}
    return [raised(lambda: pp.load_full_state_dict(pipeline, other)), *found, values()]


def replace(stage: nn.Module) -> nn.Module:
    for layer in stage:
        if hasattr(layer, "weight"):
            layer.weight = nn.Parameter(layer.weight.detach().clone())
    return stage


def on_ranks(rank: int) -> dict:
    four, by = mesh(pipeline=4), mesh(data=2, pipeline=2)
    pipeline, data = by.get_group("pipeline"), by.get_group("data")
    two = pp.one_forward_one_backward(2, 2)
    found = {
        ("three", "4 stages"): in_stages("three", pp.one_forward_one_backward(4, 4), four.get_group("pipeline")),
        ("two", "V"): in_stages("two", VEE, pipeline),
    }
    for name in LAYERS:
        found[name, "2 stages"] = in_stages(name, two, pipeline)
        if name != "sparse":  # whose gradients have no place in a bucket
            found[name, "2 stages, data"] = in_stages(name, two, pipeline, data)
    found["wrapped apart"] = raised(lambda: pipeline_of(pipeline, DataParallel, VEE))
    found["frozen early"], found["frozen late"] = freezes(pipeline, 0), freezes(pipeline, 1)
    found["loaded"] = loads(pipeline)
    found["used up"] = step_with(pipeline, data, stage=2)
    found["stage 1"] = step_with(pipeline, data, stage=1)
    found["replaced"] = step_with(pipeline, data, replace)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    return run_ranks(on_ranks, 4)


def test_gradients_of_tied_copies_are_those_of_one_parameter_and_equal_to_the_bit(ranks):
    """Also when steps accumulate. With data parallel, the average over data is summed over the stages."""
    for key in [key for key in ranks[0] if isinstance(key, tuple)]:
        expected, seen = plain(key[0]), set()
        for rank in ranks:
            for after, reference in zip(rank[key]["gradients"], expected, strict=True):
                for name, gradient in after.items():
                    seen.add(name)
                    if reference[name] is None:
                        assert gradient is None, (key, name)
                    else:
                        assert (gradient - reference[name]).norm() <= 1e-12 * reference[name].norm(), (key, name)
            assert all(rank[key]["in buckets"]), key
        assert seen == expected[0].keys(), key
        for names in tied_names(LAYERS[key[0]][1]):
            last = [rank[key]["gradients"][-1] for rank in ranks]
            first, *others = [after[name] for after in last for name in names if name in after]
            assert others and all(one is first is None or torch.equal(one, first) for one in others), key


def test_on_one_rank_it_is_one_parameter(ranks):
    assert [rank["one stage", "2 stages"]["parameters"] for rank in ranks] == [1, 1, 1, 1]
    assert [rank["two", "V"]["parameters"] for rank in ranks] == [1, 2, 1, 2]
    assert [rank["three", "4 stages"]["parameters"] for rank in ranks] == [1, 0, 1, 1]


def test_what_cannot_stay_equal_is_refused_on_every_rank(ranks):
    for rank in ranks:
        assert "found 0.weight in stages 0, 3 on ranks 0; leave out wrap" in rank["wrapped apart"]
        assert rank["stage 1"] == "nothing"
        assert "ValueError: expected 0.weight on rank 1 as 0.weight on rank 0" in rank["frozen early"]
        words = "ValueError: expected 0.weight and what is tied to it to stay the same Parameter objects, and trained"
        assert words in rank["frozen late"] and words in rank["replaced"]
        assert "RuntimeError: expected the gradient of 0.weight, which is tied to 3.weight" in rank["used up"]
        assert "take ZeroOptimizer's stage 1" in rank["used up"]


def test_copies_are_equal_after_loading_a_state_in_which_they_differ(ranks):
    for rank in ranks:
        error, every, first, after = rank["loaded"]
        assert every == first == after and set(every.values()) in ({1.0, 2.0}, {1.0, 3.0})
        assert "found one on rank 1 and none on rank 0" in error


@pytest.mark.parametrize("rank", range(4))
def test_holders_send_their_gradient_to_each_other_holder_and_nobody_else_sends(rank):
    made, ties = LAYERS["three"]
    plan = pp.plan_pipeline(made, pp.gpipe(4, 2), rows(0)[0], tied=ties)
    with imagined_ranks(4, rank):
        pipeline = pp.Pipeline(plan, F.mse_loss)
        with Traffic() as traffic:
            pipeline.tied.sum_gradients()
    assert traffic.sent_bytes == {0: 2, 1: 0, 2: 2, 3: 2}[rank] * BYTES
