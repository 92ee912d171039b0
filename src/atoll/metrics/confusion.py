"""Confusion."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from atoll.core.messages import State
from atoll.core.metric import Figures, Metric


def confusion() -> Metric:
    """Count (true class, predicted class)."""

    def add(scores: Tensor, targets: Tensor, weight_N: Tensor) -> State:
        num = scores.shape[-1]
        pairs = targets * num + scores.argmax(-1)
        return {"matrix": torch.bincount(pairs, minlength=num**2).view(num, num)}

    def finish(part: State) -> Figures:
        confusion_KK = part["matrix"].numpy()
        hits_K = np.diag(confusion_KK).astype(float)
        true_K, predicted_K = confusion_KK.sum(1), confusion_KK.sum(0)
        occurs_K = (true_K + predicted_K) > 0
        precision_K = hits_K / np.maximum(predicted_K, 1)
        recall_K = hits_K / np.maximum(true_K, 1)
        f1_K = 2 * hits_K / np.maximum(true_K + predicted_K, 1)
        return {
            "accuracy": float(hits_K.sum() / confusion_KK.sum()),
            "precision": float(precision_K[occurs_K].mean()),
            "recall": float(recall_K[occurs_K].mean()),
            "f1": float(f1_K[occurs_K].mean()),
        }

    return Metric(add=add, finish=finish, chart=lambda part: {"matrix": part["matrix"].tolist()})
