"""The FP32 gradients of all chunks share one storage, which has bytes only while a step lasts."""

import pytest
import torch
from torch import nn, optim

from memlab.memory_timeline import Meter
from memlab.mixed_precision import MasterWeights, gradient_block

BF16 = torch.bfloat16


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
