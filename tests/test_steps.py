"""What one step of a model holds and computes, against a chain of linear layers whose figures are known."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from memlab.book.steps import metered_step, peaks_and_flops
from memlab.memory_arithmetic import Transformer
from memlab.memory_timeline import Meter, imagine

CARD = "H100-80GB"
SHAPE = Transformer(layers=5, width=64, heads=4, vocabulary=128, context=32)


def stage(rank, **options):
    """A metered step of one rank of four, on an imagined card: bytes at its begin, and the most activations."""
    how = {"precision": "mixed", "implementation": "fused", "micro_batches": 6, "pipeline_ranks": 4} | options
    with imagine(CARD):
        timeline = metered_step(SHAPE, 1, 32, pipeline_rank=rank, **how).on(f"imagined {CARD}")
    return timeline.bytes_by_category(0), max(timeline.curves["activation"])


class Squares(nn.Sequential):
    def forward(self, x):
        return super().forward(x).square().sum()


def test_the_second_peak_finds_the_gradients_that_the_first_step_made():
    model, x = Squares(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)), torch.randn(2, 64)
    (first, later), flops = peaks_and_flops(model, [x])
    found = []
    model.zero_grad()
    for _ in range(2):
        with Meter(model, inputs=[x]) as meter:
            loss = model(x)
            loss.backward()
        found.append(meter.timeline.peak_bytes)
    assert [first, later] == found
    # Both gradients are there when the last layer's is made anew, at which moment two activations more are held.
    assert later - first == 64 * 64 * 4 + 2 * x.nbytes
    products = 2 * 2 * 64 * 64  # of one product; the first layer's input wants no gradient
    elementwise = flops - 5 * products
    assert 0 < elementwise < products
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_all_stages_together_hold_the_whole_model_and_its_states_once_and_the_first_takes_the_block_too_many():
    held = [stage(rank)[0] for rank in range(4)]
    with imagine(CARD):
        whole = metered_step(SHAPE, 1, 32, precision="mixed", implementation="fused").on(f"imagined {CARD}")
    expected = whole.bytes_by_category(0)
    assert sum(one["parameter"] for one in held) == expected["parameter"] == 2 * SHAPE.parameters
    assert sum(one["optimizer_state"] for one in held) == expected["optimizer_state"]
    assert held[0]["parameter"] > held[1]["parameter"] == held[2]["parameter"] < held[3]["parameter"]
    assert [one["input"] for one in held] == [6 * 32 * 8, 0, 0, 6 * 32 * 8]


def test_gpipe_keeps_every_micro_batch_and_1f1b_on_the_last_stage_one():
    gpipe = [stage(3, schedule="GPipe", micro_batches=count)[1] for count in (4, 5, 6)]
    assert gpipe[2] - gpipe[1] == gpipe[1] - gpipe[0] > 0
    last = [stage(3, schedule="1F1B", micro_batches=count)[1] for count in (5, 6)]
    assert last[0] == last[1] < gpipe[0]
    assert stage(0, schedule="1F1B")[1] < stage(0, schedule="GPipe")[1]


def test_checkpoints_and_tensor_ranks_make_a_stage_smaller():
    plain_held, plain = stage(0, segments=None)
    assert stage(0, segments=2)[1] < stage(0, segments=1)[1] < plain
    held, most = stage(0, tensor_ranks=2)
    assert held["parameter"] < 0.6 * plain_held["parameter"] and most < plain
    assert stage(0, tensor_ranks=2, segments=2)[1] < most


IMPOSSIBLE = [
    ({"pipeline_ranks": 6}, r"at most as many pipeline_ranks as layers \(5\), found 6"),
    ({"pipeline_rank": 4}, r"expected 0 ≤ pipeline_rank < 4 \(pipeline_ranks\), found 4"),
    ({"schedule": "2F2B"}, "expected .*schedule.*2F2B"),
    ({"ranks": 2}, "expected pipeline_ranks without ranks"),
    ({"offload": "states"}, "expected pipeline_ranks without offload"),
    ({"precision": "autocast"}, "expected pipeline_ranks without autocast"),
    ({"tensor_ranks": 2, "sequence_parallel": True}, "expected pipeline_ranks without sequence_parallel"),
    ({"segments": 3}, r"at most as many segments as layers \(2\), found 3"),
    ({"pipeline_ranks": 1, "ranks": 0}, "expected ranks of at least 1, found 0"),
    ({"pipeline_ranks": 1, "ranks": 2, "stage": 4}, "expected stage to be one of 0, 1, 2, 3; found 4"),
    ({"pipeline_ranks": 1, "ranks": 2, "stage": -1}, "expected stage to be one of 0, 1, 2, 3; found -1"),
]


@pytest.mark.parametrize(("options", "message"), IMPOSSIBLE)
def test_a_pipeline_ranks_and_a_stage_that_cannot_be_are_refused(options, message):
    if "pipeline_ranks" not in options:
        options = {"pipeline_ranks": 4, "micro_batches": 4} | options
    with pytest.raises(ValueError, match=message):
        metered_step(SHAPE, 1, 32, **options)


def test_a_llama_and_a_tied_head_are_no_pipeline_here():
    for other in (replace(SHAPE, family="llama"), replace(SHAPE, tied=True)):
        with pytest.raises(ValueError, match="expected sizes of the book's GPT"):
            metered_step(other, 1, 32, pipeline_ranks=2)
