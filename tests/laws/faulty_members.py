"""For every law a member that breaks it, by the name of its family and of the law. Shapes: C clients, D parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from atoll.aggregators.mean import mean
from atoll.aggregators.median import median
from atoll.aggregators.norm_clipping import norm_clipping
from atoll.attacks.sign_flip import sign_flip
from atoll.core.aggregator import stacked
from atoll.core.algorithm import Algorithm
from atoll.core.attack import Attack
from atoll.core.client_work import ClientWork
from atoll.core.defence import Defence
from atoll.core.errors import PlanError
from atoll.core.metric import Metric
from atoll.core.transform import Transform
from atoll.metrics.accuracy import accuracy
from atoll.metrics.auroc import auroc
from atoll.metrics.mae import mae
from atoll.train.array_work import array_work

Built = Callable[[], Any]


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Hand a function how often it was called, as its first argument: a memory that nobody sees."""
    calls: list[int] = []

    def wrapper(*args: Any) -> Any:
        calls.append(1)
        return function(len(calls), *args)

    return wrapper


def rule(function: Callable[..., Any], **traits: bool) -> Built:
    """Make a function that builds an aggregator of a function of the matrix."""
    return lambda: stacked(lambda updates_CD, weight_C: function(updates_CD), **traits)


def unequal_sum() -> Any:
    """Add up by weights, and forget to divide."""
    whole = mean()

    def finish(acc: Any, memory: Any) -> Any:
        aggregate, memory = whole.finish(acc, memory)
        return aggregate._replace(delta_D=acc["delta"]), memory

    return whole._replace(finish=finish)


def without_extras() -> Any:
    whole = median()
    return whole._replace(finish=lambda acc, memory: (whole.finish(acc, memory)[0]._replace(aux={}), memory))


def with_a_number() -> Any:
    whole = mean()
    return whole._replace(add=lambda acc, update: {**whole.add(acc, update), "number": 3})


def step(change: Callable[[Any], Any] = lambda v: v, back: Callable[[Any], Any] = lambda v: v, **traits: Any) -> Built:
    """Make a function that builds a transform of two functions of the vector."""
    return lambda: Transform(
        encode=lambda vector_V, memory, encoding: (change(vector_V), {}, memory),
        decode=lambda carrier, side: back(carrier),
        **traits,
    )


def sending(change: Callable[..., Any], **traits: Any) -> Built:
    """Make a function that builds an attack of a function of the update and of what the attacker knows."""
    return lambda: Attack(
        update=lambda honest, known: honest._replace(delta_D=change(honest.delta_D, known)), knows="all", **traits
    )


def poisoning(change: Callable[..., Any], **traits: Any) -> Built:
    return lambda: Attack(data=lambda x, y, known: change(x, y), **traits)


def finishing(change: Callable[..., Any]) -> Built:
    """Make a function that builds an algorithm of a function of the update and of the task."""

    def finish(delta_D: Any, task: Any) -> Any:
        update, state = Algorithm().finish(delta_D, task)
        return change(update, task), state

    return lambda: Algorithm(finish=finish)


def shrinking() -> Algorithm:
    """Send less from call to call."""
    shrink = counted(lambda number, update, task: update._replace(delta_D=update.delta_D / number))
    return Algorithm(finish=lambda delta_D, task: (shrink(Algorithm().finish(delta_D, task)[0], task), {}))


def slowing() -> Algorithm:
    """Let the server take smaller steps from call to call."""

    def slower(number: int, params_D: Any, aggregate: Any, server: Any, task: Any) -> Any:
        return params_D + aggregate.delta_D / number, server

    return Algorithm(server_step=counted(slower))


def without_statistics(update: Any, task: Any) -> Any:
    if "statistics" in task.broadcast.aux:
        raise ValueError("no batch norm, please")
    return update


def sometimes_more(update: Any, task: Any) -> Any:
    return update._replace(aux={"more": update.weight.reshape(1)}) if bool(update.delta_D.any()) else update


def harmless(arrays: Any, x: Any, y: Any) -> dict[str, float]:
    return {"loss": float(len(y))}


