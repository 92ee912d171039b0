"""Run a plan from Python: `atoll.run(Plan(...))`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from atoll.commit.coordinator import build_coordinator
from atoll.commit.guard import Guard, guarded
from atoll.commit.rehearsal import rehearse_round, rehearse_training
from atoll.commit.run_state import Round, RunState, why_stop
from atoll.core.coordinator import Reason
from atoll.core.errors import AtollError, RunError
from atoll.core.params import load
from atoll.core.parts import Part
from atoll.core.plan import Plan
from atoll.data.heterogeneity import label_counts
from atoll.engine.base import Engine, unheard
from atoll.engine.build import build_engine
from atoll.privacy.ledger import NAME as LEDGER
from atoll.privacy.ledger import Ledger
from atoll.report.progress import Bar, NullWatcher, Watcher, summary
from atoll.report.reading import model_text
from atoll.report.record import RunDirectory, plain, written_plan
from atoll.report.run_files import confusion_info, run_info, run_result
from atoll.simulation.devices import build_devices
from atoll.simulation.driver import Simulation
from atoll.train.federation import Federation, build_federation
from atoll.train.job import Job, build_job, build_model
from atoll.train.own_models import PARAMS

if TYPE_CHECKING:
    import pandas

    from atoll.report.notebook import Picture
    from atoll.report.reading import Against

SHOWN_CLIENTS = 100
"""So many clients are drawn in the picture of a partition."""


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
        return lines + ([f"in {self.path}"] if self.path else [])


def run(
    plan: Plan,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool | Watcher = False,
    checkpoint_seconds: float = 10.0,
    report: bool = True,
) -> Result:
    """Run a plan and return its result.

    With `out` everything is written to that directory as the run goes, and a page about it at the end unless `report`
    is False; `resume=True` continues a run that was stopped there, to the same bits as if it had never been.
    `progress=True` shows a bar.
    """
    watcher: Watcher = (Bar() if progress else NullWatcher()) if isinstance(progress, bool) else progress
    directory = _directory(plan, out, resume)
    try:
        result = _run(plan, directory, watcher, checkpoint_seconds)
        if directory is not None and report and result.reason != Reason.INTERRUPTED:
            _report(directory)
        return result
    except BaseException as error:
        if directory is not None:
            directory.log(f"ends with an error: {type(error).__name__}: {error}")
            _forget_if_nothing_ran(directory)
        raise
    finally:
        if directory is not None:
            directory.close()


def resume(path: str | Path, plan: Plan | None = None, *, progress: bool | Watcher = False) -> Result:
    """Go on with a run that was stopped, to the same bits as if it had never been.

    The plan is that of the directory unless given. It must be given where it holds functions of a script, which no
    file can hold; it may also say that the run goes on for more rounds.
    """
    return run(plan or written_plan(Path(path)), out=path, resume=True, progress=progress)


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


def _run(plan: Plan, directory: RunDirectory | None, watcher: Watcher, checkpoint_seconds: float) -> Result:
    federation, devices = build_federation(plan), build_devices(plan)
    coordinator = build_coordinator(plan, federation)
    ledger = _ledger(plan, directory)
    job = build_job(plan, federation, secret=ledger.secret if ledger else None)
    guard = None
    if plan.privacy is not None:
        job, coordinator, guard = guarded(plan, job, coordinator, ledger or Ledger(job.secret))
        if ledger is None and directory is not None:
            guard.ledger = Ledger.begin(job.secret, plan.identity(), directory.path / LEDGER)
    identity = plan.identity() + (f" {guard.ledger.fingerprint}" if guard else "")
    state, history, engine_part = _where_it_stands(plan, directory, identity)
    if guard is not None and state is not None:
        guard.ledger.check(state.coordinator.attempt)
    rehearse_round(plan, job, coordinator)
    rehearse_training(job)
    started = time.perf_counter()
    tell = getattr(watcher, "preparing", unheard)  # a user's own watcher need not have it
    engine = build_engine(engine_part, job, coordinator, state.coordinator.version if state else 0, tell)
    setup_seconds = time.perf_counter() - started
    try:
        if directory is not None:
            _describe(directory, plan, job, engine, setup_seconds, guard)
            round_now = state.coordinator.version if state else 0
            title = _title(plan, job, engine)
            directory.log(
                f"begins after round {round_now} of {plan.rounds}: {title}; set-up took {setup_seconds:.1f} s"
            )
        simulation = Simulation(plan, engine, coordinator, state, devices, guard)
        if history:
            simulation.last_row, simulation.reason = history[-1], why_stop(plan.stop, history[-1])
        recorder = _Recorder(directory, identity, simulation.state, history, checkpoint_seconds)
        watcher.begin(_title(plan, job, engine), simulation.state.coordinator.version, plan.rounds)
        try:
            cohort = coordinator.policy.goal(coordinator.num_clients)
            for done in simulation.rounds(lambda clients: watcher.clients(clients, cohort)):
                recorder.record(simulation.state, done)
                watcher.round(done.row)
        except KeyboardInterrupt:
            recorder.rewind()
            recorder.save()
            simulation.reason = Reason.INTERRUPTED
        finally:
            watcher.end()
        reason = str(simulation.reason)
        recorder.finish(reason)
        shared, models = _models(plan, job, recorder.state)
        if directory is not None and simulation.reason is not Reason.INTERRUPTED:
            directory.save_model(_tensors(shared, models))
        return Result(
            plan=plan,
            shared=shared,
            models=models,
            params_D=recorder.state.params_D,
            history=history,
            reason=reason,
            engine=engine.describe(),
            contribution=recorder.state.contribution,
            path=directory.path if directory else None,
        )
    finally:
        engine.close()


def _models(plan: Plan, job: Job, state: RunState) -> tuple[nn.Module | None, dict[int, nn.Module]]:
    """The model that all share, or those that clients keep."""
    if not job.kinds:
        return load(build_model(plan, job.federation), job.spec, state.params_D).eval(), {}
    models: dict[int, nn.Module] = {}
    for client, memory in sorted(state.clients.items()):
        number = client % len(job.kinds)
        fresh = build_model(plan, job.federation, plan.models[number] if plan.models else None)
        models[client] = load(fresh, job.kinds[number].spec, memory[PARAMS]).eval()
    return None, models


def _tensors(shared: nn.Module | None, models: Mapping[int, nn.Module]) -> dict[str, Tensor]:
    """All tensors by name, those of a client's own model after its number; cloned, since tied weights share memory."""
    prefixed = {f"client.{client}.": model for client, model in models.items()} if shared is None else {"": shared}
    return {
        prefix + name: tensor.clone()
        for prefix, model in prefixed.items()
        for name, tensor in model.state_dict().items()
    }


