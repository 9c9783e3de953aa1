"""Predictions as pictures: ceilings lie where the curve touches them, and every place of the sliders adds up."""

import dataclasses
import itertools

import pytest
import torch

from memlab.book import predictions
from memlab.book.predictions import (
    SLIDERS,
    Asked,
    capacities,
    measured_moments,
    moments_table,
    predicted_and_measured,
    stretches,
    terms,
    what_if,
)
from memlab.book.steps import build, metered_step
from memlab.memory_arithmetic import PRESETS, Transformer, training_step
from memlab.memory_timeline import Meter, imagine
from memlab.units import format_bytes
from tests.memory_timeline_helpers import one_thread  # noqa: F401

GPT = Transformer(3, 32, 4, 64, 16)
LLAMA = Transformer(3, 32, 4, 64, 16, kv_heads=2, hidden=48, family="llama")


@pytest.mark.parametrize("model", [GPT, LLAMA, dataclasses.replace(GPT, layers=1)], ids=["GPT", "Llama", "one block"])
@pytest.mark.parametrize("first_step", [False, True])
def test_every_moment_is_predicted_to_the_byte_and_lies_in_its_own_stretch(model, first_step):
    step = training_step(model, 2, 16, hardware="cpu", first_step=first_step)
    timeline = metered_step(model, 2, 16, first_step=first_step)
    measured = measured_moments(timeline, model)
    assert measured == {name: step.moment(name).nbytes for name in measured}
    assert max(measured.values()) == timeline.peak_bytes
    places = list(stretches(timeline, model).values())
    assert all(start <= stop for start, stop in places)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(places))
    assert places[0][0] == 0 and places[-1][1] == len(timeline)
    assert {row[-1] for row in moments_table(step, timeline).rows} == {0}


@pytest.mark.parametrize("options", [{"optimizer": "sgd"}, {"implementation": "fused"}], ids=str)
def test_a_moment_in_which_nothing_is_made_is_as_full_as_what_was_there_before(options):
    step, timeline = training_step(GPT, 2, 16, hardware="cpu", **options), metered_step(GPT, 2, 16, **options)
    assert {row[-1] for row in moments_table(step, timeline).rows} == {0}


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_a_step_of_a_model_with_other_blocks_has_no_stretches(layers):
    with pytest.raises(ValueError, match="expected one metered step of .*layers=.*; found Timeline"):
        stretches(metered_step(GPT, 2, 16), dataclasses.replace(GPT, layers=layers))


def test_what_is_no_training_step_has_no_stretches():
    with Meter() as meter:
        torch.ones(3)
    with pytest.raises(ValueError, match="expected one metered step of .*: forward, backward, optimizer"):
        stretches(meter.timeline, GPT)


def test_the_picture_says_every_moment_and_draws_a_ceiling_for_each():
    step, timeline = training_step(GPT, 2, 16, hardware="cpu"), metered_step(GPT, 2, 16)
    picture = predicted_and_measured(step, timeline)
    for name in stretches(timeline, GPT):
        assert f"{name} {format_bytes(step.moment(name).nbytes)}" in picture.alt
    _, *ceilings = picture.figure.axes[0].lines
    assert len(ceilings) == 6
    assert picture.png().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "options", [{}, {"precision": "bf16", "implementation": "fused"}, {"precision": "autocast"}, {"precision": "mixed"}]
)
def test_the_step_can_be_imagined_too(options):
    with imagine("H100-80GB"):
        timeline = metered_step(GPT, 2, 16, **options)
    predicted = training_step(GPT, 2, 16, **options).peak_bytes
    assert timeline.peak_bytes == predicted
    assert torch.get_default_dtype() is torch.float32


def test_terms_are_listed_from_the_largest_and_the_rest_is_summed():
    step = training_step(GPT, 2, 16)
    table = terms(step.peak, top=3)
    assert len(table.rows) == 4 and table.rows[-1][2] == f"… {len(step.peak) - 3} more"
    assert len(terms(step.peak).rows) == len(step.peak)
    largest = max(step.peak, key=lambda term: term.nbytes)
    assert table.rows[0] == [
        format_bytes(largest.nbytes),
        largest.category.replace("_", " "),
        largest.name,
        largest.formula,
        largest.source,
    ]


def test_what_has_no_model_in_the_book_is_refused():
    with pytest.raises(ValueError, match="dataclasses.replace"):
        build(PRESETS["GPT-2 small"])
    with pytest.raises(ValueError, match="expected precision to be one of .*'mixed'.*; found 'fp8'"):
        metered_step(GPT, 1, 8, precision="fp8")


# ---- what if


def test_wherever_the_sliders_stand_the_prediction_adds_up():
    grid = list(itertools.product(*SLIDERS.values()))
    corners = itertools.product(*((values[0], values[-1]) for values in SLIDERS.values()))
    for values in [*corners, *grid[:: len(grid) // 500]]:
        step = Asked(*values).step()
        assert step.peak_bytes == sum(step.peak.by_category().values()) == max(m.nbytes for m in step.moments)
        assert step.peak_bytes > step.parameters.nbytes > 0


def test_the_bars_say_what_was_asked_and_which_card_holds_it():
    sliders = what_if(layers=2, width=256, tokens=256, batch=1)
    assert "0.03 billion parameters" in sliders.picture.figure.axes[0].get_title(loc="left")
    assert "which fits T4-16GB" in sliders.picture.figure.axes[0].get_title(loc="left")
    imagined = sliders.at(**sliders.start | {"imagined": True})
    assert "imagined: " in imagined.alt and "imagined: " not in sliders.picture.alt
    large = sliders.at(**sliders.start | {"layers": 96, "width": 12288})
    assert "which fits none of the cards" in large.figure.axes[0].get_title(loc="left")
    assert "H200-141GB" in large.alt
    thick = sliders.at(**sliders.start | {"width": 2048, "heads": 4})
    assert "no fused kernel for heads of 512" in thick.figure.axes[0].get_title(loc="left")
    mixed = Asked(2, 256, 16, 256, 1, "mixed", "adamw")
    imagined = {name: nbytes for name, nbytes in predictions._imagined(mixed).items() if nbytes}
    assert imagined == mixed.step().peak.by_category()


def test_the_sliders_begin_where_they_are_told_to_or_say_where_they_may():
    assert what_if(layers=2, width=256, imagined=True).start["imagined"] is True
    with pytest.raises(TypeError, match="expected sliders among layers, .*, imagined; found 'widht'"):
        what_if(widht=256)
    with pytest.raises(ValueError, match=r"expected layers to start at one of \[2, .*\], found 5"):
        what_if(layers=5)


def test_the_cards_are_in_order_of_their_capacity():
    assert list(capacities().values()) == sorted(capacities().values())
    assert len(capacities()) == 5
