"""Send one bit a coordinate. Shapes: V, the vector that comes in; D, the parameters at its head."""

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
    EF-signSGD (Karimireddy et al. 2019, arXiv:1901.09847, algorithm 1). Extra vectors travel as they are. Bytes for
    float32: D / 8 + 12.
    """
    if error_feedback and not scale:
        raise PlanError("sign: what a bare sign leaves over does not shrink, so error_feedback needs scale = true")

    def encode(vector_V: Tensor, memory: State, encoding: Encoding) -> tuple[Tensor, State, State]:
        head_D, rest = vector_V[: encoding.spec.num_params], vector_V[encoding.spec.num_params :]
        size = head_D.abs().mean()
        if not scale:
            size.fill_(1.0 if bool(size.isfinite()) else math.nan)  # NaN has no sign, and must show
        side = {"length": torch.tensor([head_D.numel()]), "scale": size.reshape(1)}
        carrier = torch.from_numpy(np.packbits((head_D >= 0).numpy()))
        return carrier, side | ({"rest": rest} if rest.numel() else {}), memory

    def decode(carrier: Tensor, side: State) -> Tensor:
        bits_D = torch.from_numpy(np.unpackbits(carrier.numpy(), count=int(side["length"])))
        head_D = (2 * bits_D.to(side["scale"].dtype) - 1) * side["scale"]
        return torch.cat([head_D, side["rest"]]) if "rest" in side else head_D

    inner = Transform(encode, decode, sensitivity=(lambda l2_in: l2_in) if scale else any_norm, contractive=scale)
    return codec("sign", inner, error_feedback=error_feedback)
