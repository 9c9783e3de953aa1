"""DataParallel: gradients that somebody keeps, models that are wrapped again, and what is refused at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memlab.data_parallelism import DataParallel, fully_shard, ring_all_reduce
from memlab.ranks import imagined_ranks, run_ranks
from tests.ranks_helpers import FailsInBackward

RANKS = 2
WAYS = {"at once": 2**20, "each alone": 1}
SYNCS = (True, False)


def row(rank: int, n: int = 2) -> torch.Tensor:
    return torch.full((1, n), rank + 1.0)


def layers() -> nn.Sequential:
    """Two layers of weights 1, the last in the first bucket."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    for p in model.parameters():
        nn.init.ones_(p)
    return model


def kept_through_zero_grad(rank, bucket_bytes, syncing):
    """One forward, and a backward for each of two losses, the second of the last layer only; and both gradients."""
    model = layers()
    replica = DataParallel(model, bucket_bytes)
    hidden = replica.module[0](row(rank))
    replica.train()
    output = replica(row(rank))
    replica._averaging.syncing = syncing
    output[0, 0].backward(retain_graph=True)
    first = [p.grad for p in model.parameters()]
    values = [gradient.clone() for gradient in first]
    model.zero_grad()
    model[1](hidden.detach())[0, 1].backward()
    return [torch.equal(kept, value) for kept, value in zip(first, values, strict=True)], model[1].weight.grad.tolist()


def wrapped_again(rank):
    """A cell that is run twice, while something holds the first wrapper; then the first one's use."""
    model = layers()
    first = DataParallel(model)
    first(row(rank)).sum().backward()
    model.zero_grad()
    second = DataParallel(model)
    second(row(rank)).sum().backward()
    try:
        first(row(rank))
    except RuntimeError as error:
        return model[1].weight.grad.tolist(), str(error)


def a_part_wrapped_again(rank):
    model = layers()
    whole, part = DataParallel(model), DataParallel(model[1])
    part(row(rank)).sum().backward()
    return model[1].weight.grad.tolist(), whole._averaging.closed, part._averaging.closed


def of_double(rank, all_reduce):
    """A model that became FP64 after it was wrapped: its pieces are twice as large."""
    model = layers()
    replica = DataParallel(model, 1, all_reduce).double()
    replica(row(rank).double()).sum().backward()
    return model[1].weight.grad.tolist()


def raised_before_the_first_gradient(rank, all_reduce):
    """Rank 1's backward raises once in the model's last operation; then two steps as ever, of other rows each."""
    model, found = layers(), []
    replica = DataParallel(nn.ModuleDict({"body": model}), 16, all_reduce)
    replica.module.forward = lambda x, broken: (FailsInBackward.apply if broken else torch.clone)(model(x)).sum()
    for step in range(3):
        try:
            loss = replica(row(rank) * 10**step, step == 0 and rank == 1)
            loss.backward()
        except ArithmeticError:
            found.append("raised")
        else:
            found.append(model[1].weight.grad.tolist()[0] if step else "ended")
        replica.zero_grad()
    return found


def slopes(rank):
    """torch.autograd.grad, of inputs, on one rank: nothing is sent, and no gradient is there."""
    model = layers()
    replica = DataParallel(model)
    if rank == 1:
        x = row(rank).requires_grad_()
        torch.autograd.grad(replica(x).sum(), x)
    before = [p.grad for p in model.parameters()]
    replica(row(rank)).sum().backward()
    return before, model[1].weight.grad.tolist()[0]


def all_facts(rank):
    return {
        "kept": {(way, sync): kept_through_zero_grad(rank, WAYS[way], sync) for way in WAYS for sync in SYNCS},
        "again": wrapped_again(rank),
        "part": a_part_wrapped_again(rank),
        "double": of_double(rank, ring_all_reduce),
        "raised": [raised_before_the_first_gradient(rank, how) for how in (None, ring_all_reduce)],
        "slopes": slopes(rank),
    }


@pytest.fixture(scope="module")
def facts():
    return run_ranks(all_facts, RANKS)


