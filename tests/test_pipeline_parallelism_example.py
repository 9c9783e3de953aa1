"""The package's own example: launched by itself, by torchrun, and on imagined ranks."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch

from memlab.pipeline_parallelism.__main__ import main
from tests.example_helpers import assert_torchrun_says, figures, peaks

MODULE = "memlab.pipeline_parallelism"
CHOSEN = ("--schedule", "1f1b", "--micro-batches", "4", "--steps", "2")


def said_here(*chosen: str) -> str:
    """What the example prints, called in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(chosen) == 0
    return out.getvalue()


def test_the_example_says_the_same_by_itself_and_under_torchrun():
    alone = said_here(*CHOSEN, "--ranks", "2")
    assert "1f1b, 2 ranks on " in alone
    assert_torchrun_says(alone, MODULE, *CHOSEN)


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    found = {}
    real = ("1", "2", "2 --schedule gpipe", "2 --schedule interleaved")
    for chosen in (*(f"--ranks {ranks}" for ranks in real), "--imagined 2"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: False)  # a GPU, which one rank would have, draws others
            found[chosen] = said_here(*chosen.split(), "--micro-batches", "8", "--steps", "1")
    return found


def test_losses_do_not_depend_on_ranks_or_schedules_peaks_fall_and_imagined_ranks_send_what_real_ones_do(said):
    losses = [[float(loss) for loss in figures(text)[0]] for name, text in said.items() if "ranks" in name]
    assert len(losses) == 4 and len(losses[0]) == 1
    for others in losses[1:]:
        assert others == pytest.approx(losses[0], abs=2e-5)
    two, gpipe = peaks(said["--ranks 2"]), peaks(said["--ranks 2 --schedule gpipe"])
    assert max(two) < peaks(said["--ranks 1"])[0]
    assert two[1] < gpipe[1] and two[0] < gpipe[0]
    losses, sent = figures(said["--imagined 2"])
    assert losses == [] and "no values on imagined hardware" in said["--imagined 2"]
    assert sent == figures(said["--ranks 2"])[1][:1]
