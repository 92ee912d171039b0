"""Run a plan from Python: `atoll.run(Plan(...))`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from atoll.commit.parts import RunParts, build_parts, open_ledger
from atoll.commit.rehearsal import rehearse_training
from atoll.commit.run_state import RunState
from atoll.core.coordinator import Coordinator, Reason
from atoll.core.errors import AtollError, RunError
from atoll.core.events import Reader, RunEnded, RunStarted, SetupStep, publish
from atoll.core.params import load
from atoll.core.parts import Part
from atoll.core.plan import Plan
from atoll.data.heterogeneity import label_counts
from atoll.engine.base import Engine
from atoll.engine.build import build_engine
from atoll.privacy.ledger import NAME as LEDGER
from atoll.privacy.ledger import Ledger
from atoll.report.main_figure import main_of
from atoll.report.new_clients import new_clients_text
from atoll.report.progress import Bar, summary
from atoll.report.reading import model_text
from atoll.report.record import RunDirectory, written_plan
from atoll.report.writer import Checkpoints, RunWriter, run_info
from atoll.simulation.devices import build_devices
from atoll.simulation.driver import Simulation
from atoll.split.driver import SplitEngine, split_engine
from atoll.split.vertical import VerticalEngine
from atoll.train.federation import Federation, build_federation
from atoll.train.job import Job
from atoll.train.model import build_model, final_model
from atoll.train.own_models import OwnModels

if TYPE_CHECKING:
    import pandas

    from atoll.report.notebook import Picture
    from atoll.report.reading import Against

SHOWN_CLIENTS = 100
"""So many clients are drawn in the picture of a partition."""
WHERE = ("workers", "address", "working_dir", "patience")
"""Options of engines that change no result, so that a run may go on with others."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Result:
    """What a run ended with."""

    plan: Plan
    shared: nn.Module | None
    """The model that all share; None where clients keep models of their own."""
    models: Mapping[int, nn.Module]
    """The model of each client that keeps one of its own and has taken part."""
    params_D: Tensor
    """The shared model as a flat vector, or the last consensus of clients that send scores."""
    history: list[dict[str, Any]]
    reason: str
    engine: dict[str, object]
    contribution: Mapping[int, float]
    """What each client has added over the rounds, where the plan says how that is computed."""
    new_clients: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """Steps of adaptation -> how clients that took no part in training fared after them: `mean` and `worst_decile` of
    the main figure, `loss` and others; empty unless the plan has `evaluation.new_clients`."""
    path: Path | None = None

    @property
    def model(self) -> nn.Module:
        """The model that all share."""
        if self.shared is None:
            raise RunError(
                f"{self.plan.algorithm.name} has no shared model: result.models[client] is the one that a client keeps"
            )
        return self.shared

    @property
    def test(self) -> dict[str, float]:
        """The last measured metrics on the central test set."""
        found: dict[str, float | None] = next((row["test"] for row in reversed(self.history) if "test" in row), {})
        return {name: float("nan") if value is None else value for name, value in found.items()}

    @property
    def accuracy(self) -> float:
        """The last measured test accuracy, in [0, 1]."""
        return self.test.get("accuracy", float("nan"))

    def frame(self) -> pandas.DataFrame:
        """The history as a data frame with flat columns such as `test.accuracy` (needs pandas)."""
        try:
            import pandas
        except ImportError as error:
            raise RunError("a data frame needs pandas: pip install pandas, or use result.history") from error
        return pandas.json_normalize(self.history)

    def plot(self, against: Against = "round") -> Picture:
        """Draw accuracy and loss against `round`, `seconds`, `simulated_seconds` or `bytes`."""
        from atoll.report.figures import curves
        from atoll.report.reading import RunRecord

        record = RunRecord(path=self.path or Path("run"), plan=self.plan, info={}, rows=tuple(self.history))
        return curves([record], against)

    def save_adapter(self, path: str | Path, *, merged: bool = False, client: int | None = None) -> Path:
        """Write the adapter of a language model (`hf_causal`) for peft to load, or the merged model, with a card.

        It is of the model that all share, or of that of a `client` where each has one of its own.
        """
        from atoll.language.export import save_adapter
        from atoll.report.reading import read_run

        info = read_run(self.path).info if self.path else {}
        model = self.model if client is None else self.models[client]
        return save_adapter(model, self.plan, Path(path), merged=merged, rows=self.history, info=info, run=self.path)

    def __repr__(self) -> str:
        return f"<Result: {'; '.join(self._lines())}>"

    def _repr_html_(self) -> str:
        """What a notebook shows: how the run ended, and its curves."""
        from atoll.report.notebook import result_html

        return result_html(self._lines(), self.plot() if self.test else None)

    def _lines(self) -> list[str]:
        rounds = self.history[-1]["round"] if self.history else 0
        lines = [f"{self.reason} after {rounds} of {self.plan.rounds} rounds"]
        lines += [summary(self.history[-1])] if self.history else []
        lines += [new_clients_text(main_of(self.test) or "accuracy", self.new_clients)] if self.new_clients else []
        return lines + ([f"in {self.path}"] if self.path else [])