class _Recorder:
    """Keeps the run directory in step with the run."""

    def __init__(
        self,
        directory: RunDirectory | None,
        identity: str,
        state: RunState,
        history: list[dict[str, Any]],
        checkpoint_seconds: float,
    ) -> None:
        self.directory, self.identity, self.state, self.history = directory, identity, state, history
        self._every, self._saved_at = checkpoint_seconds, time.monotonic()
        self._confusion: dict[str, Any] | None = None

    def record(self, state: RunState, done: Round) -> None:
        """Write down a round, or more about the last one, and now and then a checkpoint.

        The state comes last: whatever interrupts this, no checkpoint is ahead of what was written about its rounds.
        """
        again = bool(self.history) and self.history[-1]["round"] == done.row["round"]
        if again:
            self.history.pop()
        if self.directory is not None:
            if again:
                self.directory.keep_rows(done.row["round"] - 1)
            self.directory.add_row(done.row)
            if done.scores_C2 is not None:
                accuracy_C, loss_C = plain(done.scores_C2.T)
                scores = {"round": done.row["round"], "clients": done.clients, "accuracy": accuracy_C, "loss": loss_C}
                self.directory.write_json("clients.json", scores)
        self._confusion = confusion_info(done) or self._confusion
        self.history.append(done.row)
        self.state = state
        if time.monotonic() - self._saved_at >= self._every:
            self.save()

    def rewind(self) -> None:
        """Drop what was written of a round whose state was not kept yet when something interrupted."""
        version = self.state.coordinator.version
        self.history[:] = [row for row in self.history if row["round"] <= version]
        if self.directory is not None:
            self.directory.keep_rows(version)

    def save(self) -> None:
        """Write a checkpoint of the last recorded round."""
        if self.directory is not None:
            if self._confusion is not None:
                self.directory.write_json("confusion.json", self._confusion)
            self.directory.save(self.state, self.identity)
            self._saved_at = time.monotonic()

    def finish(self, reason: str) -> None:
        """Write the end of the run."""
        if self.directory is None:
            return
        self.save()
        summary = run_result(reason, self.history, self.state.contribution)
        self.directory.write_json("result.json", summary)
        self.directory.log(f"ends after round {summary['rounds']}: {reason}")


