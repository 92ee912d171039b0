"""A worker on a Ray cluster: an actor that builds the job from the plan and answers requests. It speaks bytes only.

What is heavy is imported when the job is built: a worker that has found room says so at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.core.messages import Broadcast
    from atoll.train.trainer import Trainer


GIVES_BACK_EVERY = 16
"""After so many requests freed memory goes back to the system: threads of Ray free it where torch does not look."""


class RayWorker:
    """Keeps a trainer with its data and recorded steps, and the broadcasts that it was sent."""

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._objects: dict[str, Broadcast] = {}
        self._requests = 0

    def where(self) -> bytes:
        """Return where this worker is."""
        return f"{os.uname().nodename}, process {os.getpid()}".encode()

    def build(self, blueprint: bytes, settings: bytes) -> bytes:
        """Build the job; the answer holds an error if this cannot be done here."""
        import torch

        from atoll.core.errors import AtollError
        from atoll.engine.rebuild import pack, rebuilt_trainer, unpack
        from atoll.train.trainer import explained

        torch.set_num_threads(1)
        try:
            with explained():
                self._trainer = rebuilt_trainer(blueprint, **unpack(settings)[0])
        except AtollError as error:
            return pack({"error": str(error)})
        return pack({})

    def do(self, request: bytes, *objects: bytes) -> bytes:
        """Answer a request, which brings those broadcasts that this worker has not had."""
        import torch

        from atoll.core.errors import AtollError
        from atoll.core.messages import Broadcast
        from atoll.engine.pooled import answered
        from atoll.engine.rebuild import pack, unpack
        from atoll.train.trainer import explained

        self._requests += 1
        if self._requests % GIVES_BACK_EVERY == 0:
            with contextlib.suppress(AttributeError, OSError, TypeError):  # only glibc has it
                ctypes.CDLL(None).malloc_trim(0)
        header, tensors = unpack(request)
        for name, data in zip(header["new"], objects, strict=True):
            _, sent = unpack(data)
            self._objects[name] = Broadcast(sent.pop("params"), sent)
        self._objects = {name: self._objects[name] for name in header["hold"]}
        kept = {int(version): self._objects[name] for version, name in header["versions"].items()}
        look = self._objects.get(header["look"])
        evaluated = {} if look is None else {"params": look.params_D, **look.aux}
        assert self._trainer is not None
        torch.set_num_threads(1)  # it is a setting of the thread that runs this method
        try:
            with explained():
                return pack(*answered(self._trainer, kept, evaluated, header["request"], tensors))
        except AtollError as error:
            return pack({"error": str(error)})
