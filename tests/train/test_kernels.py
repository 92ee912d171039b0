"""Kernels train as PyTorch's layers do, alike on all processors, and leave alone what they do not know."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import with_kernels
from torch import Tensor, nn
from torch.nn import functional

from atoll.core.params import flatten, spec_of
from atoll.train.kernels.build import Unavailable, library, processor
from atoll.train.kernels.chain import Chain, Data, Step, Unsuited, layers_of

pytestmark = pytest.mark.skipif(not with_kernels(), reason="there is no C compiler: install gcc or clang")
SAMPLES = 60


def mlp(inputs: int, hidden: tuple[int, ...], classes: int, bias: bool = True) -> nn.Module:
    sizes = (inputs, *hidden)
    layers = [layer for size, after in itertools.pairwise(sizes) for layer in (nn.Linear(size, after, bias), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(sizes[-1], classes, bias))


CHAINS: dict[str, tuple[tuple[int, ...], int, Callable[[], nn.Module]]] = {
    "logistic": ((1, 7, 5), 3, lambda: mlp(35, (), 3)),
    "one class": ((4,), 1, lambda: nn.Sequential(nn.Linear(4, 1))),
    "odd widths": ((1, 9, 9), 11, lambda: mlp(81, (37, 16, 5), 11)),
    "no bias": ((20,), 4, lambda: mlp(20, (18,), 4, bias=False)),
    "wide": ((1, 5, 5), 10, lambda: mlp(25, (530, 300), 10)),
    "images": (
        (1, 12, 12),
        5,
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 20, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(80, 5)),
        ),
    ),
    "strides and rectangles": (
        (3, 11, 8),
        4,
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 33, (3, 2), stride=2, padding=1, bias=False), nn.MaxPool2d(2), nn.ReLU()),
            nn.Sequential(nn.Conv2d(33, 70, (2, 1)), nn.ReLU(), nn.Identity()),
            *(nn.Flatten(), nn.Linear(280, 17), nn.ReLU(), nn.Linear(17, 4)),
        ),
    ),
    "wide windows": (
        (2, 13, 13),
        3,
        lambda: nn.Sequential(
            *(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.MaxPool2d(4), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(16, 3)),
        ),
    ),
}
STEPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "nesterov and decay": {"momentum": 0.8, "nesterov": True, "weight_decay": 0.02},
    "decay": {"weight_decay": 0.05},
    "pull and shift": {"pull": 0.3, "shift": True},
}


class Problem:
    """A chain with made-up samples, of which many numbers are zero, and batches of odd sizes."""

    def __init__(self, chain: str, *, of_bytes: bool = False, seed: int = 0, scale: float = 1.0) -> None:
        shape, classes, build = CHAINS[chain]
        torch.manual_seed(seed)
        self.model, rng = build(), np.random.default_rng(seed)
        self.spec, self.scale = spec_of(self.model), scale
        self.start_D = flatten(self.model, self.spec)
        x = torch.from_numpy(rng.normal(size=(SAMPLES, *shape))).float()
        x *= torch.from_numpy(rng.random((SAMPLES, *shape)) < 0.5)
        self.x = (x.abs() * 90).clamp(max=255).to(torch.uint8) if of_bytes else x
        self.y = torch.from_numpy(rng.integers(0, classes, SAMPLES))
        self.batches = [rng.choice(SAMPLES, size, replace=False) for size in (10, 10, 7, 1, 10, 3)]
        self.layers, self.shape = layers_of(self.model, self.spec, shape), shape

    def chain(self, kind: str | None = None) -> Chain:
        return Chain(library(kind), self.layers, self.spec.num_params, 10)

    def data(self) -> Data:
        of_bytes, at = self.x.dtype == torch.uint8, self.x.data_ptr()
        return Data(
            bytes=at if of_bytes else None,
            floats=None if of_bytes else at,
            labels=self.y.data_ptr(),
            sample=math.prod(self.shape),
            scale=self.scale,
            shift=0.0,
        )

    def trained(self, step: Step, shift_D: Tensor | None = None, kind: str | None = None) -> tuple[Tensor, float]:
        deltas, losses = self.chain(kind).train(self.data(), [self.start_D], [shift_D], [self.batches], [step])
        return deltas[0], losses[0]

    def reference(self, options: dict[str, Any], lr: float, shift_D: Tensor | None) -> tuple[Tensor, float]:
        """Train in double precision by PyTorch's layers and optimiser."""
        model, options, losses = self.model.double(), dict(options), []
        pull, _ = options.pop("pull", 0.0), options.pop("shift", None)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, **options)
        starts = [parameter.detach().clone() for parameter in model.parameters()]
        shifts = [torch.zeros_like(each) for each in starts]
        if shift_D is not None:
            shifts = [view.double() for view in self.spec.views(shift_D).values()]
        for batch in self.batches:
            x = self.x[batch].double() * self.scale
            loss = functional.cross_entropy(model(x), self.y[batch])
            optimizer.zero_grad()
            loss.backward()
            for parameter, start, shift in zip(model.parameters(), starts, shifts, strict=True):
                parameter.grad += pull * (parameter.detach() - start) + shift
            optimizer.step()
            losses.append(loss.item())
        moved = [p.detach() - start for p, start in zip(model.parameters(), starts, strict=True)]
        return torch.cat([each.reshape(-1) for each in moved]), float(np.mean(losses))


