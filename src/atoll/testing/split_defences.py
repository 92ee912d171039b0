"""What every defence of split learning must satisfy. Shapes: B samples of a piece."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.core.defence import Defence
from atoll.privacy.noise import derived
from atoll.split.shield import Place, Shield
from atoll.testing.law import Member, law, must, must_be_close
from atoll.testing.runs import final, must_resume, small_plan

CONTRACT = Defence
SECRET, HERE = bytes(range(32)), Place(1, 2, 3, 0)
B = 8


def _values(seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Draw samples, activations or gradients, and labels of two classes."""
    draws = torch.Generator().manual_seed(seed)
    x, values = (
        torch.randn(B, 1, 4, 4, generator=draws, dtype=dtype),
        torch.randn(B, 3, 2, 2, generator=draws, dtype=dtype),
    )
    return x, scale * values, (torch.arange(B) % 2).to(dtype)


def _through(shield: Shield, seed: int, dtype: torch.dtype, scale: float, place: Place = HERE) -> dict[str, Tensor]:
    """Send values through all slots of a shield."""
    x, values, labels = _values(seed, dtype, scale)
    shaped = shield.shaped(values)
    pull = shield.pull(x, shaped, 1.0)
    return {
        "activations": shield.sent(shaped, place),
        "gradients": shield.perturbed(values, labels, place),
        "pull": torch.zeros_like(values) if pull is None else pull,
    }


@law()
def it_fills_a_slot(member: Member) -> None:
    """Look for what it does."""
    slots = ("shape", "hide", "penalty", "perturb")
    must(any(getattr(member.build(), slot) is not None for slot in slots), f"it does nothing: fill one of {slots}")


@law()
def values_keep_shape_and_type_and_are_finite(member: Member) -> None:
    """Send small, usual, large and no values in both precisions."""
    for dtype in (torch.float32, torch.float64):
        for scale in (0.0, 1e-6, 1.0, 1e4):
            for what, found in _through(Shield((member.build(),), SECRET), 0, dtype, scale).items():
                must(found.shape == (B, 3, 2, 2) and found.dtype == dtype, f"{what} change shape or type")
                must(bool(found.isfinite().all()), f"{what} of size {scale:g} are not finite")


@law()
def the_same_values_in_the_same_place_get_the_same_bits(member: Member) -> None:
    """Send twice, as after a lost reply, and do not write to what comes in."""
    first, again = (_through(Shield((member.build(),), SECRET), 1, torch.float32, 1.0) for _ in range(2))
    for what, found in first.items():
        must_be_close(found, again[what], f"{what} differ when they are sent again")
    x, values, labels = _values(2)
    kept = [each.clone() for each in (x, values, labels)]
    shield = Shield((member.build(),), SECRET)
    shield.sent(shield.shaped(values), HERE)
    shield.perturbed(values, labels, HERE)
    shield.pull(x, values, 0.5)
    for before, after in zip(kept, (x, values, labels), strict=True):
        must_be_close(after, before, "what comes in is written to")


@law(when="draws")
def noise_is_secret_and_never_comes_twice(member: Member) -> None:
    """Change the secret, the place and a value: each gives other noise."""
    shield = Shield((member.build(),), SECRET)
    base = _through(shield, 3, torch.float64, 1.0)
    others = {
        "another secret": _through(shield._replace(secret=derived(SECRET, "other")), 3, torch.float64, 1.0),
        "another batch": _through(shield, 3, torch.float64, 1.0, HERE._replace(step=4)),
        "another attempt": _through(shield, 3, torch.float64, 1.0, HERE._replace(attempt=2)),
        "another client": _through(shield, 3, torch.float64, 1.0, HERE._replace(client=0)),
    }
    for what, found in others.items():
        same = [name for name in ("activations", "gradients") if torch.equal(found[name], base[name])]
        must(len(same) < 2, f"{what} gives the same noise: draw from the key")
    _, values, labels = _values(3, torch.float64)
    moved = values.clone()
    moved[0] *= 1.001
    for name, slot in (("activations", shield.sent), ("gradients", lambda v, p: shield.perturbed(v, labels, p))):
        noise, other = slot(values, HERE) - values, slot(moved, HERE) - moved
        changed = not torch.equal(slot(values, HERE), values)
        must(
            not (changed and torch.allclose(noise[1:], other[1:], rtol=1e-9)),
            f"{name}: other values get the same noise",
        )


@law(unless="draws")
def what_draws_nothing_needs_no_secret(member: Member) -> None:
    """Change the secret: nothing changes."""
    one, other = (_through(Shield((member.build(),), derived(SECRET, n)), 4, torch.float32, 1.0) for n in (0, 1))
    for what, found in one.items():
        must_be_close(found, other[what], f"{what} depend on the secret: set draws = True")


@law()
def a_run_repeats_and_a_resumed_run_ends_the_same(member: Member) -> None:
    """Train a model that is cut."""
    built = member.build()
    data = {"data": "german_credit", "model": {"name": "mlp_2nn", "hidden": 8}} if built.binary else {}
    split = {"cut": "2", "defences": [member.part.to_dict()]} | ({"tail": "5"} if built.perturb is not None else {})
    few = {"partition": {"num_clients": 4}, "policy": {"size": 2}, "local": {"lr": 0.05, "batch_size": 8, "steps": 2}}
    plan = small_plan(**{"model": {"name": "mlp_2nn", "hidden": 8}, **few, **data, "split": split})
    must_be_close(final(plan), final(plan), "a second run ends elsewhere: let the member depend on its arguments alone")
    must_resume(plan)
