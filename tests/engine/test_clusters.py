"""The ways to a cluster of docs/clusters.md: by hand, by Slurm's script, from outside; and the Kubernetes manifest."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from torch import equal

from atoll.core.plan import Plan

pytest.importorskip("ray", reason="needs Ray: pip install 'atoll[ray]'")

EXAMPLES = Path(__file__).parents[2] / "examples" / "clusters"
ENVIRONMENT = {
    **os.environ,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
    "OMP_NUM_THREADS": "1",
}
ATOLL = [sys.executable, "-c", "import sys; sys.argv[0] = 'atoll'; from atoll.cli.main import main; main()"]
RAY = [sys.executable, "-c", "import sys; sys.argv[0] = 'ray'; from ray.scripts.scripts import main; main()"]
PLAN: dict[str, Any] = {
    "partition": {"num_clients": 8},
    "policy": {"size": 6},
    "model": {"name": "mlp_2nn", "hidden": 16},
    "rounds": 3,
    "engine": {"name": "ray", "stack": 2},
}
OWN = """
from torch import nn


def model(input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 7), nn.ReLU(), nn.Linear(7, num_classes))
"""


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def command(*argv: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, cwd=cwd, env=ENVIRONMENT | environment, capture_output=True, text=True, timeout=900)


def write_plan(folder: Path, file: str = "plan.toml", **changes: Any) -> None:
    (folder / file).write_text(Plan(**{**PLAN, **changes}).to_toml())


def must_end_as_processes(folder: Path, out: str) -> None:
    """Compare the model of a run with that of the same plan on processes of this machine."""
    plan = Plan.from_toml((folder / out / "plan.toml").read_text())
    write_plan(folder, "alone.toml", **{**plan.to_dict(), "engine": {"name": "processes", "stack": 2, "workers": 1}})
    alone = command(*ATOLL, "run", "alone.toml", "--out", "alone", "--quiet", cwd=folder)
    assert alone.returncode == 0, alone.stderr
    one, other = (load_file(folder / path / "model.safetensors") for path in (out, "alone"))
    assert one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A head and a machine that joined it, begun by the commands of the guide in a directory of their own."""
    folder, port, client = tmp_path_factory.mktemp("machines"), free_port(), free_port()
    clean = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"}
    source = {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    common = ["--num-cpus=1", "--block", "--include-dashboard=false"]
    head = [*RAY, "start", "--head", f"--port={port}", f"--ray-client-server-port={client}", *common]
    processes = [subprocess.Popen(head, cwd=folder, env=clean | source, stdout=subprocess.DEVNULL)]
    status = [*RAY, "status", f"--address=127.0.0.1:{port}"]
    try:
        while subprocess.run(status, env=clean, capture_output=True).returncode:
            assert processes[0].poll() is None
        join = [*RAY, "start", f"--address=127.0.0.1:{port}", "--num-cpus=1", "--block"]
        processes.append(subprocess.Popen(join, cwd=folder, env=clean | source, stdout=subprocess.DEVNULL))
        yield {"RAY_ADDRESS": f"127.0.0.1:{port}", "client": f"ray://127.0.0.1:{client}"}
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in reversed(processes):
            process.wait(60)


@pytest.mark.slow
def test_by_hand_on_two_machines(by_hand: dict[str, str], tmp_path: Path) -> None:
    write_plan(tmp_path)
    address = by_hand["RAY_ADDRESS"]
    done = command(*ATOLL, "run", "plan.toml", "--out", "run", cwd=tmp_path, RAY_ADDRESS=address)
    assert done.returncode == 0, done.stderr
    assert "engine ray, 2 workers" in done.stderr
    must_end_as_processes(tmp_path, "run")
    stranger = command(
        *ATOLL, "run", "plan.toml", "--out", "no", cwd=tmp_path, RAY_ADDRESS=address, RAY_AUTH_TOKEN="f" * 64
    )
    assert stranger.returncode == 5 and "there is no Ray cluster at 'auto'" in stranger.stderr, stranger.stderr
    assert command(*RAY, "status", f"--address={address}", cwd=tmp_path).returncode == 0  # and it goes on


@pytest.mark.slow
@pytest.mark.parametrize("way", ["RAY_ADDRESS", "client"])
def test_code_of_ones_own_is_copied_to_machines_that_have_it_not(
    by_hand: dict[str, str], tmp_path: Path, way: str
) -> None:
    (tmp_path / "own_model.py").write_text(OWN)
    engine = {**PLAN["engine"], "address": by_hand[way], "working_dir": "."}
    write_plan(tmp_path, model="own_model:model", engine=engine)
    done = command(*ATOLL, "run", "plan.toml", "--out", "run", "--quiet", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    must_end_as_processes(tmp_path, "run")


@pytest.mark.slow
def test_a_sweep_and_a_stopped_run_go_on_where_machines_are(by_hand: dict[str, str], tmp_path: Path) -> None:
    write_plan(tmp_path, engine="inline")
    options = ["sweep", "plan.toml", "--grid", "local.lr=0.01,0.1", "--seeds", "2", "--quiet"]
    for out, where in (("one", ["--workers", "1"]), ("many", ["--ray", by_hand["RAY_ADDRESS"]])):
        done = command(*ATOLL, *options, *where, "--out", out, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    one, many = (json.loads((tmp_path / out / "sweep.json").read_text()) for out in ("one", "many"))
    figures = [[(run["status"], run["figure"], run["rounds"]) for run in each["runs"]] for each in (one, many)]
    assert figures[0] == figures[1] and all(status == "done" for status, _, _ in figures[1])


SHIMS = {
    "scontrol": "echo first; echo second",
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "hostname": "echo 127.0.0.1",
}


@pytest.mark.slow
def test_the_script_for_slurm_runs_and_goes_on(tmp_path: Path) -> None:
    """Slurm is played by three commands of one line each; the two machines are this one."""
    bin_ = tmp_path / "venv" / "bin"
    bin_.mkdir(parents=True)
    ours = {name: f'exec {shlex.join(argv)} "$@"' for name, argv in (("ray", RAY), ("atoll", ATOLL))}
    for name, body in (SHIMS | ours).items():
        (bin_ / name).write_text(f"#!/bin/bash\n{body}\n")
        (bin_ / name).chmod(0o755)
    (bin_ / "python").symlink_to(sys.executable)
    (bin_ / "activate").write_text(f'export PATH="{bin_}:$PATH"\n')
    slurm = {
        "ATOLL_VENV": str(tmp_path / "venv"),
        "SLURM_JOB_NODELIST": "first,second",
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_JOB_ID": str(free_port()),
    }
    script = str(EXAMPLES / "slurm.sbatch")
    write_plan(tmp_path, rounds=2)
    done = command("bash", script, "plan.toml", "run", cwd=tmp_path, **slurm)
    assert done.returncode == 0, done.stdout + done.stderr
    plan = Plan.from_toml((tmp_path / "run" / "plan.toml").read_text())
    (tmp_path / "run" / "plan.toml").write_text(plan.replace({"rounds": 4}).to_toml())
    done = command("bash", script, "plan.toml", "run", cwd=tmp_path, **slurm)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["rounds"] == 4
    must_end_as_processes(tmp_path, "run")


def test_the_manifest_for_kubernetes_says_what_the_guide_says() -> None:
    config, volume, job = yaml.safe_load_all((EXAMPLES / "kuberay.yaml").read_text())
    plan = Plan.from_toml(config["data"]["plan.toml"])
    assert plan.engine.name == "ray" and plan.engine.options["patience"] >= 300
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob") and job["spec"]["shutdownAfterJobFinishes"]
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    head, [workers] = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    pods = [group["template"]["spec"] for group in (head, workers)]
    images = {pod["containers"][0]["image"] for pod in pods}
    assert images == {"REGISTRY/atoll-ray:0.1"}
    claims = {volume["name"]: volume for pod in pods for volume in pod["volumes"]}
    assert claims["plans"]["configMap"]["name"] == config["metadata"]["name"]
    assert claims["runs"]["persistentVolumeClaim"]["claimName"] == volume["metadata"]["name"]
    mounts = {each["name"]: each["mountPath"] for each in pods[0]["containers"][0]["volumeMounts"]}
    assert mounts == {"plans": "/plans", "runs": "/runs"}
    for path in ("/plans/plan.toml", "/runs/first"):
        assert path in job["spec"]["entrypoint"]
    version = cluster["rayVersion"]
    assert f"rayproject/ray:{version}-" in (EXAMPLES / "Dockerfile").read_text()
    assert f"ray=={version}" in (EXAMPLES.parents[1] / "constraints.txt").read_text()


def test_the_script_for_slurm_is_valid_shell() -> None:
    assert shutil.which("bash")
    assert subprocess.run(["bash", "-n", str(EXAMPLES / "slurm.sbatch")], capture_output=True).returncode == 0
