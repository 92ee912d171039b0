"""Dropout whose mask depends on (client, attempt, step, place) only.

torch draws masks from a global generator, so a mask would depend on how clients are batched together. Here each mask is
a hash of a seed and the position, so one client after another and many stacked give the same model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

SEED = "dropout_seed"


class CounterDropout(nn.Module):
    """Inverted dropout with hashed masks; stands in for nn.Dropout, and for nn.Dropout2d with `channels`."""

    dropout_seed: Tensor

    def __init__(self, p: float, place: int, *, channels: bool) -> None:
        super().__init__()
        self.p, self.place, self.channels = p, place, channels
        self.register_buffer(SEED, torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Drop values, or whole channels, and scale up the rest."""
        if not self.training or self.p == 0:
            return x
        shape = x.shape[:2] + (1,) * (x.dim() - 2) if self.channels else x.shape
        number = torch.arange(shape.numel(), dtype=torch.int64, device=x.device)
        key = _mix(self.dropout_seed + _signed(self.place * 0x632BE59BD9B4E019))
        bits = _mix(number * 0x61C8864680B583EB + key) >> 16 & 0xFFFFFF
        keep = (bits >= int(self.p * 0x1000000)).view(shape)
        return x * keep / (1 - self.p) if self.p < 1 else x * keep


def _signed(number: int) -> int:
    """Reduce an integer modulo 2^64 to the range of a signed one, as additions of int64 tensors do.

    >>> _signed(2**63 - 1) == 2**63 - 1, _signed(2**63) == -(2**63), _signed(2**64 + 5)
    (True, True, 5)
    """
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _mix(value: Tensor) -> Tensor:
    """Scramble 64-bit integers (the finaliser of splitmix64, with shifts that fit signed integers)."""
    value = (value ^ (value >> 30)) * -0x40A7B892E31B1A47
    value = (value ^ (value >> 27)) * -0x6B2FB644ECCEEE15
    return value ^ (value >> 31)


def use_counter_dropout(model: nn.Module) -> list[str]:
    """Replace nn.Dropout and its channel-wise kin in a model, and return the names of the seeds to feed."""
    places: list[str] = []
    for parent_name, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if type(child) in (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d):
                channels = type(child) is not nn.Dropout
                setattr(parent, name, CounterDropout(child.p, len(places), channels=channels))
                places.append(f"{parent_name}.{name}.{SEED}".lstrip("."))
    return places


def set_seed(model: nn.Module, names: list[str], seed: int) -> None:
    """Give every dropout of a model the seed of this client and step."""
    for name in names:
        model.get_buffer(name).fill_(seed)
