"""Chains of stages are the models they are cut from, and the picture of equal segments says what the formula says."""

import pytest
import torch

from memlab.book.segments import draw_segments, explore_segments
from memlab.book.stages import gpt_stages, vgg_stages
from memlab.book.workloads import GPT
from memlab.gradient_checkpointing import segmented_bytes


@pytest.mark.parametrize("sizes", [{}, {"attention": "by hand"}, {"dropout": 0.1}])
def test_the_stages_of_a_gpt_one_after_another_are_the_gpt(sizes):
    torch.manual_seed(0)
    model = GPT(layers=3, width=32, heads=2, context=16, **sizes)
    x, y = (torch.randint(256, (2, 16)) for _ in "xy")
    stages = gpt_stages(model, y)
    assert len(stages) == 2 * 3 + 2
    assert {id(p) for p in stages.parameters()} == {id(p) for p in model.parameters()}
    found = []
    for run in (lambda: model(x, y), lambda: torch.nn.Sequential(*stages)(x)):
        torch.manual_seed(1)
        model.zero_grad()
        loss = run()
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    assert all(map(torch.equal, *found))


def test_the_stages_of_a_vgg_halve_their_maps_three_times_and_end_in_a_loss():
    stages, x = vgg_stages(torch.tensor([3, 1]), side=32), torch.randn(2, 3, 32, 32)
    assert len(stages) == 13
    shapes = []
    for stage in stages:
        x = stage(x)
        shapes.append(tuple(x.shape[1:]))
    assert shapes[:4] == [(8, 32, 32)] * 3 + [(8, 16, 16)] and shapes[-2:] == [(32, 4, 4), ()]


def test_the_picture_of_segments_marks_the_least_and_the_root():
    picture = draw_segments(1600, 100, layers=64, metered={(64, 8): 13_500, (16, 4): 7})
    assert "√(L · s / c) = 32" in picture.alt and "with 40" in picture.alt
    assert "√L, 8 segments" in picture.alt and "Crosses mark 1 metered" in picture.alt
    assert "Crosses" not in draw_segments(1600, 100, layers=16).alt


def test_the_slider_of_depths_begins_at_sixteen_layers_and_every_depth_is_drawn():
    explored = explore_segments(1600, 100, {(16, 16): segmented_bytes(16, 16, 1600, 100)}, depths=(4, 16, 128))
    assert explored.start == {"layers": 16}
    for values in explored.grid():
        assert explored.at(**values).png().startswith(b"\x89PNG")
