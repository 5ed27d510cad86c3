"""Job arrays: sibling training jobs that share one pipeline of devices (ArrayPipe's JAPSP)."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.errors import InputError
from optsched.io.values import int_array, labels, refuse_unknown
from optsched.model.objective_bounds import objective_bounds
from optsched.model.objectives import PERIOD, objective_value
from optsched.model.schedule import Csr, Problem
from optsched.problems.jobarray import derived
from optsched.problems.jobarray.bounds import period_bounds
from optsched.problems.jobarray.checks import recompute_of
from optsched.problems.jobarray.fields import JobArrayFields, fields_of
from optsched.problems.jobarray.graph import build, overflow_alone
from optsched.problems.jobarray.recompute import choice_of, settled, tradeoff, with_choice
from optsched.solving.result import PeriodicOrders

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    import numpy.typing as npt

    from optsched.model.schedule import Schedule
    from optsched.solving.result import Orders


class JobArray(JobArrayFields, Problem):
    """K sibling jobs on V virtual stages: order every forward and backward block on its device.

    Times are integers for one micro-batch in `time_unit`, memory is in bytes. Arrays have shape
    (K, V), a scalar stands for all of them. See Eq. 1-9 of the ArrayPipe paper for the symbols in
    brackets.

    Parameters
    ----------
    forward, backward
        Block times [r_f, r_b]. With `weight`, `backward` is the input gradient only.
    weight
        Weight-gradient block times (kind ``W``); then the gradient block is of kind ``I``.
    recompute, update, switch
        Re-materialisation [re], optimizer step [u], changing away from the job on a device [w].
    lag_forward, lag_backward
        Communication times, shape (K, V-1) [eta]: F(v) to F(v+1), and B(v+1) to B(v).
    activation, checkpoint
        Bytes kept from F to B, without and with recomputation.
    recompute_workspace
        Extra bytes while a recomputing block runs.
    weight_memory
        Part of the kept bytes that ``I`` leaves for ``W`` to free.
    state
        Bytes of model state (for reports; not a constraint).
    micro_batches, multiplicity, release
        Per job, shape (K,): micro-batches M_j, iterations per cycle (period objective), release.
    batch_size
        Samples of an iteration, shape (K,); 0 = unknown (`with_epoch_multiplicity` needs it).
    job_weight, due
        Weights and due dates of jobs for the objectives that count them, shape (K,).
    place
        Device of each virtual stage, shape (V,), or of each ``[job][micro-batch][stage]``;
        default stage v on device v.
    memory
        Bytes left for activations on each device; 0 = unlimited.
    devices, servers, names
        Names of devices and their servers, names of jobs.
    objective
        ``"makespan"``: end of one iteration of all jobs; ``"total_weighted_completion"`` and
        ``"maximum_lateness"`` of the ends of single jobs; ``"period"``: rolling execution.
    recompute_mode
        ``"never"``, ``"always"``, ``"choose"`` or one bool per job.
    recompute_as_block
        Recomputation as an operation R of its own, which may run before the gradient arrives.
    update_mode
        ``"fused"`` into the last gradient block, an own ``"block"`` U, ``"global"`` (U waits for
        all stages, as gradient clipping needs), or ``"none"``.
    update_blocks_gradient
        Whether a fused update delays the gradient to the previous stage.
    microbatch_order
        ``"fixed"``: ascending per (job, stage) and kind; ``"free"``.
    trailing_switch
        Count the switch after a job's last block too (the paper's Eq. 3).

    Raises
    ------
    InputError
        Naming the field, the index, the value and the legal range.

    Examples
    --------
    >>> array = optsched.JobArray(forward=[[2, 2], [1, 1]], backward=[[4, 4], [2, 2]])
    >>> array.n_operations, optsched.solve(array).status
    (8, 'optimal')
    """

    @property
    def job_names(self) -> tuple[str, ...]:
        """Names of the jobs; empty if they are ``job0``, ``job1``, ..."""
        return () if self.names == labels("names", None, self.n_jobs, "job") else self.names

    @property
    def problem_kind(self) -> str:  # type: ignore[override]
        """``"jobarray"``; with the objective ``"period"`` ``"periodic"``."""
        return "periodic" if self.objective == "period" else "jobarray"

    @property
    def chooses(self) -> bool:
        """Whether the solver chooses which jobs recompute."""
        return self.recompute_mode == "choose"

    @property
    def n_operations(self) -> int:
        """Operations of its schedules; where recomputation is to be chosen, the most."""
        return self.graph([True] * self.n_jobs if self.chooses else None).n_operations

    @property
    def objective_name(self) -> str:
        """What is minimised, as in `Objective.name`."""
        return self.objective

    @classmethod
    def from_profile(
        cls,
        model: Any,
        stages: int | None = None,
        batch_sizes: Sequence[int] | None = None,
        **options: Any,
    ) -> JobArray:
        """Make a job array of a measured profile, or of a model by an analytic cost model.

        Parameters
        ----------
        model
            An object with a method ``problem(**options)`` that makes the array, such as a measured
            `optsched.arraypipe.Profile`. Or, for the cost model of `optsched.pipelines.profiles`:
            ``"vgg19"``, ``"resnet152"``, ``"bert_large"``, ``"gpt2_xl"``, or a
            `optsched.pipelines.models.Model` of your own.
        stages
            Number of pipeline stages, one per device; a profile has its own.
        batch_sizes
            One per job; a profile has its own.
        options
            Those of the object's ``problem``; else of
            `optsched.pipelines.profiles.job_array_fields` (``link``, ``memory``, ``partition``,
            ...) and of `JobArray`.
        """
        if problem := getattr(model, "problem", None):
            for key, value in (("stages", stages), ("batch_sizes", batch_sizes)):
                if value is not None:
                    raise InputError(f"{key}: settled by the profile; leave it out")
            array: JobArray = problem(**options)
            return array
        if str(model).endswith(".profile.json"):
            raise InputError(
                f"model: expected the name of a model or a profile, got {model!r:.60}; a file is "
                "read by optsched.arraypipe.Profile.read(path)"
            )
        from dataclasses import fields

        from optsched.pipelines.profiles import Options, job_array_fields

        theirs = {field.name for field in fields(Options)}
        direct = {*fields_of("option", "label"), "multiplicity", "release"} - {"time_unit"}
        refuse_unknown(options, theirs | direct, "from_profile")
        ours = {key: options.pop(key) for key in options.keys() - theirs}
        found = job_array_fields(model, stages, batch_sizes, **options)  # type: ignore[arg-type]
        return JobArray(**{**found, **ours})

    @classmethod
    def from_table(
        cls, table: Any, time_unit: str = "", *, tick: str = "", **options: Any
    ) -> JobArray:
        """Build an array from rows of a CSV file, a data frame, or mappings.

        Parameters
        ----------
        table
            The path of a CSV file; a pandas or polars data frame, or another mapping from names to
            columns; a list of mappings. Either a row per block with the columns ``job``, ``stage``,
            ``kind`` (``F B W R U``, or a time of `JobArray` such as ``switch``), ``duration``, and
            optional ``bytes`` (activations of F, workspace of R, kept for W); or a row per job with
            ``forward_0``, ``forward_1``, ..., ``backward_0``, ... and, so named, other tables of
            `JobArray`. Both take columns per job, such as ``micro_batches``.
        time_unit
            Unit of times whose header has none: ``ns us ms s``; ``duration_ms`` has one.
        tick
            Unit of the array, to which times are rounded; default ``us`` (``ns`` if one is in ns).
        options
            Those of `JobArray` that are not in the table.

        Raises
        ------
        InputError
            With row, column and value; also for a time above 0 that would round to 0.

        Examples
        --------
        >>> rows = [{"job": "a", "forward_0": 1.25, "backward_0": 2.5}]
        >>> optsched.JobArray.from_table(rows, "ms").forward.tolist()
        [[1250]]
        """
        from optsched.formats.job_table import job_array

        return job_array(table, time_unit, tick, **options)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> JobArray:
        """Read a ``*.jobarray.json`` document (``optsched.jobarray/1``) strictly."""
        from optsched.io.files import read_text
        from optsched.problems.jobarray import document

        return document.read(read_text(path), str(path))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write an ``optsched.jobarray/1`` document (whole file or nothing)."""
        from optsched.io.files import write_atomic
        from optsched.problems.jobarray import document

        write_atomic(path, document.write(self))

    def with_objective(self, objective: str) -> JobArray:
        """Return the same array with another objective."""
        return self.replace(objective=objective)

    @classmethod
    def as_printed(cls, forward: npt.ArrayLike, backward: npt.ArrayLike, **fields: Any) -> JobArray:
        """Return the array as the paper prints it: defaults, and the switch after a last block.

        Its Eq. 7-9 taken literally let a GPU run two blocks at once; that is not offered.

        Parameters
        ----------
        forward, backward, fields
            Those of `JobArray`, but for ``weight``, ``micro_batches``, ``update_mode``,
            ``trailing_switch`` and ``objective``, which the paper settles.
        """
        for key in ("weight", "micro_batches", "update_mode", "trailing_switch", "objective"):
            if key in fields:
                raise InputError(f"{key}: settled by the paper, use JobArray for another value")
        return cls(forward, backward, trailing_switch=True, **fields)

    def with_epoch_multiplicity(
        self, samples: int | Sequence[int], max_copies: int = 64
    ) -> JobArray:
        """Return the array with multiplicities in proportion to iterations per epoch.

        So all jobs see their data equally often: batch size 8 beside 32 gets 4 iterations a cycle
        beside 1. The smallest numbers are taken whose `epoch_error` is at most 1 %. Where
        `max_copies` allows none, as for batch sizes 1 and 1000, the best within it are taken,
        however far off: compare `epoch_error` of the result.

        Parameters
        ----------
        samples
            Samples of the data set; one number per job if they train on different ones.
        max_copies
            Most iterations of one job in a cycle; the graph grows with them. Allow at least the
            longest epoch over the shortest.
        """
        return self.replace(multiplicity=derived.epoch_multiplicity(self, samples, max_copies))

    def epoch_error(self, samples: int | Sequence[int]) -> float:
        """Return the longest epoch, in cycles, over the shortest, minus 1.

        `samples` is as in `with_epoch_multiplicity`.
        """
        return derived.epoch_error(self, samples)

    def graph(self, recompute: Sequence[bool] | None = None) -> Schedule:
        """Return the disjunctive graph of one iteration of all jobs, or of one cycle.

        Operation ids are job-major and topological: per micro-batch F(0..V-1), then from stage V-1
        down [R,] B (or I, W); then per job U(0..V-1) and ``end``. A cycle has them once per copy of
        the job (`multiplicity`), arcs with a distance from every iteration to the next, and a
        period that certainly suffices.

        Parameters
        ----------
        recompute
            Which jobs recompute, instead of `recompute_mode`.
        """
        if recompute is not None:
            return self._choosing(recompute).graph()
        return self._graph

    @cached_property
    def _graph(self) -> Schedule:
        return build(self, self.recomputes, cyclic=self.objective == PERIOD)

    def _choosing(self, recompute: Sequence[bool]) -> JobArray:
        return self.replace(recompute_mode=recompute_of(recompute, self.n_jobs))

    def evaluate_orders(
        self, sequences: Csr | Sequence[Sequence[int]], offsets: npt.ArrayLike | None = None
    ) -> int:
        """Return the least value of the objective under given orders.

        Parameters
        ----------
        sequences
            Per device the operation ids of `graph`, in order.
        offsets
            Period only: cycles by which every operation is late, shape (n_operations,); default 0.

        Raises
        ------
        CyclicOrder
            The orders contradict each other; ``.cycle`` lists the operations of one cycle.
        InputError
            The orders are not permutations of the operations of each device.
        """
        rows = sequences if isinstance(sequences, Csr) else Csr.of(sequences)
        if self.objective != PERIOD:
            if offsets is not None:
                raise InputError('offsets: only with objective="period"')
            from optsched.model.graph import evaluate

            graph = self.graph()
            return objective_value(graph, evaluate(graph, rows).head + graph.duration)
        from optsched.kernels.cycle_ratio import cycle_time

        given = None if offsets is None else int_array("offsets", offsets)
        return cycle_time(self.graph(), rows, given).period

    def scheduled(self, answer: Csr | Orders | PeriodicOrders) -> Schedule:
        """Return the schedule of a solution; of orders and offsets the one of least period.

        Where recomputation was to be chosen, ``provenance["recompute"]`` holds the choice.
        """
        if self.chooses:
            return self._with_recompute(answer)
        if self.objective != PERIOD:
            return super().scheduled(answer)
        if not isinstance(answer, PeriodicOrders):
            raise InputError(f"answer: expected PeriodicOrders, got {type(answer).__name__}")
        from optsched.analysis.rolling import rolling

        return rolling(self.graph(), answer.sequences, answer.offset)

    def _with_recompute(self, answer: Csr | Orders | PeriodicOrders) -> Schedule:
        """The schedule of a solution that holds a choice."""
        chosen = getattr(answer, "recompute", None)
        if chosen is None or len(chosen) != self.n_jobs:
            raise InputError(f"recompute: expected {self.n_jobs} times true or false, got {chosen}")
        orders = answer if isinstance(answer, PeriodicOrders) else answer.sequences  # type: ignore[union-attr]
        found = self._choosing(chosen).scheduled(orders)
        assert found.sequences is not None and found.start is not None
        provenance = {**found.provenance, "recompute": list(map(bool, chosen))}
        return found.with_orders(found.sequences, found.start, found.objective, provenance)

    def answer(self, schedule: Schedule) -> Csr | Orders | PeriodicOrders:
        """Return the solution of a schedule, the inverse of `scheduled`; see `Problem.answer`."""
        if self.chooses:
            recompute = choice_of(self, schedule)
            return with_choice(self._choosing(recompute).answer(schedule), recompute)  # type: ignore[arg-type]
        sequences: Csr = super().answer(schedule)
        return PeriodicOrders(sequences, schedule.offset) if self.objective == PERIOD else sequences

    def evaluate(self, schedule: Schedule) -> int:
        """Return the objective value of a schedule of this array; see `Problem.evaluate`."""
        if self.chooses:
            return self._choosing(choice_of(self, schedule)).evaluate(schedule)
        if self.objective != PERIOD:
            return super().evaluate(schedule)
        self.check_same_graph(schedule)
        if schedule.start is None:
            raise InputError("has no starts: the period of a graph is only one that suffices")
        assert schedule.period is not None
        return schedule.period

    def check_same_graph(self, schedule: Schedule) -> None:
        """Refuse a schedule of another array, or one without a period if this one repeats."""
        rolls = self.objective == PERIOD
        if rolls and schedule.period is None:
            raise InputError("has no period: it is no schedule of a rolling array")
        if not rolls and schedule.period is not None:
            raise InputError('has a period: it is a schedule of the array with objective="period"')
        graph = self.graph(choice_of(self, schedule) if self.chooses else None)
        if not (graph.same_cycle(schedule) if rolls else graph.same_graph(schedule)):
            raise self.other_instance(schedule, graph)

    def bounds(self) -> dict[str, int]:
        """Return all lower bounds of the objective, by name.

        Of one iteration those of `optsched.model.objective_bounds`; of the period those of
        `optsched.problems.jobarray.bounds.period_bounds`. Where recomputation is to be chosen they
        hold for every choice, see `optsched.problems.jobarray.recompute`.
        """
        if self.chooses:
            return self._bounds_of_choices()
        if self.objective != PERIOD:
            return objective_bounds(self)
        return period_bounds(self, self.recomputes)

    def _bounds_of_choices(self) -> dict[str, int]:
        """Bounds that hold for every choice which jobs recompute.

        Of one job those of the better choice. Of several those of the array in which recomputation
        takes neither time nor memory where it is open: a schedule of any choice, with its blocks
        cut shorter, is one of that array. And ``tradeoff``, of all choices at once.
        """
        if self.n_jobs == 1:
            always, never = settled(self)
            open_choices = [c for c in (False, True) if not (never if c else always)[0]]
            found = [self._choosing([choice]).bounds() for choice in open_choices or [False]]
            return min(found, key=lambda bounds: max(bounds.values()))
        costs = tradeoff(self)
        least = np.minimum(self.activation, self.checkpoint)
        least = np.where((costs.always | costs.never)[:, None], self.activation, least)
        relaxed = self.replace(recompute_mode=costs.always.tolist(), activation=least).bounds()
        if self.memory.any():
            relaxed["tradeoff"] = int(np.ceil(costs.relaxed()[0]))
        return relaxed

    def describe(self, objective: int) -> str:
        """Format an objective value with its unit."""
        return f"{objective} {self.time_unit}"

    def lower_bound(self) -> int:
        """Return the best of `bounds`."""
        return max(self.bounds().values())

    def infeasibility(self) -> str:
        """Return the first job that cannot run even alone, and the device that it overflows.

        With ``recompute_mode="choose"``: alone neither with nor without recomputation.
        """
        return overflow_alone(self)

    @cached_property
    def sha256(self) -> str:
        """Hash of the content: all but the name of the array and the format of its documents."""
        import hashlib

        from optsched.problems.jobarray import document

        return hashlib.sha256(document.write(self).split(b"\n", 3)[3]).hexdigest()

    def __repr__(self) -> str:
        return (
            f"<JobArray {self.name!r}: {self.n_jobs} jobs, {self.n_stages} stages "
            f"on {self.n_devices} devices>"
        )