def _ledger(plan: Plan, directory: RunDirectory | None) -> Ledger | None:
    """The privacy ledger of a run that goes on; None for a run that begins."""
    if plan.privacy is None or directory is None:
        return None
    path = directory.path / LEDGER
    began = directory.read_json("run.json")
    if not path.exists() and began is not None:
        raise RunError(
            f"{path} is gone: without its privacy ledger nobody knows what the run has spent, so that it cannot go on; "
            "restore it, or start another run, whose budget adds to what this one has spent"
        )
    if not path.exists():
        return None
    ledger = Ledger.read(path, plan.identity())
    if began is not None:
        ledger.check_owner(began.get("privacy", {}).get("ledger"))
    return ledger


def _where_it_stands(
    plan: Plan, directory: RunDirectory | None, identity: str
) -> tuple[RunState | None, list[dict[str, Any]], Part]:
    """The state, the metrics and the engine to go on with; a run keeps the engine that it began with."""
    if directory is None:
        return None, [], plan.engine
    state = directory.load(identity)
    history = directory.keep_rows(state.coordinator.version if state else 0)
    info = directory.read_json("run.json")
    part = Part.of(info["engine"]) if info else plan.engine
    if info and "workers" in plan.engine.options and part.name == "processes":
        part = Part(part.name, **part.options, workers=plan.engine.options["workers"])
    return state, history, part


def _describe(
    directory: RunDirectory, plan: Plan, job: Job, engine: Engine, setup_seconds: float, guard: Guard | None
) -> None:
    """Write what is known before the first round: the choice of engine above all."""
    info = run_info(
        plan,
        job,
        engine,
        guard,
        name=plan.name,
        setup_seconds=setup_seconds,
        num_train=job.federation.dataset.num_train,
    )
    if directory.read_json("run.json") is None:
        picture = partition_counts(job.federation)
        if picture is not None and guard is None:  # who holds what is what privacy hides
            directory.write_json("partition.json", picture)
        directory.write_json("run.json", info)  # last: where it is, all is


def partition_counts(federation: Federation, most: int = SHOWN_CLIENTS) -> dict[str, Any] | None:
    """How many samples of each class the first clients hold; None where samples have no single label."""
    dataset = federation.dataset
    if dataset.train_y.ndim != 1:
        return None
    clients = list(range(min(most, federation.num_clients)))
    counts_CK = label_counts(federation.partition, dataset.train_y, dataset.num_classes, clients)
    return {
        "clients": clients,
        "counts": counts_CK.tolist(),
        "class_names": list(dataset.class_names),
        "num_clients": federation.num_clients,
    }


def _title(plan: Plan, job: Job, engine: Engine) -> str:
    settings = engine.describe()
    how, stack = str(settings["name"]), settings.get("stack", 1)
    if engine.num_workers:
        how += f", {engine.num_workers} worker{'s' if engine.num_workers > 1 else ''}"
    if stack not in (0, 1):
        how += f", {stack} clients trained as one"
    data = job.federation.dataset.name
    return f"{plan.algorithm.name} · {model_text(plan)} · {data} · {job.federation.num_clients} clients · engine {how}"
