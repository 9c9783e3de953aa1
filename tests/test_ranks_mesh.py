"""A mesh of ranks: who is together along each axis, and what is refused."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import distributed

from memlab.memory_timeline import Meter, imagine
from memlab.ranks import Traffic, imagined_ranks, mesh, mesh_groups, one_rank
from tests.harness import refusals, refused

MESHES = [
    {"data": 2, "pipeline": 2, "tensor": 2},
    {"tensor": 2, "data": 3},
    {"pipeline": 4, "data": 1, "tensor": 2},
]


def members(made, axis: str) -> list[int]:
    return distributed.get_process_group_ranks(made.get_group(axis))


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_the_groups_in_words_are_those_that_pytorch_makes_on_every_rank(axes):
    groups, ranks = mesh_groups(axes), math.prod(axes.values())
    for rank in range(ranks):
        with imagined_ranks(ranks, rank):
            made = mesh(**axes)
            assert made.mesh_dim_names == tuple(axes) == tuple(groups) and made.shape == tuple(axes.values())
            for axis in axes:
                mine = members(made, axis)
                assert mine in groups[axis] and mine[made.get_local_rank(axis)] == rank
    for axis, size in axes.items():
        assert {len(group) for group in groups[axis]} == {size}
        assert sorted(sum(groups[axis], [])) == list(range(ranks))


def test_a_size_of_minus_one_is_what_is_left():
    with imagined_ranks(8):
        assert mesh(data=-1, tensor=2).shape == (4, 2)
        assert mesh(data=8, tensor=-1).shape == (8, 1)


SIZES = {
    "none": ({}, "expected at least one axis and its size, as mesh(data=2, tensor=2), found none"),
    "zero": ({"data": 0}, "expected a number of ranks along data, 1 or more, found 0"),
    "a fraction": ({"data": 2.0}, "found 2.0"),
    "a yes": ({"data": True}, "found True"),
    "two left": ({"data": -1, "tensor": -1}, "expected one axis of -1, which is what is left, found data and tensor"),
    "too few": ({"data": 2, "tensor": 2}, "is 8, the number of ranks, found data=2 · tensor=2; take sizes"),
    "neither": ({"data": 3, "tensor": 5}, "sizes whose product divides 8 (1, 2, 4, 8), and -1 for what is left, or"),
    "left of none": ({"data": -1, "tensor": 3}, "sizes whose product divides 8 (1, 2, 4, 8), and -1"),
}


@pytest.mark.parametrize(("axes", "words"), SIZES.values(), ids=SIZES)
def test_sizes_that_do_not_make_the_ranks_are_refused_and_the_error_says_which_would(axes, words):
    with imagined_ranks(8):
        refused(lambda: mesh(**axes), ValueError, words)


def within(group):
    with group:
        pass


@refusals(
    {
        "no axes": (lambda: mesh_groups({}), ValueError, "expected at least one axis"),
        "what is left": (lambda: mesh_groups({"data": -1}), ValueError, "1 or more, found -1"),
        "no process group": (lambda: mesh(data=1), RuntimeError, "run_ranks(fn, 4)"),
        "words": (lambda: within(imagined_ranks("4")), TypeError, "expected world as a whole number, found '4'"),
        "a fraction": (lambda: within(imagined_ranks(4, 1.0)), TypeError, "expected rank as a whole number, found 1.0"),
        "rank 2": (lambda: within(imagined_ranks(2, 2)), ValueError, "expected 0 ≤ rank < world, found rank 2 of 2"),
        "rank -1": (lambda: within(imagined_ranks(2, -1)), ValueError, "expected 0 ≤ rank < world, found rank -1"),
        "a TPU": (lambda: within(one_rank("tpu")), ValueError, "expected device \"cpu\"…found 'tpu'; leave it out"),
    }
)
def test_ranks_that_cannot_be_are_refused(call, error, words):
    refused(call, error, words)


@pytest.mark.parametrize("rank", [0, 6])
def test_on_imagined_hardware_a_mesh_is_real_and_neither_meter_nor_traffic_sees_it(rank):
    with imagine("H100-80GB"), imagined_ranks(8, rank), Meter() as meter, Traffic() as traffic:
        made = mesh(data=2, pipeline=-1, tensor=2)
        x = torch.ones(6)
        distributed.all_reduce(x, group=made.get_group("pipeline"))
    assert type(made.mesh) is torch.Tensor and made.mesh.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert made.get_coordinate() == tuple(int(digit) for digit in f"{rank:03b}")
    assert meter.timeline.peak_bytes == x.nbytes == 24
    assert [(record.name, record.ranks) for record in traffic.records] == [("all_reduce", 2)]


@pytest.mark.parametrize(
    "group", [lambda: one_rank("cpu"), lambda: imagined_ranks(64, 2)], ids=["one rank", "imagined"]
)
def test_a_group_ends_with_its_block_after_an_error_or_if_the_block_ends_it_itself_and_takes_no_other_over(group):
    hook = sys.excepthook
    with group() as made:
        assert distributed.get_world_size() == made.size() and distributed.get_rank() in (0, 2)
        assert made.device_type == mesh(data=-1).device_type == "cpu"
        refused(lambda: within(group()), RuntimeError, "expected no process group")
        assert distributed.is_initialized()
    for early in (False, True):
        with pytest.raises(ZeroDivisionError), group():
            if early:
                distributed.destroy_process_group()
            _ = 1 / 0
        assert sys.excepthook is hook and not distributed.is_initialized()
