"""What is measured. Shapes: K classes, C clients."""

from __future__ import annotations

import numpy as np

from atoll.core.client_work import Sums

Metrics = dict[str, float]


def classification(confusion_KK: np.ndarray, loss: float) -> Metrics:
    """Accuracy, loss and macro precision, recall and F1 from a confusion matrix (true class x predicted class).

    Macro means are over the classes that occur, as truth or as prediction; a class never predicted has precision 0.

    >>> classification(np.array([[8, 2], [1, 9]]), 0.5)["accuracy"]
    0.85
    """
    hits_K = np.diag(confusion_KK).astype(float)
    true_K, predicted_K = confusion_KK.sum(1), confusion_KK.sum(0)
    occurs_K = (true_K + predicted_K) > 0
    precision_K = hits_K / np.maximum(predicted_K, 1)
    recall_K = hits_K / np.maximum(true_K, 1)
    f1_K = 2 * hits_K / np.maximum(true_K + predicted_K, 1)
    return {
        "accuracy": float(hits_K.sum() / confusion_KK.sum()),
        "loss": loss,
        "precision": float(precision_K[occurs_K].mean()),
        "recall": float(recall_K[occurs_K].mean()),
        "f1": float(f1_K[occurs_K].mean()),
    }


def plain_metrics(sums: Sums) -> Metrics:
    """Return the mean of every named sum over the samples; that of `right` is the accuracy.

    >>> import torch
    >>> plain_metrics({"count": torch.tensor(4), "right": torch.tensor(3.0), "loss": torch.tensor(2.0)})
    {'accuracy': 0.75, 'loss': 0.5}
    """
    names = {"right": "accuracy"}
    return {names.get(name, name): float(value / sums["count"]) for name, value in sums.items() if name != "count"}


def spread(accuracy_C: np.ndarray, loss_C: np.ndarray) -> Metrics:
    """How unequal clients fare: mean, standard deviation and the mean of the worst tenth."""
    tenth = max(1, len(accuracy_C) // 10)
    worst_C = np.sort(accuracy_C)[:tenth]
    return {
        "num_clients": float(len(accuracy_C)),
        "mean": float(accuracy_C.mean()),
        "std": float(accuracy_C.std()),
        "worst_decile": float(worst_C.mean()),
        "loss": float(loss_C.mean()),
    }
