"""The commands `atoll export` and `atoll answers`."""

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


def answers(
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run of hf_causal that has ended.")],
    samples: Annotated[int, typer.Option(min=0, help="Number of prompts from the test set.")] = 3,
    prompt: Annotated[list[str] | None, typer.Option(help="Another prompt. May be repeated.")] = None,
    questions: Annotated[
        Path | None, typer.Option(help="JSON lines with prompt, answer and, for a choice, candidates.")
    ] = None,
) -> None:
    """Let a language model speak as it was before and after training; the report shows it too."""
    from atoll.language.answers import answers as ask
    from atoll.language.answers import read_questions

    found = ask(
        directory,
        samples=samples,
        prompts=prompt or (),
        questions=() if questions is None else read_questions(questions),
    )
    for each in found["samples"]:
        print(*(f"{key:>7}: {each[key]}" for key in ("prompt", "before", "after")), sep="\n", end="\n\n")
    for when in ("before", "after") if "questions" in found else ():
        shares = ", ".join(f"{name.replace('_', ' ')} {100 * v:.1f} %" for name, v in found["questions"][when].items())
        print(f"{when:>7}: {shares} of {found['questions']['num']} questions")
