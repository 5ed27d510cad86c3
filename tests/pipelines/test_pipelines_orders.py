"""Hand-made orders on any job: several jobs, every option, torch's own orders, refusals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optsched import JobArray, Schedule, pipelines, verify
from optsched.errors import CyclicOrder, InputError
from optsched.pipelines.fixed_order import Step, ordered
from optsched.testing.random_problems import random_array

if TYPE_CHECKING:
    from random import Random


def uniform(stages: int, micro_batches: int) -> JobArray:
    """One job of equal stages."""
    return JobArray([[2] * stages], [[5] * stages], micro_batches=micro_batches, activation=1)


def cells(schedule: Schedule) -> list[list[tuple[str, int, int]]]:
    """Kind, stage and micro-batch of every block, device by device."""
    assert schedule.sequences is not None
    labels = list(zip(schedule.kind.tolist(), schedule.stage.tolist(),
                      schedule.microbatch.tolist(), strict=True))  # fmt: skip
    return [[labels[i] for i in row] for row in schedule.sequences.to_lists()]


@given(st.randoms(use_true_random=False), st.sampled_from(pipelines.NAMES), st.integers(1, 3))
def test_iterations_of_a_cycle_follow_each_other(rng: Random, name: str, n: int) -> None:
    """N copies of every job take n times one; of jobs with other numbers the order is right."""
    array = random_array(rng).replace(
        place=None, memory=None, switch=0, devices=None, servers=None, release=0,
        trailing_switch=False, objective="period",
    )  # fmt: skip
    if name == "interleaved":
        array = array.replace(place=pipelines.wrapped(1, array.n_stages))
    if name == "hanayo":
        if array.n_stages % 2:
            return
        array = array.replace(place=pipelines.zigzag(array.n_stages // 2, 2))
    if array.n_stages % 2 and name == "chimera":
        return
    if array.weight is None and name.startswith("zb"):
        return
    build = getattr(pipelines, name)
    one, many = build(array), build(array.replace(multiplicity=n))
    assert verify(many) == []
    assert n * (one.period - 1) < many.period <= n * one.period or one.period == 1
    copies = [rng.randint(1, 3) for _ in range(array.n_jobs)]
    assert verify(build(array.replace(multiplicity=copies))) == []


@given(st.randoms(use_true_random=False), st.sampled_from(pipelines.NAMES), st.integers(1, 3))
def test_every_option_gives_a_schedule(rng: Random, name: str, devices: int) -> None:
    """Updates, recompute and weight blocks, switches, lags: complete orders, no deadlock."""
    array = random_array(rng)
    place: tuple[int, ...] = tuple(range(array.n_stages))
    if name in ("interleaved", "hanayo"):
        chunks = array.n_stages // devices
        if chunks * devices != array.n_stages or (name == "hanayo" and chunks % 2):
            return
        layout = pipelines.wrapped if name == "interleaved" else pipelines.zigzag
        place = layout(devices, chunks)
    if name in ("zb_h1", "zb_h2") and array.weight is None:
        with pytest.raises(InputError, match="needs weight blocks"):
            getattr(pipelines, name)(array.replace(place=place, memory=None, switch=0,
                                                   devices=None, servers=None))  # fmt: skip
        return
    array = array.replace(place=place, memory=None, switch=0, devices=None, servers=None)
    try:
        schedule = getattr(pipelines, name)(array)
    except InputError as error:
        assert "even number" in str(error) or "groups of equal size" in str(error)
        return
    assert verify(schedule) == []
    if name != "chimera":  # which may reorder micro-batches
        assert schedule.makespan >= array.lower_bound()


def test_memory_is_left_to_the_verifier() -> None:
    """GPipe's activations do not fit; 1F1B's do."""
    array = uniform(3, 8).replace(memory=[3, 2, 1])
    assert {v.kind for v in verify(pipelines.gpipe(array))} == {"memory"}
    assert verify(pipelines.one_f_one_b(array)) == []


def test_gpipe_reversed() -> None:
    """Backward from the last micro-batch on; refused where micro-batches must ascend."""
    with pytest.raises(InputError, match='microbatch_order="free"'):
        pipelines.gpipe(uniform(2, 3), reverse=True)
    schedule = pipelines.gpipe(uniform(2, 3).replace(microbatch_order="free"), reverse=True)
    assert [m for kind, _, m in cells(schedule)[0] if kind == "B"] == [2, 1, 0]
    assert verify(schedule) == []
    assert schedule.makespan == pipelines.gpipe(uniform(2, 3)).makespan


@pytest.mark.parametrize(("devices", "chunks", "m"), [(2, 2, 4), (4, 2, 8), (4, 3, 4), (4, 2, 10)])
def test_interleaved_is_torchs_order(devices: int, chunks: int, m: int) -> None:
    """Cell by cell `ScheduleInterleaved1F1B` of the installed torch."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    theirs: Any = object.__new__(schedules.ScheduleInterleaved1F1B)
    theirs.pp_group_size, theirs.n_local_stages, theirs._n_microbatches = devices, chunks, m
    theirs.microbatches_per_round = m // max(1, m // devices)
    job = pipelines.uniform(
        "interleaved", stages=devices, micro_batches=m, chunks=chunks, forward=chunks,
        backward=chunks, weight=None,
    )  # fmt: skip
    for rank, row in enumerate(cells(pipelines.interleaved(job))):
        actions = theirs._calculate_single_rank_operations(rank)
        order = [(a.computation_type.value, a.stage_index, a.microbatch_index)
                 for a in actions if a is not None]  # fmt: skip
        assert row == order


def test_chimera_runs_both_ways() -> None:
    """The first blocks of both ends; weights twice, order of Chimera's figure 3."""
    row = cells(pipelines.chimera(uniform(4, 4)))[0]
    assert row == [("F", 0, 0), ("F", 0, 2), ("F", 3, 1), ("B", 3, 1), ("F", 3, 3), ("B", 3, 3),
                   ("B", 0, 0), ("B", 0, 2)]  # fmt: skip


@pytest.mark.parametrize("name", pipelines.NAMES)
def test_other_places_are_refused(name: str) -> None:
    """With the place that is wanted."""
    job = JobArray([[1] * 4], [[1] * 4], weight=1, place=[0, 0, 1, 1])
    with pytest.raises(InputError, match=r"stage v on device v|place=(wrapped|zigzag)\("):
        getattr(pipelines, name)(job)


def test_cyclic_orders_are_refused_with_their_cycle() -> None:
    """Two devices that wait for each other, in words."""
    job = uniform(2, 1)
    rows = [[Step("B", 0, 0), Step("F", 0, 0)], [Step("F", 0, 1), Step("B", 0, 1)]]
    with pytest.raises(CyclicOrder, match=r"gpu0: B\(job 0, stage 0\) before F\(job 0, stage 0\)"):
        ordered(job, "mine", lambda units: rows)


def test_stages_of_one_device_share_links_and_memory() -> None:
    """A folded profile: no lag at the fold, all states of a device taken off its memory."""
    place = pipelines.zigzag(2, 2)
    job = JobArray.from_profile(
        "bert_large", 4, [8], place=place, memory="8GB", split_backward=True
    )
    assert job.place == (0, 1, 1, 0)
    assert job.lag_forward[0, 1] == 0 < job.lag_forward[0, 0]
    assert job.memory.tolist() == [
        (8 << 30) - 2 * int(job.state[0, [v for v in range(4) if place[v] == d]].sum())
        for d in range(2)
    ]
    assert (job.weight == job.forward).all()
    assert (job.weight_memory <= job.activation).all()
