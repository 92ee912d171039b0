"""Figure of example images of a few clients, which shows skews of features and labels. Shapes: I channels, H, W."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from atoll.core.errors import DataError
from atoll.data.dataset import Dataset
from atoll.data.index import Partition
from atoll.data.rows import extremes
from atoll.data.targets import Array
from atoll.report.figures import MUTED, class_label, new_figure, plain, plot_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUM_EXAMPLES = 8


def sample_picture(dataset: Dataset, partition: Partition, clients: Sequence[int], title: str) -> Figure:
    """Draw a row of eight examples for each of a few clients, with their labels.

    Examples are spread evenly over a client's samples, so that they differ in class even if samples are sorted.
    """
    if len(dataset.input_shape) != 3 or dataset.tokens or not dataset.has_classes or dataset.train_y.ndim != 1:
        raise DataError(
            f"samples of {dataset.name} cannot be drawn: they have shape {dataset.input_shape}; choose a data set of "
            "labelled images of shape (channels, height, width)"
        )
    names = dataset.class_names or [str(label) for label in range(dataset.num_classes)]
    low, high = map(float, extremes(dataset.train_x))
    with plot_style():
        figure = new_figure(8.5, 0.6 + 1.15 * len(clients))
        panels = figure.subplots(len(clients), NUM_EXAMPLES, squeeze=False)
        for row, client in zip(panels, clients, strict=True):
            held = partition.indices(client)
            spread = np.linspace(0, len(held) - 1, min(NUM_EXAMPLES, len(held))).astype(int)
            for panel in row:
                panel.set(xticks=[], yticks=[])
                panel.spines[:].set_visible(False)
            for panel, index in zip(row, held[spread], strict=False):
                panel.imshow(_image(dataset.train_x[index], low, high), cmap="gray", vmin=0, vmax=1)
                panel.spines[:].set_visible(True)
                panel.set_title(class_label(names[dataset.train_y[index]]), loc="center", fontsize=9)
            place = {"ha": "right", "va": "center", "transform": row[0].transAxes}
            row[0].text(-0.12, 0.5, f"client {client}", color=MUTED, **place)
        figure.suptitle(plain(title, 90), x=0.01, ha="left", fontsize=12, fontweight="bold")
    return figure


def _image(x_IHW: Array, low: float, high: float) -> Array:
    """Return an image in matplotlib's layout, scaled to [0, 1]: colour if there are three channels, else the first."""
    scaled_IHW = (x_IHW.astype(np.float32) - low) / max(high - low, 1e-9)
    return np.moveaxis(scaled_IHW, 0, 2) if len(x_IHW) == 3 else scaled_IHW[0]
