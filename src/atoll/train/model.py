"""Make a plan's model, and try it with the loss and the metrics on a few samples."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from atoll.core.errors import AtollError, PlanError
from atoll.core.parts import Part, find, members
from atoll.core.plan import Plan
from atoll.core.problem import Loss, Problem
from atoll.core.seeds import derive
from atoll.data.dataset import Dataset
from atoll.train.attributes import as_before
from atoll.train.federation import Federation
from atoll.train.job import Job
from atoll.train.metrics import Measures
from atoll.train.seeded import seeded
from atoll.train.vertical import vertical_model

MIXED = 64
"""Samples on which is tried whether a loss mixes them."""


def build_model(
    plan: Plan,
    federation: Federation,
    part: Part | None = None,
    loss: Loss | None = None,
    measures: Measures | None = None,
    draw: int = 0,
) -> nn.Module:
    """Make the model, or another of the plan's, with seeded first weights, and try it with the plan's loss.

    Other numbers of a `draw` give other first weights, which what is lazy draws in the trial. A factory gets
    `input_shape`, and the number of outputs as `num_classes`, if it names them. Of parties that hold columns it is the
    top model, with theirs below it.
    """
    dataset, part = federation.dataset, part or (plan.models or (plan.model,))[0]
    with seeded(derive(plan.seed, "model", *([draw] if draw else []))):
        try:
            if plan.split is not None and plan.split.parties:
                model = vertical_model(plan.split, part, dataset)
            else:
                model = part.build("models", input_shape=dataset.input_shape, num_classes=dataset.num_outputs)
        except AtollError:
            raise
        except Exception as error:
            raise PlanError(
                f"model '{part.name}' cannot be made for samples of shape {dataset.input_shape}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not isinstance(model, nn.Module):
            raise PlanError(f"model '{part.name}' gave {type(model).__name__}: a factory must return an nn.Module")
        if next(model.parameters(), None) is None:
            raise PlanError(f"model '{part.name}' has no parameters: there is nothing to train")
        if (prepare := plan.algorithm.build("algorithms").prepare) is not None:
            prepare(model)
        model.train()
        named = plan.loss or build_problem(plan, dataset).loss
        _try_model(model, part.name, named.name, loss or build_loss(named, dataset.problem), federation, measures)
    return model


def final_model(plan: Plan, job: Job) -> nn.Module:
    """Return a fresh model for the parameters that a run ended with."""
    return copy.deepcopy(job.model) if job.work.first is not None else build_model(plan, job.federation)


class ArrayModel(nn.Module):
    """Named arrays in place of a model, for client work that needs none; they are trained, sent and saved as one."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        super().__init__()
        for name, values in arrays.items():
            tensor = torch.as_tensor(values)
            tensor = tensor if tensor.dtype.is_floating_point else tensor.float()
            self.register_parameter(name.replace(".", "_"), nn.Parameter(tensor.clone()))


def build_problem(plan: Plan, dataset: Dataset) -> Problem:
    """Return what the plan says is learnt, or what the targets look like."""
    problem = (plan.problem or Part(dataset.problem)).build("problems")
    if not isinstance(problem, Problem):
        raise PlanError(f"problem '{plan.problem}' gave {type(problem).__name__}: return an atoll.core.problem.Problem")
    return problem


def build_loss(part: Part, kind: str) -> Loss:
    """Return a loss of the catalogue for a kind of problem; one's own function without options is the loss itself."""
    own = part.call is not None or ":" in part.name
    if own and not part.options:
        return part.call or find("train.losses", part.name)
    loss = part.build("train.losses")
    if not callable(loss):
        raise PlanError(f"loss '{part.name}' gave {type(loss).__name__}: return a function of outputs and targets")
    fits = () if own else _fits(part.name)
    if fits and kind not in fits:
        fitting = [name for name in members("train.losses") if kind in _fits(name)]
        raise PlanError(f"loss '{part.name}' is for {', '.join(fits)}, not for {kind}: use {' or '.join(fitting)}")
    return loss  # type: ignore[no-any-return]