def run(
    plan: Plan,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool = False,
    watch: Sequence[Reader] = (),
    checkpoint_seconds: float = 10.0,
    report: bool = True,
) -> Result:
    """Run a plan and return its result.

    With `out` everything is written to that directory as the run goes, and a page about it at the end unless `report`
    is False; `resume=True` continues a run that was stopped there, to the same bits as if it had never been.
    `progress=True` shows a bar. Each callable of `watch` is given every event of the run (`atoll.events`), after it was
    written down; one that raises is warned about and not called again.
    """
    directory = _directory(plan, out, resume)
    bar = Bar() if progress else None
    read = publish([*([bar] if bar else []), *watch])
    try:
        result = _run(plan, directory, read, checkpoint_seconds)
        if directory is not None and report and result.reason != Reason.INTERRUPTED:
            _report(directory)
        return result
    except BaseException as error:
        if bar is not None:
            bar.end()
        if directory is not None:
            directory.log(f"ends with an error: {type(error).__name__}: {error}")
            _forget_if_nothing_ran(directory)
        raise
    finally:
        if directory is not None:
            directory.close()


def resume(
    path: str | Path, plan: Plan | None = None, *, progress: bool = False, watch: Sequence[Reader] = ()
) -> Result:
    """Go on with a run that was stopped, to the same bits as if it had never been.

    The plan is that of the directory unless given. It must be given where it holds functions of a script, which no
    file can hold; it may also say that the run goes on for more rounds.
    """
    return run(plan or written_plan(Path(path)), out=path, resume=True, progress=progress, watch=watch)


def _report(directory: RunDirectory) -> None:
    """Write the report; a page that cannot be written takes no result away."""
    from atoll.report.html import write_report

    try:
        write_report([directory.path])
    except (AtollError, OSError) as error:
        directory.log(f"no report: {error}; atoll report {directory.path} tries again")


def _directory(plan: Plan, out: str | Path | None, resume: bool) -> RunDirectory | None:
    if out is None:
        if resume:
            raise RunError("resume needs the directory of the run: pass out=")
        return None
    if not resume:
        return RunDirectory.create(Path(out), plan)
    directory = RunDirectory.reopen(Path(out))
    if directory.plan().identity() != plan.identity():
        other = directory.plan().privacy != plan.privacy
        why = "has other privacy settings, which cannot change" if other else "belongs to another plan"
        directory.close()
        raise RunError(f"{out} {why}: resume it with its own plan, or choose another directory")
    directory.write_text("plan.toml", plan.to_toml())  # it may go on for longer than it was started for
    return directory


