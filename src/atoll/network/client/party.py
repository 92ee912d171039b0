"""What a party of vertical learning brings: columns of rows that all parties hold, at their places in a whole sample.

Other columns are zeros here, of which the party's model sees none. Labels are with one party; the others have
placeholders, whatever their app holds. Shapes: N rows, F features of a whole sample, P of the party.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import numpy as np

from atoll.alignment.records import checked_tables, read_record, record_path
from atoll.core.plan import Plan
from atoll.core.split import Party
from atoll.data.dataset import Dataset
from atoll.data.places import feature_places
from atoll.data.rows import Rows
from atoll.data.targets import BINARY, CLASSIFICATION, SURVIVAL, Array
from atoll.network.client.app import ClientApp
from atoll.network.client.task import WorkRefused
from atoll.network.protocol.messages import RunInfo

MAX_FEATURES = 1 << 20
"""Features of a whole sample; a server that states more is not believed."""
MAX_OUTPUTS = 1 << 12
"""Outputs of the whole model, likewise, at a party that has no labels."""
TAG_BYTES = 32
"""Bytes of a commitment to rows."""
ORDER = "let the operator write split.parties in the order of the clients' numbers, which atoll clients list shows"


@final
class WholeRows:
    """Rows with all columns, of which a party holds some and the others are zeros."""

    def __init__(self, own: Array | Rows, order_P: Array, places_P: Array, shape: tuple[int, ...]) -> None:
        self._own, self._order_P, self._places_P = own, order_P, places_P
        self.shape, self.dtype = (len(own), *shape), own.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, indices: Any) -> Array:
        rows = np.asarray(self._own[indices])
        whole_F = np.zeros((len(rows), math.prod(self.shape[1:])), dtype=self.dtype)
        whole_F[:, self._places_P] = rows.reshape(len(rows), -1)[:, self._order_P]
        return whole_F.reshape(len(rows), *self.shape[1:])


def party_dataset(app: ClientApp, plan: Plan, info: RunInfo, number: int, name: str) -> Dataset:
    """Return the samples of a party of a plan, with all columns; WorkRefused if they are not those of the plan.

    `name` is what the client enrolled as: one that is called as another party of the plan is not taken for this one.
    """
    party = _party_of(plan, number, name)
    assert plan.split is not None
    shape = info.input_shape
    if shape is None or min(shape, default=0) < 1 or math.prod(shape) > MAX_FEATURES:
        raise WorkRefused(f"the server's samples have shape {shape}, 1 to {MAX_FEATURES:,} features are allowed")
    if info.features and len(info.features) != math.prod(shape):
        raise WorkRefused(f"the server names {len(info.features)} features, and its samples have shape {shape}")
    like = Dataset(
        name="the server's data",
        train_x=np.zeros((2, *shape), dtype=np.uint8),
        train_y=np.arange(2),
        test_x=np.zeros((1, *shape), dtype=np.uint8),
        test_y=np.zeros(1, dtype=np.int64),
        num_classes=2,
        feature_names=info.features,
    )
    places_P = feature_places(like, party.columns, f"split.parties: {party.name}")
    order_P = _order(app, party, places_P, info.features)
    if number == plan.split.label_holder:
        if app.train_y is None:
            raise WorkRefused(
                f"the plan takes this client for {party.name}, which holds the labels, and its app has none: give "
                f"train_y, or {ORDER}"
            )
        kind, targets, num_classes = app.problem, app.train_y, app.num_classes
    else:
        kind, num_outputs = info.problem, info.num_outputs or 1
        if not 0 < num_outputs <= MAX_OUTPUTS:
            raise WorkRefused(f"the server's targets ask for {num_outputs} outputs, 1 to {MAX_OUTPUTS:,} are allowed")
        targets = _placeholders(kind, len(app.train_x), num_outputs)
        num_classes = num_outputs if kind == CLASSIFICATION else 0
    whole = WholeRows(app.train_x, order_P, places_P, shape)
    return Dataset(
        name="own columns",
        train_x=whole,
        train_y=targets,
        test_x=whole[np.arange(1)],
        test_y=np.asarray(targets[:1]),
        num_classes=num_classes,
        scale=app.scale,
        shift=app.shift,
        problem=kind,
        feature_names=info.features,
    )


def rows_commitment(app: ClientApp, plan: Plan) -> bytes:
    """Return the commitment to the app's rows in their order; WorkRefused if they are not those that were aligned."""
    assert plan.split is not None and plan.split.parties
    if len(plan.split.parties) == 1:
        return b""  # nobody else has these rows
    rows = app.rows
    if rows is None:
        raise WorkRefused(
            "parties must train on the same rows in the same order, and this client commits to none: join the tables "
            'by atoll align, and give the app the table that it wrote, e.g. rows="aligned/bank.csv"'
        )
    if isinstance(rows, bytes):
        if len(rows) != TAG_BYTES:
            raise WorkRefused(
                f"a commitment to rows has {TAG_BYTES} bytes, the app's has {len(rows)}: use an HMAC-SHA256"
            )
        return rows
    path = Path(rows)
    [tag] = checked_tables([path]).values()
    num = read_record(record_path(path)).rows
    if num != len(app.train_x):
        raise WorkRefused(f"{path} has {num:,} aligned rows, the app {len(app.train_x):,}: read the aligned table")
    return tag


def _party_of(plan: Plan, number: int, name: str) -> Party:
    """Return the party that a plan takes a client for."""
    assert plan.split is not None and plan.split.parties
    parties = plan.split.parties
    names = [party.name for party in parties]
    others = {each.casefold() for each in names[:number] + names[number + 1 :]}
    if number >= len(parties) or name.casefold() in others - {names[number].casefold()}:
        taken = f"for {names[number]}" if number < len(parties) else "for no party"
        raise WorkRefused(
            f"this client is called {name}, and the plan takes client {number} {taken}, as its parties are "
            f"{', '.join(names)} in this order: {ORDER}"
        )
    return parties[number]


def _order(app: ClientApp, party: Party, places_P: Array, features: Sequence[str]) -> Array:
    """Return where the app has each of the party's columns; WorkRefused if it has others."""
    num_own = math.prod(app.train_x.shape[1:])
    wanted = [features[place] for place in places_P] if features else []
    shown = f" ({', '.join(wanted[:8])}{', ...' if len(wanted) > 8 else ''})" if wanted else ""
    if app.columns:
        if sorted(app.columns) != sorted(wanted):
            missing = sorted(set(wanted) - set(app.columns)) or sorted(set(app.columns) - set(wanted))
            raise WorkRefused(
                f"the plan's {party.name} has the columns{shown or ' ' + str(list(party.columns))}, and the app others "
                f"(compare {', '.join(missing[:5])}): name columns as the server's data do, or leave columns out and "
                "give them in that order"
            )
        own = list(app.columns)
        if len(own) == num_own:
            return np.array([own.index(each) for each in wanted], dtype=np.int64)
    if num_own != len(places_P):
        raise WorkRefused(
            f"a row of the app has {num_own} columns, the plan's {party.name} has {len(places_P)}{shown}: give these, "
            "in this order"
        )
    return np.arange(num_own)


def _placeholders(kind: str, num: int, num_outputs: int) -> Array:
    """Return targets of a kind that say nothing, for a party that has none."""
    if kind == CLASSIFICATION:
        return np.zeros(num, dtype=np.int64)
    if kind == SURVIVAL:
        return np.zeros((num, 2), dtype=np.float32)
    shape = (num,) if num_outputs == 1 or kind == BINARY else (num, num_outputs)
    return np.zeros(shape, dtype=np.float32)
