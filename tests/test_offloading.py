"""Chapter 09's library as a whole: its pages in reading order, and its three techniques on one model."""

import inspect
import os
import pkgutil
import re

import pytest
import torch

from memlab import offloading
from memlab.book.workloads import GPT, text_batch
from memlab.gradient_checkpointing import checkpoint
from memlab.offloading import OffloadedOptimizer, stream_weights, swap_activations


def test_the_reading_order_names_every_page_once():
    order = offloading.__doc__.partition("Read the pages in this order.")[2]
    named = [name for name in re.findall(r"`(\w+)`", order) if inspect.ismodule(getattr(offloading, name, re))]
    assert sorted(named) == sorted(page.name for page in pkgutil.iter_modules(offloading.__path__))


def trained(folder=None, checkpointed=False):
    """Weights after three steps, with everything in files or with nothing."""
    torch.manual_seed(0)
    model = GPT(layers=3, width=32, heads=2, context=32, dropout=0.1)
    for block in model.blocks if checkpointed else ():
        block.forward = lambda x, forward=block.forward: checkpoint(forward, x)

    def steps(optimizer, context):
        for seed in range(3):
            x, y = text_batch(2, 32, seed=seed)
            with context:
                loss = model(x, y)
            loss.backward()
            optimizer.step()
            assert folder is None or os.listdir(folder) == []  # a killed process would leave none
            optimizer.zero_grad()

    if folder is None:
        steps(torch.optim.AdamW(model.parameters(), lr=1e-2), torch.enable_grad())
    else:
        with stream_weights(model, model.blocks, folder) as streamed:
            optimizer = OffloadedOptimizer(streamed.parameters(), torch.optim.AdamW, to=folder, gradients=True, lr=1e-2)
            steps(optimizer, swap_activations(folder, min_bytes=0, ram_bytes="64 KiB"))
            optimizer.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_activations_states_gradients_and_weights_in_files_at_once_train_as_without_and_leave_none(
    checkpointed, tmp_path
):
    plain, offloaded = trained(), trained(tmp_path, checkpointed)
    assert all(torch.equal(a, b) for a, b in zip(plain, offloaded, strict=True))
    assert os.listdir(tmp_path) == []
