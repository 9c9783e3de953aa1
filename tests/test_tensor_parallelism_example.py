"""The package's own example: launched by itself, by torchrun, and on imagined ranks."""

from __future__ import annotations

import pytest
import torch

from memlab.tensor_parallelism.__main__ import main
from tests.example_helpers import assert_torchrun_says, figures, peaks

MODULE = "memlab.tensor_parallelism"
CHOSEN = ("--sequence-parallel", "--steps", "2")


@pytest.mark.thorough
def test_the_example_says_the_same_by_itself_and_under_torchrun(capsys):
    assert main([*CHOSEN, "--ranks", "2"]) == 0
    alone = capsys.readouterr().out
    assert "tensor and sequence parallel, 2 ranks on " in alone
    assert_torchrun_says(alone, MODULE, *CHOSEN)


def test_losses_do_not_depend_on_ranks_peaks_fall_with_them_and_imagined_ranks_send_what_real_ones_send(
    capsys, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # a GPU, which one rank would have, draws others
    said = {}
    for arguments in (["--ranks", "1"], ["--ranks", "2"], ["--imagined", "2"]):
        for more in ((), ("--sequence-parallel",)):
            assert main([*arguments, *more, "--steps", "2"]) == 0
            said[" ".join((*arguments, *more))] = capsys.readouterr().out
    losses = {tuple(figures(text)[0]) for name, text in said.items() if "imagined" not in name}
    assert len(losses) == 1 and len(*losses) == 2
    assert peaks(said["--ranks 2"])[0] < 0.7 * peaks(said["--ranks 1"])[0]
    assert peaks(said["--ranks 2 --sequence-parallel"])[0] < peaks(said["--ranks 2"])[0]
    for more in ("", " --sequence-parallel"):
        imagined, sent = figures(said[f"--imagined 2{more}"])
        assert imagined == [] and sent == figures(said[f"--ranks 2{more}"])[1][:1]
    assert "no values on imagined hardware" in said["--imagined 2"] and "1 rank on the CPU\n" in said["--ranks 1"]


def test_the_example_refuses_no_ranks_and_no_steps_and_ranks_that_do_not_divide_its_sizes(capsys):
    for wrong, words in (("--ranks", "one rank"), ("--imagined", "one rank"), ("--steps", "one step")):
        with pytest.raises(SystemExit):
            main([wrong, "0"])
        assert f"expected at least {words}, found 0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--imagined", "3"])
    assert "8 heads cannot be split over 3 ranks; pick a tensor" in capsys.readouterr().err