def _forget_if_nothing_ran(directory: RunDirectory) -> None:
    """Leave no run behind whose plan was refused, so that the corrected plan may use the directory."""
    if not (directory.path / "run.json").exists():
        for name in ("plan.toml", "metrics.jsonl", "log.txt", ".lock", LEDGER):
            (directory.path / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            directory.path.rmdir()  # it stays if it holds anything else


def _described(parts: RunParts, ledger: Ledger | None, setup_seconds: float) -> dict[str, Any]:
    """Return what is written of a run before its first round."""
    plan, num_train = parts.plan, parts.job.federation.dataset.num_train
    info = run_info(parts, name=plan.name, setup_seconds=setup_seconds, num_train=num_train)
    if isinstance(parts.engine, SplitEngine | VerticalEngine):
        info["split"] = parts.engine.parties.describe()
        info["split"] |= {} if ledger is None else {"ledger": ledger.fingerprint}
    return info


def _run(plan: Plan, directory: RunDirectory | None, read: Reader, checkpoint_seconds: float) -> Result:
    federation, devices = build_federation(plan), build_devices(plan)
    described = directory.read_json("run.json") if directory is not None else None
    path, fingerprint = directory.path / LEDGER if directory is not None else None, fingerprint_of(described)
    ledger = open_ledger(plan, path, begun=described is not None, fingerprint=fingerprint)
    identity = plan.identity() + (f" {ledger.fingerprint}" if ledger else "")
    state, history, engine_part = _where_it_stands(plan, directory, identity, described)
    if ledger is not None and state is not None and plan.privacy is not None:
        ledger.check(state.coordinator.attempt)
    version, setup_seconds = state.coordinator.version if state else 0, 0.0

    def tell(text: str) -> None:
        read(SetupStep(text=text))

    def engine(job: Job, coordinator: Coordinator) -> Engine:
        nonlocal setup_seconds
        rehearse_training(job)
        started = time.perf_counter()
        if plan.split is not None:
            made: Engine = split_engine(plan, job)
        else:
            made = build_engine(engine_part, job, coordinator, version, tell, plan)
        setup_seconds = time.perf_counter() - started
        return made

    parts = build_parts(plan, federation, ledger, engine)
    try:
        writer = RunWriter(directory, history)
        if described is None:
            # who holds what is what privacy hides
            counts = partition_counts(federation) if plan.privacy is None else None
            writer.describe(_described(parts, ledger, setup_seconds), counts)
        simulation = Simulation(parts, state, devices, history[-1] if history else None)
        checkpoints = Checkpoints(writer, identity, simulation.state, checkpoint_seconds)
        started = RunStarted(title=_title(parts), version=version, rounds=plan.rounds, setup_seconds=setup_seconds)
        writer(started)
        read(started)
        reason = _simulate(simulation, writer, checkpoints, read)
        shared, models = _models(plan, parts.job, checkpoints.state)
        checkpoints.save()
        tensors = None if reason is Reason.INTERRUPTED else _tensors(shared, models)
        writer.finish(str(reason), checkpoints.state, tensors)
        ended = RunEnded(reason=str(reason), version=checkpoints.state.coordinator.version)
        writer(ended)
        read(ended)
        return Result(
            plan=plan,
            shared=shared,
            models=models,
            params_D=checkpoints.state.params_D,
            history=history,
            reason=str(reason),
            engine=parts.engine.describe(),
            contribution=checkpoints.state.contribution,
            new_clients=writer.new_clients.figures if writer.new_clients else {},
            path=directory.path if directory else None,
        )
    finally:
        parts.engine.close()


def fingerprint_of(described: Mapping[str, Any] | None) -> object:
    """Return what a run wrote down of its ledger when it began; None if it did not begin, or needs no secret."""
    sections = [(described or {}).get(name) or {} for name in ("privacy", "split")]
    return next((section["ledger"] for section in sections if "ledger" in section), None)


def _simulate(simulation: Simulation, writer: RunWriter, checkpoints: Checkpoints, read: Reader) -> Reason:
    """Run the rounds, write them down, and return why they ended; Ctrl-C ends them with a checkpoint."""
    try:
        for events in simulation.rounds(read):
            for event in events:
                writer(event)
            checkpoints.record(simulation.state)
            for event in events:
                read(event)
    except KeyboardInterrupt:
        checkpoints.rewind()
        return Reason.INTERRUPTED
    assert simulation.reason is not None
    return simulation.reason


def _models(plan: Plan, job: Job, state: RunState) -> tuple[nn.Module | None, Mapping[int, nn.Module]]:
    """Return the model that all share, if they do, and those that clients have of their own."""
    shared = load(final_model(plan, job), job.spec, state.params_D).eval() if job.shares_model else None
    makers = [partial(build_model, plan, job.federation, part) for part in plan.models or (plan.model,)]
    return shared, OwnModels(job, makers, state.params_D, state.clients) if job.personal else {}


def _tensors(shared: nn.Module | None, models: Mapping[int, nn.Module]) -> dict[str, Tensor]:
    """All tensors by name, those of a client's own model after its number; cloned, since tied weights share memory."""
    prefixed = {f"client.{client}.": model for client, model in models.items()} if shared is None else {"": shared}
    return {
        prefix + name: tensor.clone()
        for prefix, model in prefixed.items()
        for name, tensor in model.state_dict().items()
    }


def _where_it_stands(
    plan: Plan, directory: RunDirectory | None, identity: str, described: Mapping[str, Any] | None
) -> tuple[RunState | None, list[dict[str, Any]], Part]:
    """Return the state, the metrics and the engine to go on with; a run keeps the engine that it began with."""
    if directory is None:
        return None, [], plan.engine
    state = directory.load(identity)
    history = directory.keep_rows(state.coordinator.version if state else 0)
    part = Part.of(described["engine"]) if described else plan.engine
    if described and part.name == plan.engine.name:
        where = {key: value for key, value in plan.engine.options.items() if key in WHERE}
        part = Part(part.name, **{**part.options, **where})
    return state, history, part


def partition_counts(federation: Federation, most: int = SHOWN_CLIENTS) -> dict[str, Any] | None:
    """How many samples of each class the first clients hold; None where samples have no single label."""
    dataset = federation.dataset
    if dataset.train_y.ndim != 1 or not dataset.has_classes:
        return None
    clients = list(range(min(most, federation.num_clients)))
    counts_CK = label_counts(federation.partition, dataset.train_y, dataset.num_classes, clients)
    return {
        "clients": clients,
        "counts": counts_CK.tolist(),
        "class_names": list(dataset.class_names),
        "num_clients": federation.num_clients,
    }


def _title(parts: RunParts) -> str:
    plan, job, engine = parts.plan, parts.job, parts.engine
    settings = engine.describe()
    how, stack = str(settings["name"]), settings.get("stack", 1)
    if engine.num_workers:
        how += f", {engine.num_workers} worker{'s' if engine.num_workers > 1 else ''}"
    if stack not in (0, 1):
        how += f", {stack} clients trained as one"
    data = job.federation.dataset.name
    return f"{plan.algorithm.name} · {model_text(plan)} · {data} · {job.federation.num_clients} clients · engine {how}"
