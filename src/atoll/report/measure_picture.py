"""Figure of how far the clients of a plan differ. Shapes: C clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from atoll.data.heterogeneity import earth_movers_distance, js_divergence
from atoll.report.figures import INK, MUTED, PALETTE, new_figure, plain, plot_style
from atoll.report.measuring import Measures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BINS = 20


def measure_picture(measures: Measures) -> Figure:
    """Draw histograms of clients by label divergence and gradient norm, and measured against predicted drift."""
    with plot_style():
        figure = new_figure(12.5, 4.2)
        labels, gradients, drift = figure.subplots(1, 3)
        shown = f"{measures.title}; {len(measures.clients):,} of {measures.num_clients:,} clients"
        figure.suptitle(plain(shown, 110), x=0.01, ha="left", fontsize=12, fontweight="bold")
        _label_panel(labels, measures)
        _gradient_panel(gradients, measures)
        _drift_panel(drift, measures)
        for panel in (labels, gradients, drift):
            panel.grid(axis="y")
            panel.tick_params(length=0, which="both")
            panel.margins(y=0.25)  # room for the legend
            panel.legend(loc="upper left", labelcolor=INK, fontsize=8.5)
    return figure


def _label_panel(panel: Axes, measures: Measures) -> None:
    counts_CK = measures.counts_CK
    panel.hist(
        [js_divergence(counts_CK), earth_movers_distance(counts_CK)],
        bins=np.linspace(0, 2, BINS + 1).tolist(),
        color=PALETTE[:2],
        label=["Jensen-Shannon (bits, at most 1)", "earth mover's (no unit, at most 2)"],
    )
    panel.set_title("Labels")
    panel.set(xlabel="divergence of a client from all together", ylabel="clients", xlim=(0, 2))


def _gradient_panel(panel: Axes, measures: Measures) -> None:
    gradients = measures.dissimilarity
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio_C = gradients.norm_C / gradients.norm
    panel.hist(ratio_C[np.isfinite(ratio_C)], bins=BINS, color=PALETTE[0], label="clients")
    if np.isfinite(gradients.b):
        panel.axvline(gradients.b, color=INK, lw=1.3, label=f"B = {gradients.b:.3g}, their root mean square")
    panel.set_title("Gradients")
    panel.set(xlabel="gradient norm of a client / of F (no unit)", ylabel="clients")


def _drift_panel(panel: Axes, measures: Measures) -> None:
    drifts = measures.drifts
    lr = [drift.lr for drift in drifts]
    predicted = [drift.predicted for drift in drifts]
    panel.loglog(lr, predicted, color=MUTED, lw=1.3, ls="--", label="predicted, first order")
    panel.loglog(lr, [drift.between for drift in drifts], color=PALETTE[2], lw=1.3, ls=":", label="between clients")
    panel.loglog(lr, [drift.measured for drift in drifts], "o", color=PALETTE[1], ms=5, label="measured")
    panel.set_title(f"Drift in {drifts[-1].steps} local steps")
    panel.set(xlabel="step size (no unit)", ylabel=f"norm of the bias ({measures.loss_unit})")
