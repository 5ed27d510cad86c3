"""A profile as people read it: medians with their spread, and what cannot be trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optsched.arraypipe.profile.document import NOISY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.arraypipe.profile.document import BlockEntry, Profile


def table(profile: Profile) -> str:
    """Plain text; a time is the median, behind it IQR over median, ``!`` where that is too much."""
    device = profile.device
    counts = sorted({block.n for block in profile.blocks})
    repeats = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    lines = [
        f"{device.name} ({device.kind}), {device.threads} threads, torch {device.torch}, "
        f"{device.date}",
        f"medians of {repeats} repeats; behind them interquartile range / median",
        "",
        *_aligned(["stage", "dtype", "size", "F", "B", "R", "kept", "output"], _blocks(profile)),
        "",
        *_aligned(["stage", "dtype", "optimizer", "U"], _updates(profile)),
        "",
        *(
            f"{name}: {_bytes(link.bandwidth)}/s + {_time(link.latency_ns)}"
            for name, link in (
                ("device to device", profile.links.activation),
                ("host to device", profile.links.host),
            )
        ),
    ]
    if (error := profile.fit_error) is not None:
        lines.append(f"sizes left out are predicted within {error:.1%}")
    if device.block_overhead_ns:
        lines.append(f"every block costs {_time(device.block_overhead_ns)} beside its computation")
    if noisy := len(profile.noisy()):
        lines.append(f"! {noisy} of {len(profile.blocks)} cases scatter by more than {NOISY:.0%}")
    if bound := sum(block.launch_bound for block in profile.blocks):
        lines.append(
            f"{bound} of {len(profile.blocks)} blocks take no longer on the GPU than the host "
            "needs to launch them: larger micro-batches or fewer stages"
        )
    return "\n".join(lines)


def _blocks(profile: Profile) -> list[list[str]]:
    timed: dict[tuple[str, int, str, int], BlockEntry] = {
        (b.kind, b.stage, b.dtype, b.batch): b for b in profile.blocks
    }
    output = {(e.stage, e.dtype, e.batch): e.bytes for e in profile.boundaries}
    return [
        [
            f"{e.stage} {profile.stages[e.stage].name}",
            e.dtype,
            str(e.batch),
            *(_spread(timed[kind, e.stage, e.dtype, e.batch]) for kind in "FBR"),
            _bytes(e.bytes),
            _bytes(output[e.stage, e.dtype, e.batch]),
        ]
        for e in sorted(profile.saved, key=lambda e: (e.stage, e.dtype, e.batch))
    ]


def _updates(profile: Profile) -> list[list[str]]:
    return [
        [
            f"{b.stage} {profile.stages[b.stage].name}",
            b.dtype,
            profile.jobs[b.job].optimizer or "-",
            _spread(b),
        ]
        for b in profile.blocks
        if b.kind == "U"
    ]


def _spread(block: BlockEntry) -> str:
    mark = "!" if block.noisy else ""
    return f"{_time(block.median_ns)} {block.iqr_ns / block.median_ns:4.0%}{mark}"


def _time(ns: int) -> str:
    """Three or more digits of a readable unit."""
    for unit, size in (("s", 10**9), ("ms", 10**6), ("us", 10**3)):
        if ns >= size:
            return f"{ns / size:.{max(0, 3 - len(str(ns // size)))}f} {unit}"
    return f"{ns} ns"


def _bytes(count: int) -> str:
    from optsched.io.text import bytes_text

    return bytes_text(count)


def _aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns side by side: words to the left, numbers to the right."""
    widths = [max(len(row[c]) for row in [head, *rows]) for c in range(len(head))]
    words = {"stage", "dtype", "optimizer"}
    return [
        "  ".join(
            cell.ljust(width) if name in words else cell.rjust(width)
            for name, cell, width in zip(head, row, widths, strict=True)
        ).rstrip()
        for row in [head, *rows]
    ]
