"""A parameter larger than a chunk is stepped slice by slice: to the same bits, with whole states, from one slice's FP32
gradients."""

import copy

import torch
from torch import nn, optim

from memlab.memory_timeline import Meter
from memlab.mixed_precision import MasterWeights
from tests.test_mixed_precision_flat_group import give_gradients
from tests.test_mixed_precision_master_weights import assert_same

BF16 = torch.bfloat16


def pair(shapes, kind=optim.AdamW, chunk_bytes=1000, **options):
    """16-bit parameters and their optimizer; the same in FP32 and torch's. Those of 64 × 64 lie column by column."""
    params = [nn.Parameter(torch.randn(shape).to(BF16)) for shape in shapes]
    params = [nn.Parameter(p.detach().t()) if p.shape == (64, 64) else p for p in params]
    wide = [nn.Parameter(p.detach().float()) for p in params]
    return MasterWeights(params, kind, chunk_bytes=chunk_bytes, **options), params, kind(wide, **options), wide


def test_a_step_in_slices_goes_on_from_one_that_had_none_from_a_state_dict_and_with_states_that_come_later():
    ours, params, reference, wide = pair([(77, 13), (64, 64), (32, 128), (16,)], optim.SGD, lr=0.1)
    for step, chunk_bytes in enumerate([1000, None, 64, "auto", 5000]):
        ours.chunk_bytes = chunk_bytes
        for optimizer in (ours, reference):
            optimizer.param_groups[0]["momentum"] = 0.9 * (step > 0)
        give_gradients(params, step)
        for p, q in zip(params, wide, strict=True):
            p.grad = torch.empty_like(p).copy_(p.grad)  # in the parameter's order of dimensions
            q.grad = p.grad.float()
        ours.step()
        reference.step()
        assert_same(ours, params, reference, wide)
        saved = copy.deepcopy(ours.state_dict())
        ours = MasterWeights(params, optim.SGD, chunk_bytes=chunk_bytes)
        ours.load_state_dict(saved)


def test_a_step_holds_the_fp32_gradients_of_one_slice_and_two_of_its_temporaries():
    count = 40 * 2**10
    ours, params, _, _ = pair([(40, 1024)], chunk_bytes=16 * 2**10)
    give_gradients(params, 0)
    ours.step()
    with Meter(nn.ParameterList(params), ours) as meter:
        ours.step()
    kept = count * (2 + 2 + 4 + 8) + 4
    assert meter.timeline.peak_bytes == kept + 3 * 16 * 2**10 + 4  # √v, √v divided, and a counter
