"""DataParallel: gradients that somebody keeps, models that are wrapped again, and what is refused at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memlab.data_parallelism import DataParallel, ring_all_reduce
from memlab.ranks import imagined_ranks, run_ranks

RANKS = 2


def row(rank: int, n: int = 2) -> torch.Tensor:
    return torch.full((1, n), rank + 1.0)


def layers() -> nn.Sequential:
    """Two layers of weights 1, the last in the first bucket."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    for p in model.parameters():
        nn.init.ones_(p)
    return model


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


def all_facts(rank):
    return {
        "again": wrapped_again(rank),
        "part": a_part_wrapped_again(rank),
        "double": of_double(rank, ring_all_reduce),
    }


@pytest.fixture(scope="module")
def facts():
    return run_ranks(all_facts, RANKS)


def test_a_model_that_is_wrapped_again_is_averaged_once_and_the_old_wrapper_says_that_it_is_closed(facts):
    for rank in facts:
        gradient, said = rank["again"]
        assert gradient == [[3.0, 3.0]] * 2
        assert "found a closed one (by close(), or by a newer wrapper" in said


def test_a_part_that_is_wrapped_by_itself_closes_the_wrapper_of_the_whole(facts):
    for rank in facts:
        assert rank["part"] == ([[1.5, 1.5]] * 2, True, False)


def test_a_ring_has_scratch_for_a_model_whose_dtype_was_changed(facts):
    for rank in facts:
        assert rank["double"] == [[3.0, 3.0]] * 2


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


def test_gradients_of_another_dtype_than_their_parameter_are_refused():
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    with imagined_ranks(RANKS):
        model.bias.grad_dtype = None
        DataParallel(model).close()
        model.bias.grad_dtype = torch.float32
        with pytest.raises(ValueError, match="bias of torch.bfloat16 with a grad_dtype of torch.float32"):
            DataParallel(model)
