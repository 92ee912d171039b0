"""The command `atoll export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run of hf_causal that has ended.")],
    adapter: Annotated[Path, typer.Option(metavar="DIR", help="Where to write; a new or empty directory.")],
    merged: Annotated[
        bool, typer.Option("--merged", help="The whole model instead, with the adapter merged in.")
    ] = False,
) -> None:
    """Write the adapter of a trained language model, which peft loads, or the merged model, with a model card."""
    from atoll.language.export import export_run

    print(export_run(directory, adapter, merged=merged))