def work(train: Callable[..., Any], evaluate: Callable[..., Any] = harmless) -> Built:
    """Make a function that builds client work on one array of a function of it and of the samples."""

    def built() -> ClientWork:
        function = counted(train)
        return array_work(
            first=lambda dataset: {"w": np.zeros(2)},
            train=lambda arrays, task, memory: ({"w": function(arrays["w"], task.x)}, len(task.y), {}),
            evaluate=lambda arrays, task: evaluate(arrays, task.x, task.y),
        )

    return built


def misfitting() -> ClientWork:
    """Say that clients may be trained as one, and do something else."""
    return work(lambda number, w, x: w + 1)()._replace(stackable=True, uses_algorithm=True)


def scoring(change: Callable[..., Any]) -> Built:
    """Make a function that builds a metric of what its samples are changed to."""
    return lambda: accuracy()._replace(add=lambda *samples: accuracy().add(*change(*samples)))


def refusing() -> Metric:
    def add(*samples: Any) -> Any:
        raise PlanError("no samples, please")

    return accuracy()._replace(add=add)


def numbered() -> Metric:
    return accuracy()._replace(add=lambda *samples: {**accuracy().add(*samples), "number": 3})


def boastful() -> Metric:
    """State that histograms are exact."""
    whole = auroc()
    return whole._replace(finish_sums=lambda sums: {**whole.finish_sums(sums), "auroc_error": 0.0})  # type: ignore[misc]


def unweighted() -> Metric:
    """Count the samples of weight 0 too."""
    return accuracy()._replace(
        add=lambda scores, targets, weight_N: {"sum": scores.double().sum(), "count": torch.tensor(1.0).double()}
    )


counting_work = work(lambda number, w, x: w + number)
noisy_work = work(lambda number, w, x: w + np.random.standard_normal())


def hiding(hide: Callable[..., Any], **fields: Any) -> Built:
    """Return what makes a defence of split learning that sends something else."""
    return lambda: Defence(hide=hide, **fields)


