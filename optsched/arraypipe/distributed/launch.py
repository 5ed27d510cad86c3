"""The processes of a run on this machine: started as `torchrun` would, and ended together."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NoReturn

from optsched.arraypipe.cli.script import need_torch
from optsched.errors import InputError, MissingExtra, OptschedError, UnsupportedProblem

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


_LOOK_EVERY: Final = 0.2  # seconds
_PATIENCE: Final = 10.0  # seconds for the first rank to say why all end
_FAREWELL: Final = 3.0  # seconds for which the first rank keeps the store for the others
_WORD, _TOLD, _GONE = "failed", "told", "gone"


class RankGroup:
    """The process and its peers, as `torchrun` has started them; joins their process group.

    It is one of gloo; links between GPUs make groups of their own.

    Raises
    ------
    InputError
        The environment says nothing of ranks.
    """

    def __init__(self) -> None:
        need_torch()
        import torch.distributed as dist

        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            raise InputError(
                "there is no process group: start this with torchrun, or use "
                "optsched arraypipe run --backend process, which starts the processes itself"
            )
        if not dist.is_available():
            raise InputError("this torch has no torch.distributed; use the inline backend")
        from torch.distributed.distributed_c10d import PrefixStore
        from torch.distributed.rendezvous import rendezvous

        self.rank: int
        self.size: int
        store, self.rank, self.size = next(rendezvous("env://"))
        # a client of its own: one that waits for a key, as in a new group, answers nobody else
        self.store: Any = PrefixStore("optsched.run", next(rendezvous("env://"))[0])
        self._ending = threading.Lock()
        self._over = threading.Event()
        dist.init_process_group(
            "gloo",
            store=PrefixStore("optsched.group", store),
            rank=self.rank,
            world_size=self.size,
        )

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return not self.rank

    def check_size(self, devices: int) -> None:
        """Refuse a plan that has not one device for every process."""
        if self.size != devices:
            raise InputError(
                f"the schedule has {devices} devices, there are {self.size} processes: start one "
                f"per device (torchrun --nproc-per-node {devices} ...)"
            )

    def agreed(self, code: int) -> int:
        """The exit code of rank 0, on all ranks."""
        import torch.distributed as dist

        from optsched.arraypipe.distributed.transport import hearing

        codes = [code]
        with hearing():
            dist.broadcast_object_list(codes, 0)
        dist.destroy_process_group()
        return codes[0]

    @contextmanager
    def sharing_errors(self) -> Iterator[None]:
        """Run something; an error on any rank is said by rank 0, and ends all of them.

        SIGTERM, which schedulers of clusters send ahead, is taken for Ctrl-C.
        """
        with _terminated_gently():
            watch = threading.Thread(target=self._watch, daemon=True)
            watch.start()
            try:
                yield
                self._over.set()
                watch.join()  # a thread inside the store would not survive the interpreter's end
            except (InputError, UnsupportedProblem, MissingExtra) as error:
                self._end(2, f"error: {error}")
            except OptschedError as error:
                self._end(1, f"failed: {error}")
            except KeyboardInterrupt:
                self._end(130, "interrupted")
            except SystemExit as error:  # of the script: the others would not hear of it
                self._end(1, f"failed: the script ends the program ({error.code})")
            except Exception as error:
                self._end(1, f"failed: {type(error).__name__}: {error}")

    def _end(self, code: int, sentence: str) -> NoReturn:
        """Publish why; the first that does so is the one that counts."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):  # it ends anyway
                signal.signal(number, signal.SIG_IGN)
        line = " ".join(sentence.split())
        if not self.is_first:  # what is wrong everywhere rank 0 says as its own
            time.sleep(2 * _LOOK_EVERY)
        try:
            self.store.compare_set(_WORD, "", f"{code} {self.rank} {line}")
            self._tell_or_wait()
        except RuntimeError:  # the store has gone with its process
            _say(line)
            _leave(code)

    def _watch(self) -> None:
        """Look from time to time whether another rank has failed."""
        try:
            while not self._over.wait(_LOOK_EVERY):
                if self.store.check([_WORD]):
                    self._tell_or_wait()
        except RuntimeError:
            return  # who has lost the store hears of it by the loss of messages

    def _tell_or_wait(self) -> NoReturn:
        if not self._ending.acquire(blocking=False):  # the other thread is about to end all this
            time.sleep(2 * _PATIENCE)
        code, rank, line = self.store.get(_WORD).decode().split(" ", 2)
        if self.is_first:
            _say(line if rank == "0" else f"{line} (rank {rank})")
            self.store.set(_TOLD, "1")
            self._attend()
        else:
            until = time.monotonic() + _PATIENCE
            while not self.store.check([_TOLD]):
                if time.monotonic() > until:
                    _say(line)  # rank 0 cannot
                    break
                time.sleep(_LOOK_EVERY / 4)
            self.store.add(_GONE, 1)
        _leave(int(code))

    def _attend(self) -> None:
        """The first rank may keep the store: it stays while the others look why all end."""
        until = time.monotonic() + _FAREWELL
        while time.monotonic() < until and self.store.add(_GONE, 0) < self.size - 1:
            time.sleep(_LOOK_EVERY / 4)


@contextmanager
def _terminated_gently() -> Iterator[None]:
    """SIGTERM as Ctrl-C; only in the main thread, where Python takes signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _say(line: str) -> None:
    """One line on stderr, whatever it holds."""
    print("".join(c if c.isprintable() else "?" for c in line), file=sys.stderr, flush=True)


def _leave(code: int) -> NoReturn:
    """End at once: other threads may wait for messages that never come."""
    sys.stdout.flush()
    os._exit(code)


_LOOK_AT_CHILDREN: Final = 0.1  # seconds
_OTHERS_PATIENCE: Final = 20.0  # seconds for the others, when one has ended with an error


def launch(ranks: int, words: Sequence[str]) -> int:
    """Run ``python -m optsched.arraypipe.cli.run`` with these arguments on so many ranks.

    Ctrl-C and SIGTERM are passed on once to each; a second Ctrl-C ends them hard.

    Returns
    -------
    int
        0, or the exit code of the rank that failed first.
    """
    common = {
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),  # we say it
    }  # fmt: skip
    command = [sys.executable, "-m", "optsched.arraypipe.cli.run", *words]
    before = signal.signal(signal.SIGTERM, _as_interrupt)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            # a session of its own: Ctrl-C of the terminal reaches them through us, once
            processes.append(
                subprocess.Popen(
                    command, env={**os.environ, **common, **own}, start_new_session=True,
                    stdin=subprocess.DEVNULL,
                )
            )  # fmt: skip
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
                until = time.monotonic() + _OTHERS_PATIENCE
            if None in codes and time.monotonic() > until:
                how = f"signal {-failed}" if failed < 0 else f"exit code {failed}"
                print(f"failed: rank {first} has ended with {how}", file=sys.stderr, flush=True)
            if None not in codes or time.monotonic() > until:
                return 128 - failed if failed < 0 else failed
            time.sleep(_LOOK_AT_CHILDREN)
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            for process in processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)


def _as_interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
