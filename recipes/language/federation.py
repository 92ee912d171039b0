"""Tune stories15M in a real federation whose server and one client are killed on the way; about a minute.

    python recipes/language/stories15m.py models/stories15m       # once: writes the base
    python recipes/language/federation.py models/stories15m

Three roles of Hamlet are clients, each a process with its own text; the server measures on the text of the Queen. When
half of the rounds are done, server and one client get SIGKILL and are started again. The end must have the bits of a
simulation of the same plan, and peft must load the exported adapter. Everything lies in runs/language-N.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import atoll
from atoll.data.sequences import jsonl

BASE = "stories15m"
"""Name of the base in the plan, and of the directory in which each side has it."""
CLIENTS = {"king": "KING", "polonius": "POL", "horatio": "HOR"}
ROUNDS = 4
ROWS = {"tokenizer": BASE, "length": 64}


def king() -> atoll.ClientApp:
    """Return the client that has the King's text."""
    return client("king")


def polonius() -> atoll.ClientApp:
    """Return the client that has the text of Polonius."""
    return client("polonius")


def horatio() -> atoll.ClientApp:
    """Return the client that has the text of Horatio."""
    return client("horatio")


def client(name: str) -> atoll.ClientApp:
    """Cut a client's own text into rows of its own base's tokens."""
    rows = jsonl(f"{name}.jsonl", **ROWS)
    return atoll.ClientApp(
        train_x=rows.train_x,
        train_y=rows.train_y,
        num_classes=rows.num_classes,
        tokens=True,
        problem=rows.problem,
        bases={BASE: BASE},
        floors=atoll.Floors(algorithms=("ffa_lora",), max_model_bytes=1_000_000),
    )


def plan(text: str) -> atoll.Plan:
    """Return the plan, of the server with the Queen's text or of a simulation with that of all clients."""
    return atoll.Plan(
        name="hamlet",
        data={"name": "atoll.data.sequences:jsonl", "path": text, **ROWS},
        partition="natural",
        model={"name": "hf_causal", "path": BASE, "rank": 8, "alpha": 16.0},
        algorithm="ffa_lora",
        local={"lr": 0.005, "batch_size": 4, "steps": 4, "optimizer": "adam"},
        evaluation={"metrics": ["perplexity"]},
        rounds=ROUNDS,
        engine="inline",
    )


def set_up(model: Path) -> Path:
    """Make a directory with the base, this file, the plan, and a text for each client and for the server."""
    from atoll.data.catalog.shakespeare import speeches
    from atoll.report.record import next_free

    folder = next_free(Path("runs"), "language").resolve()
    folder.mkdir(parents=True)
    (folder / BASE).symlink_to(model.resolve())
    shutil.copy(__file__, folder / "roles.py")
    (folder / "plan.toml").write_text(plan("queen.jsonl").to_toml())
    said = speeches(quiet=True)
    texts = {name: json.dumps({"owner": name, "text": said[f"hamlet: {role}"]}) for name, role in CLIENTS.items()}
    for name, line in {**texts, "queen": json.dumps({"owner": "queen", "text": said["hamlet: QUEEN"]})}.items():
        (folder / f"{name}.jsonl").write_text(line + "\n")
    (folder / "all.jsonl").write_text("\n".join(texts.values()) + "\n")
    return folder


class Federation:
    """Server and clients as processes that can be killed, with their peaks of memory."""

    def __init__(self, folder: Path, running: ExitStack) -> None:
        from federation import Terminals  # of the examples

        self.folder, self.terminals = folder, Terminals(folder, running)
        self.running: dict[str, subprocess.Popen[str]] = {}
        self.peaks: dict[str, int] = {}
        """Largest VmHWM, in kB."""

    def serve(self, port: str = "0") -> str:
        """Start the server, or start it again; return its address."""
        keys = "--cert certs/server.pem --key certs/server.key"
        command = f"serve plan.toml --home server --port {port} --clients {len(CLIENTS)} {keys}"
        self.running["server"] = self.terminals.started("operator", command, "server.log")
        stdout = self.running["server"].stdout
        assert stdout is not None
        return stdout.readline().split()[1].rstrip(",")

    def join(self, name: str) -> None:
        """Start a client, or start it again."""
        self.running[name] = self.terminals.started(name, f"join --home {name} --app roles:{name} --once")

    def kill(self, name: str) -> None:
        """End a process as abruptly as can be."""
        print(f"{name:>10} ! SIGKILL", flush=True)
        self.running[name].kill()
        self.running[name].wait()

    def rounds(self) -> int:
        """Return how many rounds are done, and note peaks of memory."""
        for name, process in self.running.items():
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
            except OSError:  # it has just ended
                continue
            peak = re.search(r"VmHWM:\s+(\d+) kB", status)
            self.peaks[name] = max(self.peaks.get(name, 0), int(peak[1]) if peak else 0)
        metrics = self.folder / "server" / "runs" / "hamlet" / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def wait_for(self, rounds: int) -> None:
        """Wait until so many rounds are done, and with the last one until clients have ended."""
        clients = [self.running[name] for name in CLIENTS]
        while self.rounds() < rounds or (rounds == ROUNDS and any(each.poll() is None for each in clients)):
            ended = [each for each in self.running.values() if each.poll() is not None]
            if any(each.returncode for each in ended):
                raise SystemExit(f"a process failed: see above, and {self.folder}/server.log")
            time.sleep(0.1)


