"""Two agents of torchrun: one is killed and comes back; the weights stay those of one process."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")
import cli_script
import torch
from program import PATIENCE
from safetensors.torch import load_file

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 60
SCRIPT = """
import time
from cli_script import trainer

def slowly(job, iteration, x):
    time.sleep(0.03)
    return x

def make():
    return trainer(slowly, jobs=2)
"""


def until(condition: Callable[[], object]) -> None:
    """Wait for a condition."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.slow
def test_an_agent_is_killed_and_comes_back(tmp_path: Path) -> None:
    """Its rank ends with it, both start again from the last checkpoint; no bit differs."""
    (tmp_path / "slow.py").write_text(SCRIPT)
    shutil.copy(Path(__file__).with_name("cli_script.py"), tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    run = "from optsched.cli import main; main()"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1",
        "--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}",
        "--local-addr=127.0.0.1", "--no-python", sys.executable, "-c", run,
        "arraypipe", "run", "slow.py:make", "--checkpoint", "ckpt", "--every", "5", "--resume",
        "--steps", str(STEPS), "--quiet",
    ]  # fmt: skip
    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def agent() -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip

    first, second = agent(), agent()
    until(lambda: _listens(first.pid, port) or _listens(second.pid, port))
    kept, lost = (first, second) if _listens(first.pid, port) else (second, first)
    job = tmp_path / "ckpt" / "job0"
    until(lambda: job.is_dir() and any(int(p.name) >= 10 for p in job.glob("[0-9]*")))
    lost.send_signal(signal.SIGKILL)
    lost.wait()
    back = agent()
    outputs = [one.communicate(timeout=PATIENCE)[0] for one in (kept, back)]
    assert (kept.returncode, back.returncode) == (0, 0), outputs
    assert "failed: the connection to rank" in outputs[0]
    made = cli_script.trainer(jobs=2)
    for j in range(2):
        alone = made.train_alone(j, STEPS).parameters
        files = (tmp_path / "ckpt" / f"job{j}" / str(STEPS)).glob("*.safetensors")
        found = {key: value for file in files for key, value in load_file(file).items()}
        assert found.keys() == alone.keys()
        assert all(torch.equal(found[key], alone[key]) for key in alone)


def _listens(pid: int, port: int) -> bool:
    """Whether a process listens at a port."""
    rows = [row.split() for row in Path(f"/proc/{pid}/net/tcp6").read_text().splitlines()[1:]]
    rows += [row.split() for row in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    sockets = {f"socket:[{row[9]}]" for row in rows if row[1].endswith(f":{port:04X}")}
    return any(os.readlink(link) in sockets for link in Path(f"/proc/{pid}/fd").iterdir())
