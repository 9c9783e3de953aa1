"""The package's own example: launched by itself, by torchrun, and on imagined ranks."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch

from memlab.pipeline_parallelism.__main__ import main
from tests.example_helpers import assert_torchrun_says, figures, peaks

MODULE = "memlab.pipeline_parallelism"
CHOSEN = ("--schedule", "1f1b", "--micro-batches", "4", "--tied", "--steps", "2")


def said_here(*chosen: str) -> str:
    """What the example prints, called in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(chosen) == 0
    return out.getvalue()


def test_the_example_says_the_same_by_itself_and_under_torchrun():
    alone = said_here(*CHOSEN, "--ranks", "2")
    assert "1f1b, 1 x 2 x 1 (data x pipeline x tensor), 2 ranks on " in alone
    assert_torchrun_says(alone, MODULE, *CHOSEN)


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    found = {}
    split = "4 --tensor 2 --sequence-parallel"
    real = ("1", "2", "2 --schedule gpipe", "2 --schedule interleaved", "2 --data 2", split)
    for chosen in (*(f"--ranks {ranks}" for ranks in real), "--imagined 2", f"--imagined {split}"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: False)  # a GPU, which one rank would have, draws others
            found[chosen] = said_here(*chosen.split(), "--micro-batches", "8", "--steps", "1")
    return found


def test_losses_do_not_depend_on_ranks_or_schedules_but_for_rounding(said):
    losses = [[float(loss) for loss in figures(text)[0]] for name, text in said.items() if "ranks" in name]
    assert len(losses) == 6 and len(losses[0]) == 1
    for others in losses[1:]:
        assert others == pytest.approx(losses[0], abs=2e-5)


def test_peaks_fall_with_stages_and_1f1b_keeps_less_on_the_last_stage_than_gpipe(said):
    two, gpipe = peaks(said["--ranks 2"]), peaks(said["--ranks 2 --schedule gpipe"])
    assert max(two) < peaks(said["--ranks 1"])[0]
    assert two[1] < gpipe[1] and two[0] < gpipe[0]


def test_imagined_ranks_send_what_real_ones_send(said):
    for name, text in said.items():
        if "imagined" in name:
            losses, sent = figures(text)
            assert losses == [] and "no values on imagined hardware" in text
            assert sent == figures(said[name.replace("imagined", "ranks")])[1][:1], name


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("--ranks 0", "expected at least one rank, found 0"),
        ("--steps 0", "expected at least one step, found 0"),
        ("--micro-batches 0", "expected at least 1 as --micro-batches, found 0"),
        ("--data -1", "expected at least 1 as --data, found -1"),
        ("--ranks 6 --data 4", "take a multiple of 4"),
        ("--schedule interleaved --ranks 3", "expected --micro-batches that 3 ranks divide, found 8"),
        ("--schedule interleaved --ranks 8", "expected at most 8 stages, a layer each, found 16"),
        ("--imagined 9", "expected at most 8 stages, a layer each, found 9"),
        ("--data 2 --micro-batches 16", "pick numbers whose product divides 16"),
        ("--ranks 3 --tensor 3", "8 heads cannot be split over 3 ranks"),
    ],
)
def test_the_example_refuses_numbers_that_do_not_go_together(wrong, words, capsys):
    with pytest.raises(SystemExit):
        main(wrong.split())
    assert words in " ".join(capsys.readouterr().err.split())
