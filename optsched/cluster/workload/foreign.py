"""Tables and logs of others by their first lines, for messages."""

from __future__ import annotations

import re
from typing import Final

_TABLES: Final = {
    "submit_time_s duration_s num_gpus": "a trace of optsched: `optsched simulate` takes it",
    "num_gpu submit_time iterations duration": "a Tiresias trace: `optsched workload` reads it",
    "job_id submit_time start_time gpu_num": "a Helios log: `optsched workload` reads it",
    "job_name inst_num start_time plan_gpu": "Alibaba's tasks (2020): `optsched workload` reads it",
    "name num_gpu gpu_milli creation_time": "Alibaba's pods of 2023: `optsched workload` reads it",
    "jobid submit start end": "a log of sacct: `optsched workload` reads that of sacct -P",
    "job_name inst_id status start_time": "Alibaba's table of jobs or instances, without GPUs: "
    "`optsched workload` reads pai_task_table.csv",
    "job_name worker_name gpu_wrk_util": "Alibaba's table of sensors of 2020, not of jobs",
    "sn cpu_milli memory_mib gpu": "a list of nodes, not of jobs",
    "time name application num_replicas": "a Pollux or Sia workload, without durations",
    "machineid gpu0_util": "Philly's utilisation of GPUs: its jobs are in cluster_job_log",
    "time_submit time_start time_end gres_used": "a Slurm log of MIT Supercloud: name its "
    "columns as sacct -P does",
    "vmid vmcreated vmdeleted": "an Azure trace of virtual machines, without GPUs",
    "timestamp contexttokens generatedtokens": "a trace of inference requests, not of jobs",
    "timestamp request_tokens response_tokens": "a trace of inference requests, not of jobs",
}
"""What a table is that has these columns, in small letters."""

_TEXTS: Final = {
    r"\s*jobid +\S+.*\n[ -]*-{3}": "sacct without -P: its columns are cut, use sacct -P",
    r"\s*\{\s*\"(?:meta|jobs)\"": "sacct --json: use sacct -P",
    r"\s*jobid +partition +name +user": "squeue, which has no ends of jobs: use sacct -P",
    r"\s*\[\s*\{[^\[]*\"(?:attempts|jobid)\"": "Philly's log: `optsched workload` reads it",
    r"; *(?:version|computer):|\s*([-.\d]+[ \t]+){17}[-\d]+\s*$": "SWF: use `optsched workload`",
    r"[^\t\n]+\t[^\t\n]*(?:\t[^\t\n]*){7,9}(?:\n|$)": "a Gavel trace, with steps and no "
    "durations: its throughput tables decide",
}
"""What a text is that begins like this, in small letters."""


def looks_like(text: str) -> str:
    """``"; this looks like ..."`` for the first lines of a known table of others, else ``""``."""
    text = text.lstrip("\ufeff")[:4000].lower()
    head = {
        cell.strip(' "').replace(" ", "_") for cell in re.split(r"[,|;\t]", text.split("\n")[0])
    }
    found = [what for columns, what in _TABLES.items() if head.issuperset(columns.split())]
    found += [what for begin, what in _TEXTS.items() if re.match(begin, text, re.M)]
    return f"; this looks like {found[0]}" if found else ""
