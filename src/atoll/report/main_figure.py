"""The main figure of a run: accuracy of a classifier, root mean squared error of a regression, and so on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.report.reading import RunRecord

SHARES = frozenset(
    {"accuracy", "balanced_accuracy", "precision", "recall", "f1", "attack_success", "exact_match", "multiple_choice"}
)
"""Figures that are shown in percent."""
SMALLER_IS_BETTER = frozenset({"rmse", "mae", "brier", "calibration_error", "perplexity", "loss"})
TITLES = {
    "rmse": "root mean squared error",
    "mae": "mean absolute error",
    "r2": "R2",
    "f1": "F1",
    "auroc": "AUROC",
    "mcc": "Matthews correlation",
    "brier": "Brier score",
    "concordance": "concordance index",
}
"""Figures whose names are not their titles."""
MEASURES = {  # key in a metrics row -> title of the curve
    "test.accuracy": "Test accuracy",
    "test.f1": "Test F1 (macro)",
    "test.precision": "Test precision (macro)",
    "test.recall": "Test recall (macro)",
    "test.attack_success": "Attack success: other classes with the trigger, taken for the target",
    "models_test.worst_decile": "Clients' own models on the test set: the worst tenth",
    "clients_test.mean": "Clients: mean",
    "clients_test.worst_decile": "Clients: the worst tenth",
}
LOSSES = {"test.loss": "test loss", "train_loss": "train loss"}


def main_figure(records: Sequence[RunRecord]) -> str:
    """Return the name of the main figure of runs: the first that was measured on the test set, else the accuracy."""
    rows = (row for record in records for row in record.rows)
    return next((name for row in rows if (name := main_of(row.get("test") or {}))), "accuracy")


def main_of(figures: Mapping[str, Any]) -> str:
    """Return the name of the first figure beside the loss; empty if there is none.

    >>> main_of({"rmse": 0.5, "loss": 0.25})
    'rmse'
    """
    return next((name for name in figures if name != "loss"), "")


def title_of(name: str) -> str:
    """Return a figure's name in words."""
    return TITLES.get(name, name.replace("_", " "))


def measure_title(key: str) -> str:
    """Return the title of a curve by the key of its numbers in a metrics row.

    >>> measure_title("test.rmse"), measure_title("train_loss"), measure_title("privacy.epsilon")
    ('Test root mean squared error', 'Train loss', 'Privacy epsilon')
    """
    if key in MEASURES:
        return MEASURES[key]
    group, _, name = key.rpartition(".")
    text = f"{group.replace('_', ' ').replace('.', ' ')} {title_of(name)}".strip()
    return text[0].upper() + text[1:]


def shown(name: str, value: float) -> str:
    """Return a figure as text, shares in percent.

    >>> shown("accuracy", 0.9125), shown("rmse", 0.69587)
    ('91.25 %', '0.6959')
    """
    return f"{100 * value:.2f} %" if name in SHARES else f"{value:.4g}"


def figures_text(figures: Mapping[str, float], of: str = "") -> str:
    """Return the main figure on the test set, the loss and macro F1 where they are measured, as one line.

    >>> figures_text({"rmse": 0.5, "loss": 0.25})
    'test root mean squared error 0.5   loss 0.2500'
    """
    main = main_of(figures)
    texts = [f"test {title_of(main)} {shown(main, figures[main])}{of}"] if main else []
    more = {"loss": "loss", "f1": "macro F1"}
    return "   ".join(texts + [f"{title} {figures[name]:.4f}" for name, title in more.items() if name in figures])


def best_of(name: str, values: Sequence[float]) -> float:
    """Return the best of some values of a figure."""
    return min(values) if name in SMALLER_IS_BETTER else max(values)
