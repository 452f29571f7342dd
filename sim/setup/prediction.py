"""A predicted step: its time at once; its figures, its interval and its trace when they are asked for."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sim.accounts.memory import counters
from sim.accounts.trace import CHROME_TRACE, Trace, to_chrome
from sim.base.errors import InputError, LongstepError, none_of
from sim.base.files import Output
from sim.base.garbage import garbage_collection_off
from sim.engine.play.simulate import Simulation
from sim.engine.play.simulate import simulate as simulated
from sim.engine.results.sensitivity import elasticities
from sim.schedule.ir.program import Schedule
from sim.schedule.methods.catalog import Build, Entry
from sim.schedule.methods.hints import Hints
from sim.schedule.proof.check import Checked
from sim.schedule.proof.remembered import check_once
from sim.setup import names
from sim.setup.answers.answer import as_html, rests_on, sentence
from sim.setup.answers.charts import charts_of_step
from sim.setup.answers.figures import as_rows, figures_shown
from sim.setup.answers.table import Table
from sim.setup.effort import Asked, require_small
from sim.setup.machine import engine_of, equipped, jitter_of, rated
from sim.setup.names import at_least_one
from sim.setup.played import PlayedStep
from sim.words.mesh import Mesh
from sim.words.profile import Profile
from sim.words.workload import Workload
from topology.cluster import Cluster
from topology.specs import ClusterSpec


class Prediction(PlayedStep):
    """One simulated step of a schedule on a cluster. What it says is computed when first asked for, and kept.

    >>> from sim.setup.predict import predict
    >>> p = predict("ulysses", model="llama3-8b", seq="16M", cluster="hgx-h100")
    >>> p.fits, p.bound_by, p.interval.low_s < p.step_time_s < p.interval.high_s
    (False, 'compute', True)
    """

    def __init__(self, simulation: Simulation, schedule: str, title: str, again: Callable[..., Prediction]) -> None:
        super().__init__(simulation, schedule, title)
        self._again = again

    def elasticities(self) -> Table:
        """Return how the step time depends on every figure of the machine, the largest first, from one simulation.

        An elasticity of -0.5 is 1 % less time for 2 % more of a rate. Where ``bound_changes_nearby``, within 2 %, it
        may be another one beyond. Raises InputError where there is no C compiler.

        >>> from sim.setup.predict import predict
        >>> p = predict("ulysses", model="llama3-8b", seq="1M", cluster="hgx-h100")
        >>> row = p.elasticities()[0]
        >>> row["figure"], round(row["elasticity"], 1), row["bound_changes_nearby"]
        ('compute', -1.0, False)
        """
        return Table([row._asdict() for row in elasticities(self.simulation)])

    def replace(self, **changes: Any) -> Prediction:
        """Return the prediction with other arguments of ``predict`` (or ``simulate``): a what-if.

        >>> from sim.setup.predict import predict
        >>> p = predict("ulysses", model="llama3-8b", seq="16K", cluster="hgx-h100", gpus=2, layers=2)
        >>> p.replace(set={"cluster.nvlink.bytes_per_s": "*2"}).step_time_s < p.step_time_s
        True
        """
        return self._again(**changes)

    @property
    def answer(self) -> str:
        """What it says in one sentence: the time of a step with its interval, tokens/s/GPU, and whether it fits."""
        return sentence([self])

    @property
    def rests_on(self) -> list[str]:
        """What that rests on, in three lines at most; all of it is in ``report.evidence``."""
        return rests_on(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the answer and all figures as plain data, as ``longstep simulate --json`` prints them."""
        figures: dict[str, Any] = msgspec.to_builtins(self.report)
        return {"answer": self.answer, "rests_on": self.rests_on, **figures}

    def save_trace(self, path: str | Path, *, force: bool = False) -> None:
        """Write a Chrome trace, which https://ui.perfetto.dev opens, with the memory that buffers take.

        Raises InputError where there is a file that is no such trace, unless ``force``.
        """
        write_trace(CHROME_TRACE.at(path, force=force), self.played, [self.trace])

    def __repr__(self) -> str:
        return "\n".join([self.answer, f"  {self.title}", *(f"  {line}" for line in self.rests_on)])

    def _repr_html_(self) -> str:

        shown = as_rows([*figures_shown(self, self.figures), ("bound by", self.bound_by)])
        return as_html(self.answer, shown + charts_of_step(self), [self.title, *self.rests_on])


def write_trace(output: Output, checked: Checked, traces: list[Trace]) -> None:
    """Write traces of one schedule side by side, with the memory that its buffers take."""
    output.write(to_chrome(traces, {trace.player: counters(checked, trace) for trace in traces}))


