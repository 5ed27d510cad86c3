"""``optsched generate``: instances from cost models and seeds."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003
from typing import Annotated, Any

from optsched.bandwidth import synthetic
from optsched.cli.options import Output, Seed, option, pairs
from optsched.cli.output import wrote
from optsched.io.files import check_outputs, check_writable
from optsched.io.values import one_of
from optsched.problems.jobshop import generator


def jobarray(
    output: Output,
    model: Annotated[str, option("vgg19, resnet152, bert_large, gpt2_xl.")] = "gpt2_xl",
    stages: Annotated[int, option("Pipeline stages, one per device.")] = 8,
    jobs: Annotated[int, option("Sibling jobs.")] = 30,
    seed: Annotated[int, option("Shuffles the batch sizes over the jobs.")] = 0,
    partition: Annotated[str, option("balanced or naive (equal counts).")] = "balanced",
    link: Annotated[str, option("nvlink, pcie, infiniband or mixed.")] = "nvlink",
    memory: Annotated[str | None, option("Of a device, such as 80GB [default: unlimited].")] = None,
    recompute: Annotated[str, option("Activations: no, yes, or choose (the solver does).")] = "no",
    objective: Annotated[str, option("makespan or period (rolling).")] = "makespan",
    switch: Annotated[bool, option("Count the time of changing jobs.")] = False,
    micro_batches: Annotated[int, option("Micro-batches per job.")] = 1,
) -> None:
    """Write a job array of a real model by the analytic cost model.

    Example: optsched generate jobarray --model vgg19 --stages 4 --jobs 8 -o a.jobarray.json
    """
    from optsched.pipelines.generator import job_array

    check_writable(output)
    one_of("recompute", recompute, ("no", "yes", "choose"))
    array = job_array(
        model, stages, jobs, seed=seed, partition=partition, link=link, memory=memory,
        recompute="choose" if recompute == "choose" else recompute == "yes", switch=switch,
        micro_batches=micro_batches, objective=objective,
    )  # fmt: skip
    wrote(
        output, array.write,
        f": {array.n_jobs} jobs, {array.n_stages} stages on {array.n_devices} devices",
    )  # fmt: skip


def taillard(
    output: Output,
    jobs: Annotated[int, option("Jobs.")] = 20,
    machines: Annotated[int, option("Machines.")] = 15,
    time_seed: Annotated[int, option("Seed of the durations.")] = 1,
    machine_seed: Annotated[int, option("Seed of the routes.")] = 2,
) -> None:
    """Write a job shop by Taillard's generator (1993); `optsched convert ta01 OUT` writes his.

    Example: optsched generate taillard --jobs 5 --machines 4 -o shop.txt
    """
    check_writable(output)
    shop = generator.generate(jobs, machines, time_seed, machine_seed)
    form: Any = "json" if output.suffix == ".json" else "standard"
    wrote(
        output, lambda path: shop.write(path, format=form),
        f": {shop.n_jobs} jobs on {shop.n_machines} machines",
    )  # fmt: skip


def cluster(
    output: Output,
    kind: Annotated[
        list[str] | None,
        option("nvswitch, cube_mesh, nvlink_pairs, pcie, nvl72 [default: nvswitch]."),
    ] = None,
    hosts: Annotated[int, option("How many; kinds take turns.")] = 4,
    level: Annotated[list[str] | None, option("LEVEL=HOSTS, lowest first: leaf=4; repeat.")] = None,
    seed: Seed = 0,
    state: Annotated[Path | None, option("Write a state too, with tenants.")] = None,
    measurements: Annotated[Path | None, option("Write measurements too (CSV).")] = None,
) -> None:
    """Write a synthetic GPU cluster, optionally with tenants and measurements.

    Example: optsched generate cluster --hosts 4 -o c.json --state s.json --measurements m.csv
    """
    check_outputs([output, state, measurements])
    sizes: dict[str, Any] = pairs("level", level or (), "LEVEL=HOSTS")
    sizes = {key: int(text) if text.isdecimal() else text for key, text in sizes.items()}
    made = synthetic.cluster(kind or ["nvswitch"], hosts, seed, levels=sizes)
    table = None if measurements is None else synthetic.network(made, seed)
    wrote(output, made.write, f": {made.n_hosts} hosts, {made.n_gpus} GPUs")
    if state is not None:
        now = synthetic.tenants(made, seed)
        wrote(state, now.write, f": {len(now.free)} GPUs free, {len(now.jobs)} jobs")
    if table is not None:
        wrote(measurements, table.write, f": {len(table)} measurements")


def quota(
    output: Output,
    jobs: Annotated[int, option("Number of jobs.")] = 20,
    nodes: Annotated[int, option("Nodes.")] = 8,
    gpus: Annotated[int, option("GPUs of a node.")] = 8,
    types: Annotated[int, option("Types of node, taking turns.")] = 1,
    objective: Annotated[str, option("sum, max_min, proportional or makespan.")] = "sum",
    gaps: Annotated[bool, option("Sizes 1, 2, 4, ... instead of all.")] = True,
    locality: Annotated[str, option("any, single or whole.")] = "any",
    seed: Seed = 0,
) -> None:
    """Write a quota plan of jobs that scale by Amdahl's law.

    Example: optsched generate quota --jobs 20 --nodes 8 -o plan.quota.json
    """
    from optsched.problems.quota.synthetic import synthetic

    check_writable(output)
    plan = synthetic(
        jobs, nodes, seed, gpus=gpus, types=types, objective=objective, gaps=gaps, locality=locality
    )
    size = f": {len(plan.jobs)} jobs, {len(plan.nodes)} nodes, {plan.n_gpus} GPUs"
    wrote(output, plan.write, size)
