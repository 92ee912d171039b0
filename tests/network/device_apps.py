"""Apps of clients whose process knows the pretend device."""

from __future__ import annotations

import pretend_models
from network.apps import client as plain

from atoll.network.client.app import ClientApp


def client() -> ClientApp:
    """What the environment says."""
    assert pretend_models.small
    return plain()