def step_of(options: dict[str, Any], lr: float) -> Step:
    options = {"decay" if key == "weight_decay" else key: value for key, value in options.items() if key != "shift"}
    return Step(lr=lr, **options)


@pytest.mark.parametrize("options", STEPS)
@pytest.mark.parametrize("chain", CHAINS)
def test_kernels_train_as_layers_do(chain: str, options: str) -> None:
    problem, settings = Problem(chain), STEPS[options]
    shift_D = torch.linspace(-0.1, 0.2, problem.spec.num_params) if "shift" in settings else None
    moved_D, loss = problem.trained(step_of(settings, 0.05), shift_D)
    expected_D, expected = problem.reference(settings, 0.05, shift_D)
    assert loss == pytest.approx(expected, rel=1e-4, abs=1e-6)
    torch.testing.assert_close(moved_D.double(), expected_D, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("chain", ["odd widths", "images"])
def test_bytes_are_scaled(chain: str) -> None:
    problem = Problem(chain, of_bytes=True, scale=1 / 255)
    moved_D, _ = problem.trained(step_of({}, 0.1))
    expected_D, _ = problem.reference({}, 0.1, None)
    torch.testing.assert_close(moved_D.double(), expected_D, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("chain", CHAINS)
def test_a_step_goes_down_the_slope_of_the_loss(chain: str) -> None:
    """The gradient of a step agrees with differences of the loss in double precision."""
    problem = Problem(chain)
    problem.batches = problem.batches[:1]
    moved_D, _ = problem.trained(step_of({}, 1.0))
    x, y = problem.x[problem.batches[0]].double(), problem.y[problem.batches[0]]
    model, start_D = problem.model.double(), problem.start_D.double()

    def loss(params_D: Tensor) -> float:
        views = problem.spec.views(params_D)
        return float(functional.cross_entropy(torch.func.functional_call(model, views, (x,)), y))

    for seed in range(3):
        way_D = torch.randn(len(start_D), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        slope = (loss(start_D + 1e-6 * way_D) - loss(start_D - 1e-6 * way_D)) / 2e-6
        assert -float(moved_D.double() @ way_D) == pytest.approx(slope, rel=2e-4, abs=2e-5)


@pytest.mark.parametrize("options", STEPS)
@pytest.mark.parametrize("chain", CHAINS)
def test_all_processors_give_the_same_bits(chain: str, options: str) -> None:
    kinds = {"AVX512": ("AVX512", "AVX2"), "AVX2": ("AVX2",)}.get(processor(), (processor(),))
    ends = [Problem(chain).trained(step_of(STEPS[options], 0.05), kind=kind)[0] for kind in kinds]
    assert all(torch.equal(each, ends[0]) for each in ends)


def test_a_client_has_the_same_bits_alone_and_in_a_group() -> None:
    problem = Problem("images")
    step, chain = step_of({"momentum": 0.5}, 0.05), problem.chain()
    one, other = problem.batches, problem.batches[:2]
    other_D = problem.start_D * 0.9
    together, _ = chain.train(
        problem.data(),
        [problem.start_D, other_D, problem.start_D],
        [None, problem.start_D, None],
        [one, other, one],
        [step] * 3,
    )
    assert torch.equal(together[0], together[2])
    assert torch.equal(together[0], problem.trained(step)[0])
    assert not torch.equal(together[1], together[0])


def test_outputs_are_those_of_the_layers() -> None:
    for name in CHAINS:
        problem = Problem(name)
        chain = problem.chain()
        outputs = chain.outputs(problem.data(), np.arange(SAMPLES)[::-1][:41], chain.packed(problem.start_D))
        with torch.no_grad():
            expected = problem.model(problem.x.flip(0)[:41])
        torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)


def test_parameters_may_lie_anywhere() -> None:
    """A vector with gaps between its numbers is read as what it stands for."""
    problem = Problem("odd widths")
    apart_D = torch.stack([problem.start_D, problem.start_D], dim=1)[:, 0]
    assert not apart_D.is_contiguous()
    deltas, _ = problem.chain().train(problem.data(), [apart_D], [None], [problem.batches], [step_of({}, 0.1)])
    assert torch.equal(deltas[0], problem.trained(step_of({}, 0.1))[0])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("chain", ["logistic", "odd widths", "images"])
def test_what_is_not_finite_is_passed_on(chain: str, bad: float) -> None:
    """In a sample or in a parameter, so that the update is refused as the plain loop's is."""
    problem = Problem(chain)
    problem.x[problem.batches[0][0]].view(-1)[7] = bad
    moved_D, loss = problem.trained(step_of({}, 0.05))
    assert not math.isfinite(loss)
    assert not bool(moved_D.isfinite().all())
    problem = Problem(chain)
    problem.start_D[-1] = bad
    assert not bool(problem.trained(step_of({}, 0.05))[0].isfinite().all())


def test_large_outputs_keep_the_loss_finite() -> None:
    problem = Problem("logistic")
    problem.start_D *= 3000
    moved_D, loss = problem.trained(step_of({}, 0.05))
    expected_D, expected = Problem("logistic"), math.nan
    expected_D.model.load_state_dict({name: value * 3000 for name, value in expected_D.model.state_dict().items()})
    reference_D, expected = expected_D.reference({}, 0.05, None)
    assert loss == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(moved_D.double(), reference_D, rtol=1e-3, atol=5e-4)


class Shouting(nn.Linear):
    """A layer that is nearly linear."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def hooked() -> nn.Module:
    model = mlp(35, (8,), 3)
    model[1].register_forward_hook(lambda module, args, output: output * 2)
    return model


def shared() -> nn.Module:
    same = nn.Linear(35, 35)
    return nn.Sequential(nn.Flatten(), same, nn.ReLU(), same, nn.ReLU(), nn.Linear(35, 3))


def frozen() -> nn.Module:
    model = mlp(35, (8,), 3)
    model[1].weight.requires_grad_(False)
    return model


UNKNOWN: dict[str, Callable[[], nn.Module]] = {
    "no kernel for Tanh": lambda: nn.Sequential(nn.Flatten(), nn.Linear(35, 3), nn.Tanh(), nn.Linear(3, 3)),
    "no kernel for Shouting": lambda: nn.Sequential(nn.Flatten(), Shouting(35, 3)),
    "single precision": lambda: mlp(35, (8,), 3).double(),
    "without ReLU": lambda: nn.Sequential(nn.Flatten(), nn.Linear(35, 8), nn.Linear(8, 3)),
    "buffers": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(30, 3)),
    "not linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(35, 3), nn.ReLU()),
    "hooks": hooked,
    "share their weights": shared,
    "not trained": frozen,
    "flat samples": lambda: nn.Sequential(nn.Linear(5, 3), nn.Flatten(), nn.ReLU(), nn.Linear(21, 3)),
    "in groups": lambda: nn.Sequential(nn.Conv2d(1, 2, 3, dilation=2), nn.ReLU(), nn.Flatten(), nn.Linear(6, 3)),
    "border that is not zero": lambda: nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect"), nn.ReLU(), nn.Flatten(), nn.Linear(70, 3)
    ),
    "two directions": lambda: nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=(1, 0)), nn.ReLU(), nn.Flatten(), nn.Linear(42, 3)
    ),
    "windows that overlap": lambda: nn.Sequential(
        nn.Conv2d(1, 2, 2), nn.ReLU(), nn.MaxPool2d(2, stride=1), nn.Flatten(), nn.Linear(30, 3)
    ),
    "does not follow a convolution": lambda: nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(6, 3)),
    "smaller than a kernel": lambda: nn.Sequential(nn.Conv2d(1, 2, (7, 6)), nn.ReLU(), nn.Flatten(), nn.Linear(2, 3)),
}


def test_a_module_may_occur_twice_if_it_has_no_weights() -> None:
    act = nn.ReLU()
    model = nn.Sequential(nn.Flatten(), nn.Linear(35, 8), act, nn.Linear(8, 9), act, nn.Linear(9, 3))
    assert [layer.relu for layer in layers_of(model, spec_of(model), (1, 7, 5))] == [1, 1, 0]


@pytest.mark.parametrize("reason", UNKNOWN)
def test_a_model_that_is_no_chain_is_left_alone(reason: str) -> None:
    model = UNKNOWN[reason]()
    with pytest.raises(Unsuited, match=reason):
        layers_of(model, spec_of(model), (1, 7, 5))


def test_a_processor_without_kernels_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "z80")
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "DEFAULT")
    with pytest.raises(Unavailable, match="z80"):
        processor()
