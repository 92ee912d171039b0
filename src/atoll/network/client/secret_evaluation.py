"""A client's evaluations that are added in secret: sums on disk before anything leaves, each in one session only.

The difference of two sums of the same evaluations with other sites could reveal a site's part. So a version is measured
once, what was measured is in one session, and no version is measured after a later one; all this is kept on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import msgspec
import numpy as np

from atoll.core.errors import RunError
from atoll.core.messages import State
from atoll.core.wire import unpack
from atoll.network.client.home import RunHome
from atoll.network.client.secure_session import LEAST, Addend, distrust
from atoll.network.client.task import AgreedRun, WorkRefused
from atoll.network.protocol.agreement import evaluates_in_secret
from atoll.network.protocol.blobs import sync_directory, write_file
from atoll.network.protocol.messages import EvaluationOrder, RunInfo, SiteEvaluation
from atoll.network.protocol.secret_sums import FIRST_TASK, check_addable, invite_of, pack_sums, session_of, to_vector
from atoll.secagg import wire
from atoll.secagg.client_state import Floors, Phase
from atoll.secagg.encoding import Encoding

FOLDER = "secret-sums"
MAX_KEPT = 4
"""Number of versions whose files are kept: a server has two open."""
MAX_BYTES = 1 << 30
"""Maximum bytes of the sums of a version in memory."""


class KeptSums(msgspec.Struct, frozen=True):
    """What a client measured of a version, and the session in which it is added."""

    model: str
    """The name of the broadcast that was measured."""
    sums: bytes
    """The packed sums; empty once they are added or never will be."""
    session: bytes = b""
    """The session in which they are added; empty if there was none."""


class KeptEvaluations:
    """The evaluations of a run that are added in secret, in files of its directory."""

    def __init__(self, home: RunHome) -> None:
        self._path = home.path / FOLDER

    def find(self, version: int, model: str) -> KeptSums | None:
        """Return what was measured of a version; WorkRefused if that is over, or was another model."""
        path = self._path / str(version)
        if not path.exists():
            newest = max(self._versions(), default=version)
            if newest > version:
                raise WorkRefused(
                    f"version {newest} was evaluated after {version}: earlier ones are not added any more"
                )
            return None
        kept = self._read(version)
        if kept.model != model:
            raise WorkRefused(f"version {version} was measured as another model: its sums are added once")
        return kept

    def save(self, version: int, kept: KeptSums) -> None:
        """Save what was measured, or the session that it is in; durable on return."""
        self._path.mkdir(mode=0o700, exist_ok=True)
        path = self._path / str(version)
        write_file(path, path.with_name(f".{version}.new"), msgspec.msgpack.encode(kept))
        sync_directory(self._path)
        for old in sorted(self._versions())[:-MAX_KEPT]:
            (self._path / str(old)).unlink()

    def forget_sums(self) -> None:
        """Forget what was measured, but not that it was: the run is over, and nothing of it is added any more."""
        for version in self._versions():
            self.save(version, msgspec.structs.replace(self._read(version), sums=b""))

    def _versions(self) -> list[int]:
        return [int(path.name) for path in self._path.glob("[0-9]*")]

    def _read(self, version: int) -> KeptSums:
        path = self._path / str(version)
        try:
            return msgspec.msgpack.decode(path.read_bytes(), type=KeptSums)
        except (OSError, msgspec.MsgspecError) as error:
            raise RunError(f"{path} cannot be read ({error}): restore it from a copy") from error


def keep_for_sum(agreed: AgreedRun, order: EvaluationOrder, measure: Callable[[], State]) -> SiteEvaluation:
    """Measure a version, unless that was done, and keep the sums; return what is told of them: that they are there."""
    kept = KeptEvaluations(agreed.home)
    before = kept.find(order.version, order.model.name)
    if before is None:
        sums = measure()
        check_addable(sums)
        kept.save(order.version, KeptSums(order.model.name, pack_sums(sums)))
    elif before.session or not before.sums:
        raise WorkRefused(f"what was measured of version {order.version} was in a session before: it is added once")
    return SiteEvaluation(in_secret=True)


@final
@dataclass(frozen=True, kw_only=True)
class EvaluationAddend(Addend):
    """The sums that were measured of a version."""

    order: EvaluationOrder

    @property
    def attempt(self) -> int:
        """Return the number of the version's session among the tasks."""
        return FIRST_TASK + self.order.version

    @property
    def title(self) -> str:
        """Return the version that was measured."""
        return f"evaluation of version {self.order.version}"

    def check(self) -> None:
        """Refuse a version that was not measured here, and any if the floors have changed since."""
        if not evaluates_in_secret(self.agreed.floors, self.agreed.plan):
            raise WorkRefused(f'floors.evaluation = "{self.agreed.floors.evaluation}": nothing is added in secret')
        self._kept()

    def begin(self, invite: wire.Invite, info: RunInfo) -> bytes:
        """Return the hash of version and layout, if the invitation follows from them, and is the first."""
        kept, order = self._kept(), self.order
        if kept.session or not kept.sums:
            raise WorkRefused(f"what was measured of version {order.version} was in a session before: it is added once")
        session = session_of(order.run, order.version, order.model.name, self._sums(), wire.read_cohort(invite))
        due = invite_of(session)
        if msgspec.structs.replace(invite.config, length=due.config.length) != due.config:
            raise distrust(invite, due)
        if invite != due:
            raise WorkRefused(
                f"an invitation to add something else than {', '.join(sorted(self._sums()))} of version "
                f"{order.version}: let client and server use the same metrics"
            )
        return session.model

    def floors(self, num_clients: int) -> Floors:
        """Return this client's floors, and what the plan says of the survivors of any of its sums."""
        asked, secagg = self.agreed.floors, self.agreed.plan.secagg
        least = max(asked.min_cohort, asked.min_survivors, 0 if secagg is None else secagg.required_survivors)
        return LEAST._replace(min_cohort=max(LEAST.min_cohort, least), min_survivors=least)

    def vector(self, encoding: Encoding, max_samples: int) -> np.ndarray:
        """Return the sums as limbs."""
        return to_vector(self._sums(), encoding)

    def stepped(self, phase: Phase, session: bytes) -> None:
        """Note the session before its first answer leaves, and forget the sums after the last."""
        kept = self._kept()
        over = phase in (Phase.DONE, Phase.ABORTED)
        noted = KeptSums(kept.model, b"" if over else kept.sums, kept.session or session or b"left")
        if noted != kept:
            KeptEvaluations(self.agreed.home).save(self.order.version, noted)

    def _kept(self) -> KeptSums:
        order = self.order
        kept = KeptEvaluations(self.agreed.home).find(order.version, order.model.name)
        if kept is None:
            raise WorkRefused(f"version {order.version} was not measured here: nothing can be added")
        return kept

    def _sums(self) -> State:
        return unpack(self._kept().sums, max_bytes=MAX_BYTES).sides[0]
