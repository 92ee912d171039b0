"""Commands for tables at sites: summarise one's own rows, and make one encoding of all summaries."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

TargetOption = Annotated[
    list[str], typer.Option("--target", metavar="COLUMN", help="What is to be learnt; repeatable.")
]
FeatureOption = Annotated[
    list[str] | None,
    typer.Option("--feature", metavar="COLUMN", help="A column to learn from; all others if left out. Repeatable."),
]
CategoryOption = Annotated[
    list[str] | None, typer.Option("--category", metavar="COLUMN", help="A column of codes, not numbers. Repeatable.")
]


def summarise(
    table: Annotated[Path, typer.Argument(metavar="FILE", help="A CSV or Parquet file of this site's training rows.")],
    target: TargetOption,
    feature: FeatureOption = None,
    category: CategoryOption = None,
    problem: Annotated[str, typer.Option(help="E.g. regression, if the target's values leave that open.")] = "",
    min_count: Annotated[
        int, typer.Option(min=1, help="Do not name categories of fewer rows, nor smallest and largest values.")
    ] = 1,
    out: Annotated[Path, typer.Option(help="Where to write the summary.")] = Path("summary.json"),
) -> None:
    """Summarise a site's table: counts, means and categories of columns, no row. Send the file to who encodes."""
    from atoll.data.columns import read_csv, read_parquet
    from atoll.data.tables import Roles, site_summary

    read = read_parquet if table.suffix == ".parquet" else read_csv
    roles = Roles(
        target=target[0] if len(target) == 1 else target, features=feature, problem=problem, min_count=min_count
    )
    summary = site_summary(read(table, categories=category or ()), roles)
    out.write_text(summary.to_json() + "\n")
    classes = f", classes {', '.join(summary.classes)}" if summary.classes else ""
    print(f"{summary.rows} rows, {len(summary.columns)} columns{classes}")
    print(f"summary {out}")


def encode(
    summaries: Annotated[list[Path], typer.Argument(metavar="SUMMARY...", help="Files of `atoll data summarise`.")],
    max_categories: Annotated[int, typer.Option(min=1, help="Categories of a column that get a feature each.")] = 50,
    ignore_unknown: Annotated[
        bool, typer.Option("--ignore-unknown", help="Encode categories that no site told of as zeros, not as an error.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Where to write the encoding.")] = Path("encoding.json"),
) -> None:
    """Make one encoding of the summaries of all sites; each reads its table with encoding=FILE."""
    from atoll.data.encoding import Encoding, Summary, merge, read_text

    merged = merge([Summary.from_json(read_text(path), str(path)) for path in summaries])
    unknown: Literal["ignore", "refuse"] = "ignore" if ignore_unknown else "refuse"
    encoding = Encoding.of(merged, max_categories=max_categories, unknown=unknown)
    out.write_text(encoding.to_json() + "\n")
    print(f"{len(summaries)} sites, {merged.rows} rows, {len(encoding.feature_names)} features")
    print(f"encoding {out}")
