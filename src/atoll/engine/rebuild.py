"""Build a job again in another process, from bytes alone, and refuse one that differs.

Shapes: D parameters, K kept parameters.
"""

from __future__ import annotations

import hashlib
import io
import os
import site
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import torch

from atoll.checks.engines import unnamed
from atoll.core.errors import AtollError, PlanError, RunError
from atoll.core.messages import State
from atoll.core.plan import Plan
from atoll.core.tensor_file import TensorReader, tensor_file
from atoll.engine.base import place_of, tried_there
from atoll.engine.pooled import Message
from atoll.train.build import build_job
from atoll.train.devices import CPU, Precision, TorchSettings
from atoll.train.job import Job
from atoll.train.kernels.build import Unavailable
from atoll.train.trainer import Trainer

FIRST_CLIENTS = 16
"""The samples of so many clients are compared one by one; of all others, how many each has."""
ENVIRONMENT = ("ATOLL_DATA", "HF_HOME", "HF_HUB_OFFLINE")
"""Variables that say where data and models lie; a process that has none of its own is given the driver's."""
WHAT: Mapping[str, str] = {
    "atoll": "the version of Atoll: install the same one everywhere",
    "torch": "the version of PyTorch: install the same one everywhere",
    "data": "the samples: give every machine the same files, and let a loader of one's own return the same each time",
    "clients": "which client holds which samples: let a partition of one's own depend on its seed alone",
    "model": "the model: give every machine the same code and files, and let its first weights depend on the plan's "
    "seed alone",
    "stack": "whether clients can be trained as one: give every machine the same code",
}
"""What may differ, and what to do about it."""


def pack(header: Mapping[str, Any], tensors: State | None = None) -> bytes:
    """Return a header of plain data and named tensors as bytes, in the format of a safetensors file."""
    tensors = tensors or {}
    text = {"header": msgspec.json.encode(dict(header)).decode(), "names": msgspec.json.encode(list(tensors)).decode()}
    return b"".join(tensor_file(tensors, text))


def unpack(data: bytes) -> Message:
    """Undo `pack`; the tensors have memory of their own, and their first order.

    >>> header, tensors = unpack(pack({"do": "look"}, {"b": torch.ones(2), "a": torch.zeros(0)}))
    >>> header, list(tensors), tensors["b"].tolist()
    ({'do': 'look'}, ['b', 'a'], [1.0, 1.0])
    """
    reader = TensorReader(io.BytesIO(data))
    names: list[str] = msgspec.json.decode(reader.text["names"])
    header: dict[str, Any] = msgspec.json.decode(reader.text["header"])
    return header, {name: reader[name] for name in names}


def blueprint(plan: Plan, job: Job) -> bytes:
    """Return what another process needs to build this job: the plan as TOML, and where its code lies.

    It holds the secret of a private run, from which clients' noise derives: whoever gets it must be trusted as this
    process is.
    """
    must_be_named(plan)
    header = {"plan": plan.to_toml(), "secret": job.secret.hex(), **surroundings(), "same": _same(job)}
    return pack(header, {"first": job.first_D, "kept": job.first_kept_K})


def rebuilt_job(data: bytes, *, move: bool = True) -> Job:
    """Build the job of a blueprint in this process; whatever differs is an error that says what to do.

    `move` goes to the directory of the process that made the blueprint, if there is such a directory here.
    """
    header, first = unpack(data)
    where = go_to(header, move=move)
    try:
        job = build_job(Plan.from_toml(header["plan"]), secret=bytes.fromhex(header["secret"]))
    except AtollError as error:
        raise RunError(f"a worker cannot build the plan ({where}): {error}") from error
    here, alike = _same(job), job.first_D.shape == first["first"].shape
    for what, there in header["same"].items():
        if here[what] != there:
            raise RunError(_differs(where, what, there, here[what]))
    if not alike or not torch.allclose(job.first_D, first["first"], rtol=1e-2, atol=1e-4):
        raise RunError(_differs(where, "model", "its first weights", "others"))
    return replace(job, first_D=first["first"], first_kept_K=first["kept"])  # other processors round in another way


def rebuilt_trainer(
    data: bytes,
    *,
    stack: int = 0,
    compile: bool = False,
    kernels: bool = False,
    move: bool = True,
    device: str = CPU,
    precision: Precision = "float32",
    tf32: bool = False,
) -> Trainer:
    """Build the trainer of a blueprint in this process, on a device of this machine."""
    job = rebuilt_job(data, move=move)
    place = place_of(job, device, precision, tf32)
    TorchSettings(place)
    try:
        trainer = tried_there(place, lambda: Trainer(job, stack=stack, compile=compile, kernels=kernels, place=place))
    except Unavailable as error:
        where = f"{os.uname().nodename}, in {os.getcwd()}"
        raise RunError(
            f"a worker has no kernels ({where}): {error}; mend that, or set engine.kernels = false in a new run"
        ) from error
    if (trainer.stack, trainer.kernels) != (stack, kernels):
        raise RunError(_differs(f"{os.uname().nodename}, in {os.getcwd()}", "stack", stack, trainer.stack))
    return trainer


def must_be_named(plan: Plan) -> None:
    """Refuse a plan that holds objects or functions which another process cannot find by a name."""
    for key, name in unnamed(plan):
        raise PlanError(
            f"{key} is '{name}', which another process cannot find: put it into a module and name it as "
            "'module:function', or use processes of this machine"
        )


def _same(job: Job) -> dict[str, Any]:
    """Return what must be the same in all processes of a run, as plain data."""
    federation, digest = job.federation, hashlib.blake2b(digest_size=8)
    digest.update(federation.everybody.sizes().astype("<i8").tobytes())
    for client in range(min(FIRST_CLIENTS, federation.num_clients)):
        digest.update(federation.train_indices(client).astype("<i8").tobytes())
    return {
        "atoll": version("atoll"),
        "torch": str(torch.__version__).partition("+")[0],  # of CPUs or of GPUs
        "data": federation.dataset.fingerprint,
        "clients": digest.hexdigest(),
        "model": [[slot.name, list(slot.shape)] for slot in job.spec.slots],
    }


def _differs(where: str, what: str, there: object, here: object) -> str:
    advice = WHAT[what]
    return f"a worker ({where}) has not what this process has; what differs is {advice} (here {there}, there {here})"


def _own_path() -> list[str]:
    """Return where modules are imported from beside installed packages."""
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    installed |= {*site.getsitepackages(), site.getusersitepackages()}
    folders = [str(Path(each or os.getcwd()).absolute()) for each in sys.path]
    own = [each for each in folders if Path(each).is_dir() and not _lies_in(each, installed)]
    return list(dict.fromkeys(own))


def _lies_in(folder: str, installed: set[str]) -> bool:
    return any(Path(folder).is_relative_to(each) for each in installed)


def surroundings() -> dict[str, Any]:
    """Return the directory, the path of imports and the environment of this process, as plain data."""
    environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    return {"directory": os.getcwd(), "path": _own_path(), "environment": environment}


def go_to(there: Mapping[str, Any], *, move: bool = True) -> str:
    """Take over the surroundings of another process as far as they are here; return where this one is, in words."""
    directory, is_here = there["directory"], os.path.isdir(there["directory"])
    if move and is_here:
        os.chdir(directory)
    for name, value in there["environment"].items():
        os.environ.setdefault(name, value)
    sys.path[:] = list(dict.fromkeys([*sys.path, *(each for each in there["path"] if os.path.isdir(each))]))
    missing = "" if is_here or not move else f"; there is no {directory} here"
    return f"{os.uname().nodename}, in {os.getcwd()}{missing}"
