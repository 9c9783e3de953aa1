"""The FP32 gradients of all chunks share one storage, which has bytes only while a step lasts."""

import pytest
import torch
from torch import nn, optim

from memlab.memory_timeline import Meter
from memlab.mixed_precision import MasterWeights, gradient_block
from memlab.mixed_precision.gradient_block import GradientBlock

BF16, CPU = torch.bfloat16, torch.device("cpu")


def storage(tensor):
    return tensor.untyped_storage()


def test_views_are_dense_in_the_masters_layout_apart_and_the_largest_first():
    given = [torch.zeros(5), torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.zeros(6, 7).T]
    given += [torch.zeros(0), torch.tensor(1.0)]
    block = GradientBlock(CPU)
    block.expect(200)
    found = block.views(given)
    assert [(v.shape, v.stride()) for v in found] == [(m.shape, m.stride()) for m in given]
    assert len({storage(v).data_ptr() for v in found}) == 1 and storage(found[0]).nbytes() == 4 * 200
    assert [v.storage_offset() for v in found] == [162, 0, 120, 168, 167]
    ids = list(map(id, found))
    block.end()
    assert storage(found[0]).nbytes() == 0
    del found
    again = block.views(given)
    assert list(map(id, again)) == ids
    kept = again[4].fill_(7.0)
    del again
    block.views([torch.zeros(300)])[0].fill_(8.0)
    assert kept == 7  # who holds a view past its chunk holds the storage


@pytest.mark.parametrize("resizable", [("cpu",), ()])
def test_a_step_holds_the_gradients_it_has_however_many_the_last_step_had(resizable, monkeypatch):
    monkeypatch.setattr(gradient_block, "RESIZABLE", resizable)
    model = nn.ParameterList([nn.Parameter(torch.ones(50, dtype=BF16)), nn.Parameter(torch.ones(30, dtype=BF16))])
    ours, found = MasterWeights(model.parameters(), optim.SGD), []
    for with_gradient in ([0, 1], [0, 1], [1], [0, 1]):
        for i, p in enumerate(model):
            p.grad = torch.ones_like(p) if i in with_gradient else None
        with Meter(model, ours) as meter:
            ours.step()
        found.append([event.delta for event in meter.timeline.events])
    assert found[1:] == [[4 * 80, -4 * 80], [4 * 30, -4 * 30], [4 * 80, -4 * 80]]
