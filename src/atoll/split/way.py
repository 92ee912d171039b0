"""Way: who trains when in split learning, and what becomes of the layers at the end of a round."""

from __future__ import annotations

from typing import NamedTuple


class Way(NamedTuple):
    """A way to train the clients of a round on a model that is cut."""

    hands_on: bool
    """Whether a client begins with the layers of the one before it; all begin alike, and are averaged, if not."""
    own_server: bool
    """Whether each client has server-side layers of its own, which are averaged; all train the same ones, if not."""
    columns: bool = False
    """Whether clients hold different columns of the same rows, and take each step together."""