@pytest.mark.parametrize("syncing", SYNCS)
@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_that_is_kept_through_zero_grad_stays_as_it_was(facts, way, syncing):
    for rank, found in enumerate(facts):
        same, second = found["kept"][way, syncing]
        mean = 3.0 if syncing else 2.0 * (rank + 1)
        assert same == [True, True] and second == [[0.0, 0.0], [mean, mean]]


def test_a_model_that_is_wrapped_again_is_averaged_once_and_the_old_wrapper_says_that_it_is_closed(facts):
    for rank in facts:
        gradient, said = rank["again"]
        assert gradient == [[3.0, 3.0]] * 2
        assert "found a closed one (by close(), or by a newer wrapper" in said


def test_a_part_that_is_wrapped_by_itself_closes_the_wrapper_of_the_whole(facts):
    for rank in facts:
        assert rank["part"] == ([[1.5, 1.5]] * 2, True, False)


def test_after_a_backward_that_raised_before_its_first_gradient_ranks_are_in_step(facts):
    for number in range(2):
        found = [rank["raised"][number] for rank in facts]
        assert found == [[how, [30.0, 30.0], [300.0, 300.0]] for how in ("ended", "raised")]


def test_the_gradients_of_inputs_on_one_rank_begin_nothing(facts):
    assert [rank["slopes"] for rank in facts] == [([None, None], [3.0, 3.0])] * RANKS


def test_a_ring_has_scratch_for_a_model_whose_dtype_was_changed(facts):
    for rank in facts:
        assert rank["double"] == [[3.0, 3.0]] * 2


def test_a_gradient_with_a_graph_is_refused_since_an_average_has_none():
    with imagined_ranks(RANKS):
        model = nn.Linear(2, 1, bias=False)
        replica = DataParallel(model)
        with pytest.raises(RuntimeError, match=r"a graph.*\(1, 2\).*torch.autograd.grad\(..., create_graph=True\)"):
            replica(torch.ones(3, 2)).square().sum().backward(create_graph=True)
        model.zero_grad()
        loss = replica(torch.ones(3, 2)).square().sum()
        (slope,) = torch.autograd.grad(loss, model.weight, create_graph=True)
        (loss + slope.square().sum()).backward()
        assert model.weight.grad.grad_fn is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_after_zero_grad_evaluation_gives_the_buckets_back_and_without_it_keeps_the_gradients(mode):
    with imagined_ranks(RANKS):
        model = layers()
        replica = DataParallel(model)
        replica(row(0)).sum().backward()
        with mode():
            replica(row(0))
        assert all(p.grad is not None for p in model.parameters()) and replica.buckets[0].flat is not None
        model.zero_grad()
        with mode():
            replica(row(0))
        assert replica.buckets[0].flat is None
        replica(row(0)).sum().backward()


def test_a_sparse_buffer_is_refused_since_other_ranks_have_no_place_for_its_numbers():
    with imagined_ranks(RANKS):
        model = nn.Linear(2, 2)
        model.register_buffer("adjacency", torch.eye(3).to_sparse())
        with pytest.raises(TypeError, match=r"dense tensors.*torch.sparse_coo and shape \(3, 3\).*to_dense"):
            DataParallel(model)


def test_parameters_and_buffers_without_memory_are_refused_by_name():
    buffered = nn.Linear(2, 2)
    buffered.register_buffer("table", torch.empty(3, device="meta"))
    with imagined_ranks(RANKS):
        for model, name in (
            (nn.LazyLinear(3), "weight"),
            (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")), "1.weight"),
            (buffered, "table"),
        ):
            with pytest.raises(ValueError, match=f"with memory, found none at {name}; initialise it first"):
                DataParallel(model)
            if model is not buffered:
                with pytest.raises(ValueError, match="with memory, found none at weight; initialise it first"):
                    fully_shard(model)


def test_gradients_of_another_dtype_than_their_parameter_are_refused():
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    with imagined_ranks(RANKS):
        model.bias.grad_dtype = None
        DataParallel(model).close()
        model.bias.grad_dtype = torch.float32
        for wrapped in (DataParallel, fully_shard):
            with pytest.raises(ValueError, match="bias of torch.bfloat16 with a grad_dtype of torch.float32"):
                wrapped(model)
