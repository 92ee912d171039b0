"""Trackers: readers of events that keep a run's figures in TensorBoard, MLflow or Weights & Biases.

Each is a callable for `watch=[...]` of `atoll.run`; its tool is imported when it is made.
"""

from atoll.trackers.mlflow import mlflow
from atoll.trackers.tensorboard import tensorboard
from atoll.trackers.wandb import wandb

__all__ = ["mlflow", "tensorboard", "wandb"]
