"""The plan's table about split learning."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Annotated, Literal

from atoll.core.errors import PlanError, nearest
from atoll.core.options import Count, ShareBelowOne, above, at_least
from atoll.core.parts import Part
from atoll.core.section import Section

VERTICAL = "vertical"
"""The way in which parties hold different columns of the same rows."""
NAME = re.compile(r"[\w-]{1,64}")


@dataclass(frozen=True, kw_only=True)
class Party(Section, key="split.parties"):
    """A party of vertical learning: the columns that it holds, and the model that it makes activations of them with."""

    name: str = ""
    """Required: what the party is called, in letters, digits, `_` and `-`."""
    columns: tuple[Annotated[int, at_least(0, "the first feature is 0")] | str, ...] = ()
    """Required: features by name, place, range of places such as "0-31", or pattern such as "capital*"; the name of a
    column of a table stands for all its categories."""
    model: Part = field(default_factory=lambda: Part("mlp"))
    """The bottom model: a member of `models` or one's own, from these columns to `width` outputs."""
    width: Count = 8
    """Values of one sample that the party sends, q of this party."""

    def check(self) -> None:
        """Refuse a party without a name or without columns."""
        if not NAME.fullmatch(self.name):
            raise PlanError(
                f"split.parties: a party is called {self.name!r}: give each a name of letters, digits, '_' and '-', at "
                'most 64, e.g. name = "bank"'
            )
        if not self.columns:
            raise PlanError(
                f"split.parties: {self.name} has no columns, got {list(self.columns)}: name features of the data, e.g. "
                'columns = ["age", "capital*"]'
            )


@dataclass(frozen=True, kw_only=True)
class Split(Section, key="split"):
    """Settings of split learning, by which clients train the first layers of a model and the server the others."""

    way: Literal["in_turn", "splitfed_v1", "splitfed_v2", "vertical"] = "splitfed_v1"
    """Who trains when: clients one after another, or all of a cohort at once; or parties that hold different columns of
    the same rows, together; see `split/ways`."""
    cut: str | Annotated[int, at_least(0, "the first layer is 0")] = ""
    """Required but in vertical learning: the last layer of the clients, a module's name such as "features.3" or its
    place in a sequential model."""
    tail: str | Annotated[int, at_least(1, "the first layer is 0")] | None = None
    """From this layer on the model is the clients' again, so that labels stay with them; the server has the labels if
    left out. In vertical learning a layer of the top model."""
    parties: tuple[Party, ...] | None = None
    """Who holds which columns, in vertical learning."""
    labels: str | None = None
    """The party that holds the labels, in vertical learning; the only one if there is one."""
    missing: ShareBelowOne | None = None
    """Share of the rows that each simulated party does not hold, drawn for each; the others are joined by private set
    intersection."""
    micro_batches: Count = 1
    """Pieces in which a batch is sent; their gradients add up to that of the batch."""
    in_flight: Count | None = None
    """Pieces of a batch that may be on their way at a time; all of them if left out."""
    handover: Literal["server", "peer"] = "server"
    """How a client that trains in turn gets the layers of the one before: through the server, or from that client."""
    codecs: tuple[Part, ...] = ()
    """What activations and gradients go through at the cut, in this order; exact if empty."""
    defences: tuple[Part, ...] = ()
    """What parties do to what leaves them, in this order, such as "nopeek"; see `split/defences`."""
    frozen: bool = False
    """Whether the clients' first layers stay as they are, so that nothing that leaves a client was trained on its
    features without noise."""
    bandwidth: Annotated[float, above(0, "leave it out for no limit")] | None = None
    """Bytes a second of each client's link, each way, for simulated seconds."""
    latency: Annotated[float, at_least(0)] | None = None
    """Seconds of a round trip between a client and the server, for simulated seconds."""

    def check(self) -> None:
        """Refuse a cut that is missing, a handover that nobody makes, and a window that is no limit."""
        if self.way == VERTICAL:
            self._check_parties()
        elif self.parties or self.labels is not None or self.missing is not None:
            raise PlanError(
                f"split.parties, labels and missing are for parties that hold columns, but split.way is "
                f'"{self.way}": set split.way = "vertical", or leave them out'
            )
        elif self.cut == "":
            values = {each.name: (getattr(self, each.name), each.default) for each in fields(self)}
            given = {name: value for name, (value, default) in values.items() if value != default}
            raise PlanError(
                f"split.cut is missing, got {given}: set it to the last layer of the clients, e.g. --set split.cut=2"
            )
        if self.handover == "peer" and self.way != "in_turn":
            raise PlanError(
                f'split.handover is "peer", but clients of {self.way} do not hand their layers on: set split.way = '
                '"in_turn", or leave split.handover out'
            )
        if self.in_flight is not None and self.in_flight > self.micro_batches:
            raise PlanError(
                f"split.in_flight is {self.in_flight}, but a batch has {self.micro_batches} pieces: raise "
                "split.micro_batches, or leave split.in_flight out"
            )

    def _check_parties(self) -> None:
        """Refuse parties that are none or share a name, a cut beside theirs, and labels that nobody holds."""
        names = [party.name for party in self.parties or ()]
        if not names:
            raise PlanError(
                'split.way is "vertical", but there are no parties: write a table [[split.parties]] with name and '
                "columns for each"
            )
        twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
        if twice is not None:
            raise PlanError(f"split.parties: two are called '{twice}', got {names}: give each a name of its own")
        if self.cut != "":
            raise PlanError(
                f"split.cut is {self.cut!r}, but parties that hold columns are cut after their own models: leave "
                "split.cut out"
            )
        if self.labels is None and len(names) > 1:
            raise PlanError(f'split.labels is missing: name the party that holds the labels, e.g. "{names[0]}"')
        if self.labels is not None and self.labels not in names:
            raise PlanError(f"split.labels is '{self.labels}', which is no party: {nearest(self.labels, names)}")

    @property
    def label_holder(self) -> int:
        """The number of the party that holds the labels."""
        names = [party.name for party in self.parties or ()]
        return 0 if self.labels is None else names.index(self.labels)

    @property
    def takes_time(self) -> bool:
        """Whether messages take simulated seconds."""
        return self.bandwidth is not None or self.latency is not None
