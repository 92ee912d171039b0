"""Pictures of what metrics chart: predicted against true, survival by risk, and calibration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from atoll.report.figures import INK, MUTED, PALETTE, new_figure, plot_style


class ChartPicture(NamedTuple):
    """How a metric's chart is drawn and what is said of it."""

    draw: Callable[[dict[str, Any]], Figure]
    title: str
    note: str


def predicted_picture(chart: dict[str, Any]) -> Figure:
    """Draw predicted against true values; a perfect model has all points on the line."""
    true, predicted = np.asarray(chart["true"], dtype=float), np.asarray(chart["predicted"], dtype=float)
    with plot_style():
        figure = new_figure(5.2, 4.8)
        panel = figure.subplots()
        ends = [min(true.min(), predicted.min()), max(true.max(), predicted.max())]
        panel.plot(ends, ends, color=MUTED, lw=1.2)
        panel.scatter(true, predicted, s=9, color=PALETTE[0], alpha=0.6, lw=0)
        panel.set(xlabel="true value", ylabel="predicted value")
        panel.set_title(f"Predicted against true, {len(true):,} values")
        panel.grid(axis="both")
    return figure


def survival_picture(chart: dict[str, Any]) -> Figure:
    """Draw the Kaplan-Meier estimate of each group of risk."""
    with plot_style():
        figure = new_figure(6.4, 4.4)
        panel = figure.subplots()
        for colour, (name, curve) in zip(PALETTE, chart["groups"].items(), strict=False):
            panel.step(curve["time"], curve["survival"], where="post", color=colour, lw=1.9, label=name)
        panel.set(xlabel="time, in the unit of the data", ylabel="share without an event", ylim=(0, 1.02))
        panel.set_title("Survival by predicted risk (Kaplan-Meier)")
        panel.grid(axis="y")
        panel.legend(labelcolor=INK, fontsize=9)
    return figure


def calibration_picture(chart: dict[str, Any]) -> Figure:
    """Draw how often predictions of each confidence were right."""
    with plot_style():
        figure = new_figure(5.2, 4.8)
        panel = figure.subplots()
        panel.plot([0, 1], [0, 1], color=MUTED, lw=1.2)
        weight = np.asarray(chart["weight"], dtype=float)
        sizes = 12 + 180 * weight / max(weight.max(initial=0), 1e-12)
        panel.scatter(chart["confidence"], chart["frequency"], s=sizes, color=PALETTE[0], alpha=0.75, lw=0)
        panel.set(xlabel="predicted share", ylabel="observed share", xlim=(0, 1), ylim=(0, 1.02))
        panel.set_title("Calibration")
        panel.grid(axis="both")
    return figure


def groups_picture(chart: dict[str, Any]) -> Figure:
    """Draw the accuracy of each group."""
    known = {name: value for name, value in chart["accuracy"].items() if value is not None}
    with plot_style():
        figure = new_figure(6.4, 1.4 + 0.36 * len(known))
        panel = figure.subplots()
        colours = [PALETTE[1] if name == chart["worst_group"] else PALETTE[0] for name in known]
        panel.barh(list(known), [100 * value for value in known.values()], color=colours, lw=0)
        panel.set(xlabel="accuracy (%)", xlim=(0, 100))
        panel.set_title("Accuracy by group")
        panel.invert_yaxis()
        panel.grid(axis="x")
    return figure


PICTURES: dict[str, ChartPicture] = {
    "predicted": ChartPicture(
        predicted_picture, "Predicted against true", "Test samples, evenly picked over the true values."
    ),
    "kaplan_meier": ChartPicture(
        survival_picture, "Survival", "Test samples, divided at the median of the predicted risk."
    ),
    "fairness": ChartPicture(groups_picture, "Groups", "Test samples by group; the worst group is orange."),
    "calibration_error": ChartPicture(
        calibration_picture, "Calibration", "The size of a point is the weight of the test samples in its bin."
    ),
}
"""Metric -> how its chart is drawn."""