@contextlib.contextmanager
def blaming_the_builder() -> Iterator[None]:
    """Raise InputError with the place where a builder, or the programs that it builds lazily, fails."""
    try:
        yield
    except LongstepError:
        raise
    except (Exception, SystemExit) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        raise InputError(f"building the schedule failed at {where}: {type(error).__name__}: {error}") from error


@garbage_collection_off()
def built(entry: Entry, workload: Workload, mesh: Mesh, options: Any, hints: Hints) -> Schedule:
    """Return the schedule that a builder makes; raises InputError where it fails, or returns something else."""
    with blaming_the_builder():
        schedule = entry.schedule(workload, mesh, options, hints)
    if not isinstance(schedule, Schedule):
        raise InputError(
            f"`schedule`: its builder returned {type(schedule).__name__}, expected sim.schedule.ir.program.Schedule"
        )
    return schedule


def build(
    schedule: str | Build | Entry,
    workload: Workload,
    mesh: Mesh | int,
    *,
    hints: Hints = Hints(),
    yes: bool = False,
    **options: object,
) -> Checked:
    """Return a schedule, built and proved; for a number of ranks its degrees are the usual ones.

    ``options`` are those of the schedule, ``hints`` what a builder may ask about the machine. Raises InputError where
    it cannot be built, ScheduleError where it breaks a rule that ``check`` proves, and TooLargeError where that takes
    over 20 s or 4 GB, unless told ``yes``.

    >>> build("ring", names.workload("tiny", "1K"), 4, layout="zigzag").schedule.num_ranks
    4
    """
    if not isinstance(workload, Workload):
        raise InputError(f"`workload` {workload!r}: expected what longstep.workload returns")
    entry = names.entry(schedule)
    if not isinstance(mesh, Mesh):
        mesh = entry.mesh(at_least_one("mesh", mesh), workload.model)
    name = names.schedule_name(schedule)
    own = names.options(entry, name, names.pairs(options), "the option ")
    require_small(Asked(name, entry, workload, mesh, own, hints), yes=yes)
    program = built(entry, workload, mesh, own, hints)
    with blaming_the_builder():
        return check_once(program)


def require_known(given: Iterable[str], allowed: Iterable[str]) -> None:
    """Raise InputError for the name of an argument that there is none of, with one that is near."""
    known = [name for name in allowed if name != "_"]
    for name in given:
        if name not in known:
            raise InputError(none_of("argument", name, known))


def proved(played: Prediction | Checked) -> Checked:
    """Return the schedule of a prediction, or the one that was given; raises InputError for anything else."""
    found = played.checked if isinstance(played, Prediction) else played
    if not isinstance(found, Checked):
        raise InputError(f"{type(found).__name__} is no schedule that was proved: expected what longstep.build returns")
    return found


def simulate(
    checked: Checked,
    cluster: str | Path | ClusterSpec | Cluster,
    profile: str | Path | Profile | None = None,
    *,
    jitter: float | None = None,
    seed: int = 0,
    seeds: int | None = None,
    jitter_per_rank: bool = False,
    placement: Sequence[int] | None = None,
    engine: str = "auto",
) -> Prediction:
    """Return the prediction of one step of a schedule, rank i of which is on device ``placement[i]``, by default i.

    The profile is by default the one that the cluster names; arguments are as in ``predict``. Raises InputError if the
    cluster has too few devices, or the profile is of another machine.

    >>> p = simulate(build("ulysses", names.workload("llama3-8b", "64K"), 8), "hgx-h100")
    >>> p.replace(profile="datasheet").step_time_s < p.step_time_s
    True
    """
    checked = proved(checked)
    spec, measured = equipped(cluster, profile)
    measured = rated(measured, checked.schedule.header.workload.scope)
    noise, plays = jitter_of(jitter, seed, seeds, spec, measured, per_rank=jitter_per_rank), engine_of(engine)
    found = simulated(checked, Cluster(spec), measured, noise, placement, plays)
    given: dict[str, Any] = {"cluster": cluster, "profile": profile, "placement": placement}
    given |= {"jitter": jitter, "seed": seed, "seeds": seeds, "jitter_per_rank": jitter_per_rank, "engine": engine}

    def again(**changes: Any) -> Prediction:
        require_known(changes, given)
        return simulate(checked, **(given | changes))

    header, ranks = checked.schedule.header, checked.schedule.num_ranks
    work = f"{header.workload.scope} of {header.workload.model.name}: S {header.workload.seq}"
    title = f"{header.name}, {work}, {ranks} x {spec.gpu.name} ({spec.name})"
    return Prediction(found, header.name, title, again)
