"""Starts the ranks of a run on this machine, as `torchrun` would, and ends them together.

`torch.distributed.run` itself takes longer to start, and says what a rank has said once more, with
tracebacks of its own and another exit code; after Ctrl-C too.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence


_LOOK_S: Final = 0.1  # between two looks at the processes
_PATIENCE_S: Final = 20.0  # for the others, when one has ended with an error


def launch(ranks: int, command: Sequence[str]) -> int:
    """Run a command on so many ranks; 0, or the exit code of the one that failed first.

    Ctrl-C and SIGTERM are passed on once to each; a second Ctrl-C ends them hard.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),  # we say it
    }  # fmt: skip
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            env = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            # a session of its own: Ctrl-C of the terminal reaches them through us, once
            process = subprocess.Popen(
                command, env=env, start_new_session=True, stdin=subprocess.DEVNULL
            )
            processes.append(process)
        return _attend(processes)
    finally:
        signal.signal(signal.SIGTERM, before)
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def _attend(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for all; when one has failed the others get a while to end by themselves."""
    interrupted, failed, until, first = False, 0, float("inf"), 0
    while True:
        try:
            codes = [process.poll() for process in processes]
            if not failed and any(codes):
                first, failed = next((rank, code) for rank, code in enumerate(codes) if code)
                until = time.monotonic() + _PATIENCE_S
            if None in codes and time.monotonic() > until:
                how = f"signal {-failed}" if failed < 0 else f"exit code {failed}"
                print(f"failed: rank {first} has ended with {how}", file=sys.stderr, flush=True)
            if None not in codes or time.monotonic() > until:
                return 128 - failed if failed < 0 else failed
            time.sleep(_LOOK_S)
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            for process in processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)
