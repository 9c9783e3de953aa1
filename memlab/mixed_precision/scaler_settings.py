"""A loss scaler's settings and state: what each number must be, and how all of them are saved and loaded.

You can leave this page closed at first reading.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real

import torch

FP32 = torch.finfo(torch.float32)
RULES = {  # the entries of a state dict: what each must be, in words and as a test, which nan fails
    "scale": ("a number that FP32 holds, and 1 / it as well", lambda x: FP32.tiny <= x <= FP32.max),
    "growth_factor": ("a number above 1, and finite", lambda x: 1 < x < math.inf),
    "backoff_factor": ("a number above 0 and below 1", lambda x: 0 < x < 1),
    "growth_interval": ("a whole number of iterations, at least 1", lambda x: isinstance(x, Integral) and x >= 1),
    "_growth_tracker": ("a whole number of iterations, at least 0", lambda x: isinstance(x, Integral) and x >= 0),
}


def checked(name: str, value):
    """`value`, if the rule of that name allows it. Raises TypeError or ValueError."""
    expected, fits = RULES[name]
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"expected {name} to be {expected}; found {value!r} ({type(value).__name__})")
    if not fits(value):
        raise ValueError(f"expected {name} to be {expected}; found {value!r}")
    return value


class ScalerSettings:
    """The scale S, how it moves, and for how many iterations nothing has overflowed.

    S and that count are tensors on the device of the first loss, and numbers before there is one.
    """

    def __init__(self, scale: float, growth_factor: float, backoff_factor: float, growth_interval: int, enabled: bool):
        self._init_scale, self._init_growth_tracker = float(checked("scale", scale)), 0
        self.growth_factor = checked("growth_factor", growth_factor)
        self.backoff_factor = checked("backoff_factor", backoff_factor)
        self.growth_interval = checked("growth_interval", growth_interval)
        self._enabled = enabled
        self._scale = self._growth_tracker = None  # 0-dim tensors, made where the first loss is, and these
        self._bad_loss = self._one = None  # the first is 1. if a loss was inf or nan since update(), else 0.

    def _make_scale(self, device: torch.device | str) -> None:
        """Make the tensors, if they are not there: on the device of the first loss, or of a rank that has none."""
        if self._scale is None:
            self._scale = torch.tensor(self._init_scale, dtype=torch.float32, device=device)
            self._growth_tracker = torch.full_like(self._scale, self._init_growth_tracker, dtype=torch.int32)
            self._bad_loss, self._one = torch.zeros_like(self._scale), torch.ones_like(self._scale)

    def _set_scale(self, scale: float) -> None:
        self._init_scale = float(checked("scale", scale))
        if self._scale is not None:
            self._scale.fill_(self._init_scale)

    def get_scale(self) -> float:
        """S, or 1. if disabled. Waits for the GPU."""
        return 1.0 if not self._enabled else self._init_scale if self._scale is None else self._scale.item()

    def state_dict(self) -> dict[str, float | int]:
        """What load_state_dict takes, here or in GradScaler; {} if disabled. Call it after update()."""
        tracker = self._init_growth_tracker if self._growth_tracker is None else self._growth_tracker.item()
        values = self.get_scale(), self.growth_factor, self.backoff_factor, self.growth_interval, tracker
        return dict(zip(RULES, values, strict=True)) if self._enabled else {}

    def load_state_dict(self, state_dict: Mapping[str, float | int]) -> None:
        """Go on from a LossScaler's or GradScaler's state dict. Raises ValueError or TypeError for what is neither."""
        if not self._enabled:
            return
        if missing := [key for key in RULES if key not in state_dict]:
            hint = "" if state_dict else ": that of a scaler with enabled=False is empty"
            raise ValueError(f"expected a loss scaler's state dict, found one without {', '.join(missing)}{hint}")
        scale, growth, backoff, interval, tracker = (checked(key, state_dict[key]) for key in RULES)
        self._set_scale(scale)
        self._init_growth_tracker = tracker
        self.growth_factor, self.backoff_factor, self.growth_interval = growth, backoff, interval
        if self._growth_tracker is not None:
            self._growth_tracker.fill_(tracker)

    def __getstate__(self) -> dict:
        raise TypeError("expected state_dict() to save a LossScaler, found pickle or deepcopy; save that instead")
