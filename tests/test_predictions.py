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
from tests.harness import refusals, refused
from tests.memory_timeline_helpers import one_thread  # noqa: F401
from tests.tiers import some

GPT = Transformer(3, 32, 4, 64, 16)
LLAMA = Transformer(3, 32, 4, 64, 16, kv_heads=2, hidden=48, family="llama")
SHALLOW = dataclasses.replace(GPT, layers=1)


STEPS = [(model, {"first_step": first}) for model in (GPT, LLAMA, SHALLOW) for first in (False, True)]
NOTHING_MADE = [(GPT, {"optimizer": "sgd"}), (GPT, {"implementation": "fused"})]  # where the optimizer steps


@pytest.mark.parametrize(("model", "options"), STEPS + NOTHING_MADE, ids=str)
def test_every_moment_is_predicted_to_the_byte_and_lies_in_its_own_stretch(model, options):
    step = training_step(model, 2, 16, hardware="cpu", **options)
    timeline = metered_step(model, 2, 16, **options)
    measured = measured_moments(timeline, model)
    assert measured == {name: step.moment(name).nbytes for name in measured}
    assert max(measured.values()) == timeline.peak_bytes
    places = list(stretches(timeline, model).values())
    assert all(start <= stop for start, stop in places)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(places))
    assert places[0][0] == 0 and places[-1][1] == len(timeline)
    assert {row[-1] for row in moments_table(step, timeline).rows} == {0}


def test_the_picture_says_every_moment_and_draws_a_ceiling_for_each():
    step, timeline = training_step(GPT, 2, 16, hardware="cpu"), metered_step(GPT, 2, 16)
    picture = predicted_and_measured(step, timeline)
    for name in stretches(timeline, GPT):
        assert f"{name} {format_bytes(step.moment(name).nbytes)}" in picture.alt
    _, *ceilings = picture.figure.axes[0].lines
    assert len(ceilings) == 6
    assert picture.png().startswith(b"\x89PNG")


@some(
    "options",
    [{}, {"precision": "bf16", "implementation": "fused"}, {"precision": "autocast"}, {"precision": "mixed"}],
    keep=3,
)
def test_the_step_can_be_imagined_too(options):
    with imagine("H100-80GB"):
        timeline = metered_step(GPT, 2, 16, **options)
    assert timeline.peak_bytes == training_step(GPT, 2, 16, **options).peak_bytes
    assert torch.get_default_dtype() is torch.float32


def test_terms_are_listed_from_the_largest_and_the_rest_is_summed():
    step = training_step(GPT, 2, 16)
    table = terms(step.peak, top=3)
    assert len(table.rows) == 4 and table.rows[-1][2] == f"… {len(step.peak) - 3} more"
    ordered = sorted((term.nbytes for term in step.peak), reverse=True)
    assert table.rows[-1][0] == format_bytes(sum(ordered[3:]))
    assert [row[0] for row in terms(step.peak).rows] == [format_bytes(nbytes) for nbytes in ordered]
    largest = max(step.peak, key=lambda term: term.nbytes)
    words = largest.category.replace("_", " "), largest.name, largest.formula, largest.source
    assert table.rows[0] == [format_bytes(largest.nbytes), *words]


def of_another_model(**sizes):
    return lambda: stretches(metered_step(GPT, 2, 16), dataclasses.replace(GPT, **sizes))


def of_no_step():
    with Meter() as meter:
        torch.ones(3)
    stretches(meter.timeline, GPT)


REFUSALS = {
    "fewer blocks": (of_another_model(layers=1), ValueError, "expected one metered step of …layers=…; found Timeline"),
    "more blocks": (of_another_model(layers=4), ValueError, "expected one metered step of …layers=…; found Timeline"),
    "no step": (of_no_step, ValueError, "expected one metered step of …: forward, backward, optimizer"),
    "no model of the book": (lambda: build(PRESETS["GPT-2 small"]), ValueError, "dataclasses.replace"),
    "no precision": (lambda: metered_step(GPT, 1, 8, precision="fp8"), ValueError, "precision …'mixed'…; found 'fp8'"),
    "no slider": (lambda: what_if(widht=256), TypeError, "expected sliders among layers, …, imagined; found 'widht'"),
    "no place of a slider": (
        lambda: what_if(layers=5),
        ValueError,
        "expected layers to start at one of [2, …], found 5",
    ),
}


@refusals(REFUSALS)
def test_what_is_no_step_no_model_and_no_slider_is_refused(call, error, words):
    refused(call, error, words)


@some("places", [60, 500], keep=1)
def test_wherever_the_sliders_stand_the_prediction_adds_up(places):
    grid = list(itertools.product(*SLIDERS.values()))
    corners = list(itertools.product(*((values[0], values[-1]) for values in SLIDERS.values())))
    for values in [*corners[:: 500 // places], *grid[:: len(grid) // places]]:
        step = Asked(*values).step()
        assert step.peak_bytes == sum(step.peak.by_category().values()) == max(m.nbytes for m in step.moments)
        assert step.peak_bytes > step.parameters.nbytes > 0


def test_the_bars_say_what_was_asked_and_which_card_holds_it():
    sliders = what_if(layers=2, width=256, tokens=256, batch=1)

    def title(picture):
        return picture.figure.axes[0].get_title(loc="left")

    assert "0.03 billion parameters" in title(sliders.picture) and "which fits T4-16GB" in title(sliders.picture)
    imagined = sliders.at(**sliders.start | {"imagined": True})
    assert "imagined: " in imagined.alt and "imagined: " not in sliders.picture.alt
    large = sliders.at(**sliders.start | {"layers": 96, "width": 12288})
    assert "which fits none of the cards" in title(large) and "H200-141GB" in large.alt
    thick = sliders.at(**sliders.start | {"width": 2048, "heads": 4})
    assert "no fused kernel for heads of 512" in title(thick)
    mixed = Asked(2, 256, 16, 256, 1, "mixed", "adamw")
    imagined = {name: nbytes for name, nbytes in predictions._imagined(mixed).items() if nbytes}
    assert imagined == mixed.step().peak.by_category()
    assert what_if(layers=2, width=256, imagined=True).start["imagined"] is True


def test_the_cards_are_in_order_of_their_capacity():
    assert list(capacities().values()) == sorted(capacities().values())
    assert len(capacities()) == 5
