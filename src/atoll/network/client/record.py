"""A client's own record of what leaves it, for a red team at home: `atoll join --record DIR`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from atoll.core.messages import Broadcast, Task
from atoll.core.wire import unpack_parts
from atoll.network.client.task import AgreedRun, TrainedUpdate
from atoll.network.protocol.blobs import write_file
from atoll.train.job import layout_of
from atoll.train.recording import RecordedTask, file_of, settings_of

Record = Callable[[AgreedRun, str, Task, Broadcast, TrainedUpdate], None]
"""(run that was agreed to, its name, task, what was sent, what leaves) -> nothing; writes it down."""


def recorder(directory: Path, warn: Callable[[str], None]) -> Record:
    """Return what records tasks in a directory, a folder for each run; files are for their owner alone.

    An update is recorded as the server decodes it, so with the loss of codecs and the noise of this client. Under
    secure aggregation the server reads sums alone, so that nothing of one client is recorded.
    """
    told = set[str]()

    def record(agreed: AgreedRun, run: str, task: Task, sent: Broadcast, trained: TrainedUpdate) -> None:
        if agreed.job.secure is not None:
            if run not in told:
                warn(f"{run}: nothing is recorded: its updates leave this client masked, and the server reads sums")
            told.add(run)
            return
        layout, size = layout_of(agreed.job), sum(len(part) for part in trained.data)
        payload = unpack_parts(trained.data, size, max_bytes=agreed.max_bytes)
        payload, exact = payload.split(layout.exact())
        update = layout.rebuilt(agreed.job.uplink.decode(payload), exact)
        update = update._replace(weight=layout.weight.new_tensor(trained.weight))
        num_clients = agreed.job.federation.num_clients
        name, parts = file_of(RecordedTask(task, num_clients, sent, update, settings_of(agreed.plan)))
        folder = directory / run
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_file(folder / name, folder / f".{name}.new", *parts)

    return record
