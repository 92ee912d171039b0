"""The model with which a run ended, in the home of a client."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atoll.core.errors import RunError
from atoll.core.params import params_hash
from atoll.network.client.task import AgreedRun, Fetch, WorkRefused
from atoll.network.protocol.messages import RunInfo
from atoll.train.own_models import OwnModels


def save_final_model(agreed: AgreedRun, info: RunInfo, end: Mapping[str, Any], fetch: Fetch) -> Path:
    """Download the final parameters that the ledger's last record names; save them as this client's own model.

    Of a model that is cut a client gets its own layers. The record has their name, or that of the list of all parties'.
    """
    job, home, (_, state) = agreed.job, agreed.home, agreed.home.state()
    if info.model is None:
        raise WorkRefused("the server does not give it")
    params_D = agreed.final_params(info.model, fetch)
    if agreed.parties is None:
        is_named = params_hash(params_D).hex() == end.get("model")
    else:
        named = info.model if info.layers is None else info.layers
        is_named = (named.name, agreed.layers_name(named, fetch)) == (end.get("layers"), info.model.name)
    if not is_named:
        raise RunError(f"{home.path.name} ended with another model than its ledger says; do not trust this server")
    if agreed.parties is not None:
        return home.save_model(agreed.own_parties.cut.client.named(params_D))
    return home.save_model(
        OwnModels(job, [lambda: job.model], params_D, {agreed.number: state})[agreed.number].state_dict()
    )