FAULTS: dict[str, dict[str, Built]] = {
    "split.defences": {
        "it is built by its example": lambda: None,
        "it fills a slot": Defence,
        "values keep shape and type and are finite": hiding(lambda values, key: values.double()),
        "the same values in the same place get the same bits": hiding(lambda v, key: v + torch.randn_like(v)),
        "noise is secret and never comes twice": hiding(lambda values, key: values + 1, draws=True),
        "what draws nothing needs no secret": hiding(lambda values, key: values + key(values)[0]),
        "a run repeats and a resumed run ends the same": hiding(lambda v, key: v + torch.randn_like(v)),
    },
    "aggregators": {
        "it is built by its example": lambda: None,
        "folding in parts equals folding at once": lambda: mean()._replace(merge=lambda left, right: left or right),
        "extras go the same way": without_extras,
        "a permutation changes nothing": rule(lambda updates_CD: updates_CD[0].clone()),
        "a client that claims more samples gains nothing": lambda: mean()._replace(weighted=False),
        "weights are shares": unequal_sum,
        "as few updates as it says are enough and fewer are refused": lambda: mean()._replace(min_updates=3),
        "clients that agree are followed": rule(lambda updates_CD: -updates_CD.mean(0)),
        "moving all updates moves the result as far": lambda: norm_clipping()._replace(translation_equivariant=True),
        "turning all updates turns the result": lambda: median()._replace(rotation_equivariant=True),
        "one update however large moves the result by a bounded amount": lambda: mean()._replace(bounded=True),
        "the size of updates does not matter": lambda: mean()._replace(unit_steps=True),
        "results have the type of updates": rule(lambda updates_CD: updates_CD.double().mean(0)),
        "accumulators cross a process": with_a_number,
        "what it remembers is all in its memory": lambda: rule(counted(lambda n, rows: rows.mean(0) * n))(),
        "nothing that comes in is written to": rule(lambda updates_CD: updates_CD.sub_(1).mean(0)),
        "any number of workers gives the same run": rule(lambda rows: rows.mean(0) + torch.randn(rows.shape[1])),
    },
    "algorithms": {
        "it is built by its example": lambda: None,
        "every engine gives the same run": shrinking,
        "the model moves": lambda: Algorithm(server_step=lambda params_D, aggregate, server, task: (params_D, server)),
        "batch norm is trained": finishing(without_statistics),
        "the order of clients changes nothing": shrinking,
        "a resumed run ends the same": slowing,
        "extras and states are laid out before training": finishing(sometimes_more),
    },
    "attacks": {
        "it is built by its example": lambda: None,
        "it fills a slot and says what it knows": Attack,
        "only the attackers change": lambda: Attack(collude=lambda updates, bad_C, known: updates._replace(aux={})),
        "it depends on its arguments alone": sending(lambda delta_D, known: torch.randn(delta_D.shape)),
        "it sends numbers": sending(lambda delta_D, known: delta_D * torch.nan),
        "it sends what is no number": lambda: sign_flip()._replace(finite=False),
        "poisoned samples fit the model": poisoning(lambda x, y: (x, y + 100)),
        "a trigger is painted on a copy": poisoning(lambda x, y: (x, 0 * y), trigger=lambda x: x, target=0),
        "in a run only the attackers change": sending(lambda delta_D, known: known.params_D.add_(1)),
        "every engine gives the same run": lambda: sending(counted(lambda number, delta_D, known: delta_D * number))(),
    },
    "metrics": {
        "it is built by its example": lambda: None,
        "some forms are taken and others refused": refusing,
        "figures are numbers and charts plain data": lambda: accuracy()._replace(finish=lambda part: part),
        "slices and their order change nothing": lambda: accuracy()._replace(merge=lambda one, other: one),
        "a sample of weight 0 has no share": unweighted,
        "weights are those of samples": scoring(lambda scores, targets, weight_N: (scores, targets, weight_N > 0)),
        "nothing that comes in is written to": scoring(lambda scores, *others: (scores.zero_(), *others)),
        "it depends on its arguments alone": lambda: scoring(
            counted(lambda number, scores, *others: (scores - number, *others))
        )(),
        "parts cross processes and files": numbered,
        "sums over places give the figures of all": lambda: auroc()._replace(condense=None, finish_sums=None),
        "condensed sums are within the error that they state": boastful,
        "few samples give numbers or nan": lambda: accuracy()._replace(
            finish=lambda part: {"accuracy": part["sum"].item() / part["count"].item()}
        ),
        "better scores give a better figure": lambda: mae()._replace(larger_is_better=True),
    },
    "train.works": {
        "it is built by its example": lambda: None,
        "every engine gives the same run": misfitting,
        "every engine gives the same bits": counting_work,
        "the order of clients changes nothing": counting_work,
        "a resumed run ends the same": counting_work,
        "an update has the layout of what travels": work(lambda number, w, x: w * np.nan),
        "training depends on its arguments alone": noisy_work,
        "sums of an evaluation add up": work(lambda number, w, x: w + 1, lambda arrays, x, y: {"loss": 0.5}),
    },
    "transforms": {
        "it is built by its example": lambda: None,
        "what is decoded has the shape and the type of the vector": step(back=lambda carrier: carrier[:-1]),
        "the norm stays within its sensitivity": step(sensitivity=lambda l2_in: l2_in / 2),
        "encoding depends on its arguments alone": step(lambda vector_V: vector_V + torch.randn(vector_V.shape)),
        "memory is a value": lambda: step(counted(lambda number, vector_V: vector_V * number))(),
        "nothing that comes in is written to": step(lambda vector_V: vector_V.mul_(2)),
        "an empty vector is sent or refused": step(back=lambda carrier: carrier if len(carrier) else torch.zeros(3)),
        "what is no number shows": step(torch.nan_to_num),
        "sums of carriers decode to sums": step(back=torch.abs, linear=True),
        "the mean is right": step(back=lambda carrier: 1.5 * carrier, unbiased=True),
        "the error is no longer than the vector": step(back=lambda carrier: 4 * carrier, contractive=True),
        "any number of workers gives the same run": step(lambda vector_V: vector_V + torch.randn(vector_V.shape)),
    },
}