def federate(folder: Path) -> dict[str, int]:
    """Run the federation to its end, with kills on the way; return the peaks of memory."""
    with ExitStack() as running:
        made = Federation(folder, running)
        operate = made.terminals.done
        operate("operator", "certs certs --host 127.0.0.1")
        url = made.serve()
        for name in CLIENTS:
            token = operate("operator", "clients token --home server")
            operate(name, f"enrol {url} --token={token} --name {name} --home {name} --ca certs/ca.pem")
        operate("operator", f"clients approve {' '.join(CLIENTS)} --home server")
        for name in CLIENTS:
            made.join(name)
        made.wait_for(ROUNDS // 2)
        for name in ("server", "king"):
            made.kill(name)
        made.serve(url.rpartition(":")[2])
        made.join("king")
        made.wait_for(ROUNDS)
        operate("operator", "stop --home server")
        made.running["server"].wait()
        operate("operator", "export server/runs/hamlet --adapter adapter")
    return made.peaks


def losses(folder: Path) -> tuple[float, float]:
    """Return the Queen's nats a token by the base, and with the exported adapter as peft loads it."""
    import peft
    import torch
    import transformers

    rows = jsonl(str(folder / "queen.jsonl"), **{**ROWS, "tokenizer": str(folder / BASE)})
    x, y = torch.from_numpy(rows.test_x).long(), torch.from_numpy(rows.test_y).long()

    def loss(model: Any) -> float:
        with torch.no_grad():
            return float(torch.nn.functional.cross_entropy(model(input_ids=x).logits.flatten(0, 1), y.flatten()))

    base = transformers.AutoModelForCausalLM.from_pretrained(folder / BASE)
    before = loss(base)
    return before, loss(peft.PeftModel.from_pretrained(base, folder / "adapter"))


def main(arguments: list[str]) -> None:
    """Run everything, check it, and print what it took."""
    import torch

    from atoll.language.card import ledger_hash

    if len(arguments) != 1 or not (Path(arguments[0]) / "config.json").is_file():
        raise SystemExit(
            "give the directory of a model that python recipes/language/stories15m.py models/stories15m has written"
        )
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
    folder = set_up(Path(arguments[0]))
    print(f"everything happens in {folder}", flush=True)
    began = time.monotonic()
    peaks = federate(folder)
    took = time.monotonic() - began
    torch.set_num_threads(1)  # as at clients
    os.chdir(folder)
    atoll.run(plan("all.jsonl"), out="alone", report=False)
    run = folder / "server" / "runs" / "hamlet"
    models = [(path / "model.safetensors").read_bytes() for path in (run, folder / "alone", *_homes(folder))]
    if len(set(models)) > 1:
        raise SystemExit("server, clients and simulation did not end with the same bits: please report it")
    head = ledger_hash(run)
    if head is None or head not in (folder / "adapter" / "README.md").read_text():
        raise SystemExit("the adapter's card does not state the ledger's hash: please report it")
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    before, after = losses(folder)
    print(f"same bits at the server, {len(CLIENTS)} clients and in a simulation, after kills of server and king")
    print(f"{ROUNDS} rounds in {took:.0f} s; {last['bytes_up']:,} bytes up, {last['bytes_down']:,} down in all rounds")
    print(
        f"peak of memory: server {peaks['server'] / 1000:.0f} MB, client {max(peaks[n] for n in CLIENTS) / 1000:.0f} MB"
    )
    print(f"the Queen's text: {before:.3f} nats a token by the base, {after:.3f} with the adapter that peft loads")
    print(f"{folder}/adapter/README.md states the ledger's hash {head}")


def _homes(folder: Path) -> list[Path]:
    return [folder / name / "runs" / "hamlet" for name in CLIENTS]


if __name__ == "__main__":
    main(sys.argv[1:])