def _fits(name: str) -> tuple[str, ...]:
    return getattr(importlib.import_module(f"atoll.train.losses.{name}"), "FITS", ())


def _try_model(
    model: nn.Module, name: str, loss_name: str, loss: Loss, federation: Federation, measures: Measures | None
) -> None:
    """Run two samples through the model, the loss and the metrics, so that misfits are named before training starts."""
    dtype = next(model.parameters()).dtype
    x, y = federation.first(2)
    x = x.to(dtype) if x.dtype.is_floating_point else x
    try:
        with as_before(model), torch.no_grad():
            outputs = model.eval()(x)
            losses = loss(outputs, y)
        model.train()
    except Exception as error:
        dataset = federation.dataset
        what = f"{dataset.num_classes} classes" if dataset.num_classes else f"{dataset.problem} targets"
        raise PlanError(
            f"model '{name}' with loss '{loss_name}' does not fit samples of shape {dataset.input_shape} with {what}: "
            f"{error}; use a model for such samples, or other data"
        ) from error
    if not isinstance(losses, Tensor) or losses.shape != (len(y),):
        gave = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise PlanError(
            f"loss '{loss_name}' must give one number a sample, shape ({len(y)},), but gave {gave}: "
            "reduce over everything but the first dimension"
        )
    classes = federation.dataset.num_classes
    if loss_name == "cross_entropy" and outputs.shape[-1] < classes:
        raise PlanError(
            f"the model has {outputs.shape[-1]} outputs for {classes} classes: pass num_classes to the model"
        )
    if measures is not None:
        _try_measures(measures, outputs, y, losses)


def _try_measures(measures: Measures, outputs: Tensor, y: Tensor, losses: Tensor) -> None:
    """Measure two samples, so that a metric that does not fit the problem is named before training starts."""
    for label, metric in measures.metrics.items():
        try:
            alone = Measures(measures.problem, {label: metric})
            alone.finish(alone.add(outputs, y, losses))
        except AtollError:
            raise
        except Exception as error:
            raise PlanError(
                f"metric '{label}' does not fit outputs of shape {tuple(outputs.shape)} and targets of shape "
                f"{tuple(y.shape)}: {type(error).__name__}: {error}; name others in evaluation.metrics"
            ) from error


def mixing_loss(federation: Federation, model: nn.Module, loss: Loss) -> str | None:
    """Name a loss by which one sample's number depends on others; None if none does on the samples that are tried."""
    x, y = federation.first(MIXED)
    dtype = next(model.parameters()).dtype
    with as_before(model), torch.no_grad():
        outputs = model.eval()(x.to(dtype) if x.dtype.is_floating_point else x)
        outputs = outputs + torch.randn(outputs.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
        together = loss(outputs, y)
        alone = torch.cat([loss(outputs[i : i + 1], y[i : i + 1]) for i in range(len(y))])
    model.train()
    return None if torch.allclose(together, alone, rtol=1e-3, atol=1e-4, equal_nan=True) else "the loss"


def fastest_layout(model: nn.Module, input_shape: tuple[int, ...]) -> torch.memory_format:
    """Channels last where the model convolves images and takes them like that: this is faster on a processor.

    A model may ask for views that only the usual layout allows, so it is tried: on numbers that are the same for
    everybody, since all clients of a network must choose alike.
    """
    plain, last = torch.contiguous_format, torch.channels_last
    convolves = any(isinstance(module, nn.Conv2d) for module in model.modules())
    if not convolves or len(input_shape) != 3 or next(model.parameters()).dtype != torch.float32:
        return plain
    x = torch.rand((2, *input_shape), generator=torch.Generator().manual_seed(1))
    try:
        with as_before(model), torch.no_grad():
            model.eval()
            usual, other = model(x), model(x.to(memory_format=last))
            same = bool((usual - other).abs().max() <= 1e-3 * usual.abs().max())
    except (RuntimeError, TypeError):
        same = False
    return last if same else plain
