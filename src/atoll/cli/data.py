"""`atoll data`: list, fetch, show and measure data sets, and encode tables at sites."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.plans import PlanArgument, SetOption, read_plan, read_settings
from atoll.cli.tables import encode, summarise

data_app = typer.Typer(help="Data sets: list them, fetch them, show how they are divided.", no_args_is_help=True)


@data_app.command("list")
def data_list() -> None:
    """List the data sets of the catalogue."""
    import importlib

    from atoll.core.parts import members

    for name in members("data.catalog"):
        module = importlib.import_module(f"atoll.data.catalog.{name}")
        print(f"{name:15} download {module.SIZE:8} {module.SUMMARY}")


@data_app.command("fetch")
def data_fetch(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names from `atoll data list`.")],
) -> None:
    """Download data sets into the cache (ATOLL_DATA, or the user's cache directory) and check them."""
    from atoll.core.parts import Part
    from atoll.data.fetch import cache_dir

    for name in names:
        print(Part(name).build("data.catalog"))
    print(f"cache {cache_dir()}")


@data_app.command("show")
def data_show(
    plan: PlanArgument = None,
    settings: SetOption = None,
    png: Annotated[Path, typer.Option(help="Where to draw the partition, clients x classes.")] = Path("partition.png"),
) -> None:
    """Show how a plan divides its data among clients, with a figure. E.g. --set data=mnist --set partition=shards."""
    import numpy as np

    from atoll.api import partition_counts
    from atoll.data.heterogeneity import earth_movers_distance, js_divergence, weighted_mean
    from atoll.report.figures import partition_picture, save_png
    from atoll.report.reading import part_text
    from atoll.train.federation import build_federation

    chosen = read_plan(plan, read_settings(settings))
    federation = build_federation(chosen)
    dataset, sizes = federation.dataset, federation.partition.sizes()
    print(dataset)
    if dataset.origin:
        print(dataset.origin)
    print(
        f"{federation.num_clients} clients by {part_text(chosen.partition)}: samples a client "
        f"min {sizes.min()}, median {np.median(sizes):g}, max {sizes.max()}"
    )
    if federation.new_clients:
        print(f"{len(federation.new_clients)} more are held out of training: evaluation.new_clients")
    counts = partition_counts(federation)
    if counts is None:
        print("samples have no single class: there is no picture of classes to draw")
        return
    counts_CK = np.array(counts["counts"])
    classes = (counts_CK > 0).sum(1)
    print(
        f"classes a client min {classes.min()}, mean {classes.mean():.1f}, max {classes.max()} of {dataset.num_classes}"
    )
    for measure, values_C in (
        ("Jensen-Shannon divergence (0 to 1)", js_divergence(counts_CK)),
        ("earth mover's distance (0 to 2)", earth_movers_distance(counts_CK)),
    ):
        print(f"labels of a client against all: {measure}, weighted mean {weighted_mean(values_C, counts_CK):.3f}")
    title = f"{dataset.name} by {part_text(chosen.partition)}"
    save_png(partition_picture(counts_CK, dataset.class_names, title, federation.num_clients), png)
    print(f"picture {png}")
    if len(dataset.input_shape) == 3 and not dataset.tokens:
        from atoll.report.sample_picture import sample_picture

        samples_png = png.with_stem(f"{png.stem}-samples")
        first_clients = range(min(8, federation.num_clients))
        save_png(sample_picture(dataset, federation.partition, first_clients, title), samples_png)
        print(f"samples {samples_png}")


@data_app.command("measure")
def data_measure(
    plan: PlanArgument = None,
    settings: SetOption = None,
    clients: Annotated[int, typer.Option(help="Maximum number of measured clients, drawn by the seed.")] = 100,
    budget: Annotated[int, typer.Option(help="Maximum number of L-BFGS steps for each minimum in Gamma.")] = 500,
    noise: Annotated[float, typer.Option(help="Target for the relative noise of a round's gradient.")] = 0.1,
    png: Annotated[Path, typer.Option(help="Where to draw the measures.")] = Path("measures.png"),
) -> None:
    """Measure how a plan's clients differ (labels, gradients, Gamma, drift), and how many clients a round needs."""
    from atoll.report.figures import save_png
    from atoll.report.measure_picture import measure_picture
    from atoll.report.measuring import as_text, measure_plan
    from atoll.report.progress import Steps
    from atoll.rounds.planning import as_table

    chosen = read_plan(plan, read_settings(settings))
    with Steps() as progress:
        measures = measure_plan(chosen, clients=clients, budget=budget, progress=progress)
    gradients = measures.dissimilarity
    print(as_text(measures))
    print(
        f"\nnoise of a round's mean gradient at the first model, its standard error over its norm; wanted {noise:.0%}:"
    )
    variance = (gradients.b**2 - 1) * gradients.norm**2
    print(as_table(measures.num_clients, variance, gradients.norm, measures.num_bytes, noise))
    save_png(measure_picture(measures), png)
    print(f"picture {png}")


data_app.command()(summarise)
data_app.command()(encode)
