"""fully_shard: a model that nobody holds any longer gives its bytes back."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from memlab.data_parallelism import fully_shard
from memlab.ranks import one_rank


def test_a_sharded_model_that_was_trained_is_freed_when_nobody_holds_it():
    with one_rank("cpu"):
        model = fully_shard(nn.Sequential(fully_shard(nn.Linear(4, 4)), nn.Linear(4, 4)))
        model(torch.randn(2, 4)).sum().backward()
        watched = [weakref.ref(model), *map(weakref.ref, model.parameters())]
        del model
        gc.collect()
        assert [one() for one in watched] == [None] * 5
