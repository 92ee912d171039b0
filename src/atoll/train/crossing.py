"""What crosses between the processor, where the server works, and a device: once a group of clients."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from atoll.core.messages import Broadcast, State, Task, Update
from atoll.train.devices import moved


class Crossing:
    """Moves what clients are sent to a device, and what came of it back."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kept: dict[int, tuple[Broadcast, Broadcast]] = {}

    def broadcasts(self, tasks: Sequence[Task], sent: Sequence[Broadcast]) -> list[Broadcast]:
        """Return the broadcasts of some tasks on the device; those of the versions before stay there."""
        known, self._kept = self._kept, {}
        for task, each in zip(tasks, sent, strict=True):
            if task.version in self._kept:
                continue
            old = known.get(task.version)
            if old is None or old[0] is not each:
                old = each, Broadcast(each.params_D.to(self.device), moved(each.aux, self.device))
            self._kept[task.version] = old
        return [self._kept[task.version][1] for task in tasks]

    def back(self, state: State) -> State:
        """Return named tensors in the processor's memory."""
        return {name: value.cpu() for name, value in state.items()}

    def update_back(self, update: Update) -> Update:
        """Return an update, or a stack of them, in the processor's memory."""
        return Update(update.delta_D.cpu(), update.weight.cpu(), self.back(update.aux))


def joined_parts(parts: Sequence[tuple[Update, list[float], State]]) -> tuple[Update, list[float], State]:
    """Return stacked updates, losses and memories of several stacks as those of one."""
    updates, states = [part[0] for part in parts], [part[2] for part in parts]
    update = Update(
        torch.cat([each.delta_D for each in updates]),
        torch.cat([each.weight for each in updates]),
        {name: torch.cat([each.aux[name] for each in updates]) for name in updates[0].aux},
    )
    losses = [loss for part in parts for loss in part[1]]
    return update, losses, {name: torch.cat([each[name] for each in states]) for name in states[0]}
