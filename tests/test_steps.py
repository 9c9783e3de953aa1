"""What one step of a model holds and computes, against a chain of linear layers whose figures are known."""

import torch
from torch import nn

from memlab.book.steps import peaks_and_flops
from memlab.memory_timeline import Meter


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
