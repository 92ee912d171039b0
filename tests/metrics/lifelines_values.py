"""Write lifelines.json: what lifelines 0.30.3 says of a few small samples.

lifelines needs pandas below 3, which the versions that Atoll is tested with do not allow: run this in an environment
of its own, with `pip install lifelines==0.30.3`.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np


def case(seed: int, num_samples: int, values: int) -> dict[str, object]:
    """Draw risks, times and events with ties, and ask lifelines, which takes predicted times: risks change sign."""
    import lifelines  # not installed where tests run
    from lifelines.utils import concordance_index

    rng = np.random.default_rng(seed)
    risk, time = rng.integers(-values, values, num_samples) / 8, rng.integers(0, values, num_samples) / 4
    event = rng.integers(0, 2, num_samples)
    high = risk > np.median(risk)
    curves = {}
    for name, group in (("low risk", ~high), ("high risk", high)):
        fitted = lifelines.KaplanMeierFitter().fit(time[group], event[group]).survival_function_["KM_estimate"]
        curves[name] = {"time": fitted.index.tolist(), "survival": fitted.tolist()}
    return {
        "risk": risk.tolist(),
        "time": time.tolist(),
        "event": event.tolist(),
        "concordance": float(concordance_index(time, -risk, event)),
        "curves": curves,
    }


if __name__ == "__main__":
    cases = [case(0, 40, 8), case(1, 60, 1000), case(2, 25, 3), case(3, 7, 1000)]
    Path(__file__).with_name("lifelines.json").write_text(json.dumps(cases) + "\n")
