"""The model with which a run ended, in the home of a client."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from atoll.core.errors import RunError
from atoll.core.params import params_hash
from atoll.network.client.home import RunHome
from atoll.network.client.task import AgreedRun
from atoll.network.protocol.messages import Ref
from atoll.train.own_models import OwnModels


def save_final_model(agreed: AgreedRun, home: RunHome, ref: Ref, params_D: Tensor, end: Mapping[str, Any]) -> Path:
    """Save the final parameters that the ledger's last record names, as this client's own model; return its path.

    Of a model that is cut a client gets its own layers, and the record has their name.
    """
    job, parties, (_, state) = agreed.job, agreed.parties, home.state()
    found = (params_hash(params_D).hex(), end.get("model")) if parties is None else (ref.name, end.get("layers"))
    if found[0] != found[1]:
        raise RunError(f"{home.path.name} ended with another model than its ledger says; do not trust this server")
    if parties is not None:
        return home.save_model(parties.cut.client.named(params_D))
    return home.save_model(
        OwnModels(job, [lambda: job.model], params_D, {agreed.number: state})[agreed.number].state_dict()
    )
