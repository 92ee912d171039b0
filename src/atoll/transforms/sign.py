"""Send one bit per coordinate. Shapes: V, the input vector; D, the parameters at its start."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from atoll.core.errors import PlanError
from atoll.core.messages import State
from atoll.core.transform import Encoding, Transform, any_norm
from atoll.transforms.feedback import codec

EXAMPLES = [{"scale": True}, {}, {"scale": True, "error_feedback": True}]


def sign(scale: bool = False, error_feedback: bool = False) -> Transform:
    """Send the signs of the trained parameters' changes, 0 as +1, and with `scale` their mean magnitude.

        decoded = sign(v), or |v|_1 / D * sign(v)

    The first is signSGD (Bernstein et al. 2018, arXiv:1802.05957, algorithm 1), the second with error feedback is
    EF-signSGD (Karimireddy et al. 2019, arXiv:1901.09847, algorithm 1). Extra vectors are sent unchanged. Bytes for
    float32: D / 8 + 12.
    """
    if error_feedback and not scale:
        raise PlanError("sign: the residual of unscaled signs does not shrink, so error_feedback needs scale = true")

    def encode(vector_V: Tensor, memory: State, encoding: Encoding) -> tuple[Tensor, State, State]:
        params_D, extras = vector_V[: encoding.spec.num_params], vector_V[encoding.spec.num_params :]
        magnitude = params_D.abs().mean()
        if not scale:
            magnitude.fill_(1.0 if bool(magnitude.isfinite()) else math.nan)  # signs alone would hide NaN
        side = {"length": torch.tensor([params_D.numel()]), "scale": magnitude.reshape(1)}
        carrier = torch.from_numpy(np.packbits((params_D >= 0).numpy()))
        return carrier, side | ({"rest": extras} if extras.numel() else {}), memory

    def decode(carrier: Tensor, side: State) -> Tensor:
        bits_D = torch.from_numpy(np.unpackbits(carrier.numpy(), count=int(side["length"])))
        params_D = (2 * bits_D.to(side["scale"].dtype) - 1) * side["scale"]
        return torch.cat([params_D, side["rest"]]) if "rest" in side else params_D

    inner = Transform(
        encode=encode, decode=decode, sensitivity=(lambda l2_in: l2_in) if scale else any_norm, contractive=scale
    )
    return codec("sign", inner, error_feedback=error_feedback)
