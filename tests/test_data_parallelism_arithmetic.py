"""Chapter 13's formulas: against layouts cut by hand, rings stepped by hand, and one device's closed form."""

import pytest

from memlab.data_parallelism import FlatLayout, rank_bytes, rank_step, ring_seconds, tokens_to_hide, traffic_bytes
from memlab.data_parallelism.arithmetic import STAGES, sent_bytes, transient_bytes
from memlab.data_parallelism.overlap import exposed_seconds, sent_beside
from memlab.memory_arithmetic import Transformer, training_step
from tests.harness import refusals, refused

SHAPE = Transformer(layers=3, width=64, heads=2, vocabulary=256, context=32)


def test_zeros_own_table_is_reproduced():
    how = {"weight_bytes": 2, "gradient_bytes": 2, "state_bytes": 12}
    found = [rank_bytes([[7_500_000_000]], 64, stage, **how).nbytes / 1e9 for stage in STAGES]
    assert found == pytest.approx([16 * 7.5, (4 + 12 / 64) * 7.5, (2 + 14 / 64) * 7.5, 16 / 64 * 7.5], rel=1e-12)


def test_a_number_a_list_and_a_list_of_lists_are_one_bucket_and_several():
    assert rank_bytes([[10]], 4, 3) == rank_bytes([[6, 4]], 4, 3)
    assert rank_bytes([[6], [4]], 4, 3).parameters == 4 * (2 + 1) and rank_bytes([], 4, 3).nbytes == 0
    # a model smaller than the ranks leaves some with padding only
    assert rank_bytes([[3]], 8, 3, rank=7) == (4, 4, 0) and rank_bytes([[3]], 8, 3, rank=0) == (4, 4, 8)
    assert rank_bytes([[3]], 8, 3, rank=7).by_category() == {"parameter": 4, "gradient": 4, "optimizer_state": 0}


@refusals(
    {
        "stage 4": (
            lambda: rank_bytes([[8]], 2, 4),
            ValueError,
            "expected stage 0 (data parallel), 1, 2 or 3",
        ),
        "no ranks": (lambda: rank_bytes([[8]], 0, 1), ValueError, "expected ranks of at least 1, found 0"),
        "no ranks in a layout": (lambda: FlatLayout([], 0), ValueError, "expected at least one rank, found 0"),
        "a rank too many": (
            lambda: rank_bytes([[8]], 2, 1, rank=2),
            ValueError,
            "a rank from 0 to 1, found 2",
        ),
        "no padding": (lambda: sent_bytes(10, 4), ValueError, "bytes that 4 ranks divide, found 10"),
        "micro_batches": (lambda: traffic_bytes(8, 8, 2, 0, micro_batches=0), ValueError, "micro_batches of at least"),
        "no link": (lambda: ring_seconds(8, 2, 0.0), ValueError, "bytes_per_second above 0"),
        "latency": (lambda: ring_seconds(8, 2, 1.0, -1.0), ValueError, "latency_seconds of at least 0"),
        "a phase": (lambda: sent_beside(1, "optimizer"), ValueError, "expected phase to be one of"),
    }
)
def test_bad_input_is_refused_with_what_was_expected(call, error, words):
    refused(call, error, words)


def test_stage_3_sends_half_as_much_again_and_with_micro_batches_stages_2_and_3_speak_each_time():
    whole, m = 8 * 1024, 5
    once = [traffic_bytes(whole, whole, 8, stage) for stage in STAGES]
    assert once[:3] == [2 * 7 * 1024] * 3 and once[3] == 1.5 * once[0]
    assert traffic_bytes(whole, whole, 8, 3, kept_bytes=whole) == once[0]  # if no unit is resharded
    found = [traffic_bytes(whole, whole, 8, stage, micro_batches=m) for stage in STAGES]
    assert found == [once[0], once[1], (m + 1) * sent_bytes(whole, 8), m * once[3]]


def test_whole_at_once_are_the_root_and_neighbouring_units_and_gradients_of_a_unit_and_a_tensor_more():
    units = [[7], [1], [20], [3]]
    pad = lambda *sizes: sum(-(-n // 4) * 4 for n in sizes)  # noqa: E731
    assert transient_bytes(units, 4, root=[5]) == (4 * pad(5, 20, 3), 4 * (20 + 20))
    assert transient_bytes(units, 4, weight_bytes=2) == (2 * pad(20, 3), 4 * (20 + 20))
    assert transient_bytes([], 4, root=[5]) == (32, 0)


@pytest.mark.parametrize("stage", STAGES)
def test_at_the_tokens_that_hide_a_stage_no_phase_is_shorter_than_what_it_sends(stage):
    flops, link, parameters, ranks = 400e12, 50e9, 10**9, 16
    for bytes_each in ({"gradient_bytes": 2}, {"gradient_bytes": 4}):
        tokens = tokens_to_hide(flops, link, ranks, stage, **bytes_each)
        slack = []
        for phase, work in (("forward", 2), ("backward", 4)):
            sent = ring_seconds(sent_beside(stage, phase, **bytes_each) * parameters, ranks, link) / 2
            slack.append(work * parameters * tokens / flops - sent)
        assert min(slack) == pytest.approx(0, abs=1e-12) and max(slack) > -1e-12


def test_a_ring_with_latency_is_the_sum_of_its_steps():
    steps = [1e-5 + (1000 / 5) / 1e6 for _ in range(2 * 4)]
    assert ring_seconds(1000, 5, 1e6, 1e-5) == pytest.approx(sum(steps))
    assert ring_seconds(1000, 1, 1e6, 1e-5) == 0


def test_of_buckets_on_a_fast_link_the_last_is_waited_for_and_on_a_slow_one_nearly_all():
    buckets = [10**6] * 10
    one = ring_seconds(10**6, 8, 1e9)
    assert exposed_seconds(buckets, 100 * one, 8, 1e9) == pytest.approx(one)
    slow = exposed_seconds(buckets, 1e-6, 8, 1e9)
    assert slow == pytest.approx(10 * one + 1e-7 - 1e-6)
    assert exposed_seconds(buckets, 1.0, 1, 1e9) == 0


@pytest.mark.parametrize("how", [{}, {"precision": "mixed", "segments": 3}, {"precision": "autocast"}])
def test_on_one_rank_data_parallel_is_the_step_of_one_device(how):
    step = training_step(SHAPE, 4, 32, implementation="fused", **how)
    on_rank = rank_step(step, 1, 0)
    assert on_rank.nbytes == step.peak_bytes and on_rank.moment == step.peak.moment
    assert on_rank.by_category() == step.peak.by_category()


def test_the_storys_model_has_its_states_divided():
    story = Transformer(layers=24, width=2048, heads=16, vocabulary=256, context=1024)

    def step_of(texts):
        return training_step(story, texts, 1024, precision="mixed", implementation="fused", segments=24)

    parts = {stage: rank_step(step_of(8), 8, stage).by_category() for stage in STAGES}
    assert parts[0] == step_of(8).peak.by_category()
    assert parts[1] == parts[0] | {"optimizer_state": 12 * story.parameters // 8 + 4 * story.parameter_tensors}
    peaks = [sum(parts[stage].values()) for stage in STAGES]
    assert peaks == sorted(peaks, reverse=True) and peaks[0] > 16 * 2**30 > peaks[1]
