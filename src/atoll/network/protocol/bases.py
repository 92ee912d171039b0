"""Bases of language models in a real federation: the base never travels, and nobody chooses what another reads.

The server's plan has a path, clients are told a name and the hash of the weights, and each client's owner says which of
its directories has that name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from atoll.core.errors import PlanError
from atoll.core.parts import Part
from atoll.core.plan import Plan
from atoll.models.hf_files import base_hash

MODEL = "hf_causal"
Bases = Mapping[str, str]
"""Name of a base -> the client's own directory of it."""
NO_BASES: Bases = MappingProxyType({})


def with_base_hash(plan: Plan) -> Plan:
    """Return the plan of a server with the hash of its base, so that all of a run's clients have the same."""
    options = plan.model.options
    if plan.model.name != MODEL or options.get("sha256") or "path" not in options:
        return plan
    return plan.replace({"model.sha256": base_hash(str(options["path"]))})


def told_by_name(model: Part) -> Part:
    """Return the model as clients are told it: with the name of its base, the last part of the path, for the path."""
    if model.name != MODEL or "path" not in model.options:
        return model
    options = {key: value for key, value in model.options.items() if key != "path"}
    return Part(MODEL, base=os.path.basename(os.path.abspath(str(model.options["path"]))), **options)


def with_own_base(model: Part, bases: Bases) -> Part:
    """Return the model that a server names with the client's own directory of its base; refuse any other source.

    >>> with_own_base(Part("hf_causal", base="stories", sha256="0" * 64), {"stories": "models/s"}).options["path"]
    'models/s'
    """
    if model.name != MODEL:
        return model
    options = dict(model.options)
    if "path" in options:
        raise PlanError(
            f"the server's plan gives a path of a base, {options['path']!r:.80}, but a client reads bases of its own "
            "alone: let the operator serve the plan with this version of Atoll, which tells a name"
        )
    base, sha256 = options.pop("base", ""), options.get("sha256")
    if not isinstance(base, str) or base not in bases:
        known = f"it has {', '.join(sorted(bases))}" if bases else "it has none"
        raise PlanError(
            f"the plan is for the base {base!r:.80}, which is not among this client's own ({known}): copy the model's "
            "files here, and join with --base NAME=DIR"
        )
    if not isinstance(sha256, str) or len(sha256) != 64:
        raise PlanError(
            f"the plan gives no hash of the base {base!r}: got model.sha256 = {sha256!r:.80}, and a client checks the "
            "SHA-256 of 64 digits before it trains: let the operator serve the plan with this version of Atoll"
        )
    return Part(MODEL, path=bases[base], **options)


@contextmanager
def names_for_paths(bases: Bases) -> Iterator[None]:
    """Name bases instead of the owner's directories in errors, which the server is told."""
    try:
        yield
    except PlanError as error:
        text = str(error)
        for name, path in bases.items():
            text = text.replace(path, name)
        if text == str(error):
            raise
        raise PlanError(text) from error
