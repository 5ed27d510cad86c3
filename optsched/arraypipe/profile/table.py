"""A profile as people read it: medians with their spread, and what cannot be trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optsched.arraypipe.profile.document import NOISY
from optsched.io.text import aligned, bytes_text, duration

if TYPE_CHECKING:
    from optsched.arraypipe.profile.document import Profile, Times


def table(profile: Profile) -> str:
    """Plain text; a time is the median, behind it IQR over median, ``!`` where that is too much."""
    device, stages = profile.device, profile.stages
    times = [one for _, one in profile.cases()]
    least, most = min(t.n for t in times), max(t.n for t in times)
    repeats = f"{least} to {most}" if least < most else str(least)
    blocks = [
        [
            f"{b.stage} {stages[b.stage].name}", b.dtype, str(b.batch), _spread(b.forward),
            _spread(b.backward), _spread(b.recompute), bytes_text(b.saved_bytes),
            bytes_text(b.output_bytes),
        ]
        for b in sorted(profile.blocks, key=lambda b: (b.stage, b.dtype, b.batch))
    ]  # fmt: skip
    updates = [
        [f"{u.stage} {stages[u.stage].name}", u.dtype, u.optimizer or "-", _spread(u)]
        for u in profile.updates
    ]
    lines = [
        f"{device.name} ({device.kind}), {device.threads} threads, torch {device.torch}, "
        f"{device.date}",
        f"medians of {repeats} repeats; behind them interquartile range / median",
        "",
        *aligned([["stage", "dtype", "size", "F", "B", "R", "kept", "output"], *blocks], left=2),
        "",
        *aligned([["stage", "dtype", "optimizer", "U"], *updates], left=3),
        "",
    ]
    links = {"device to device": profile.links.activation, "host to device": profile.links.host}
    for name, link in links.items():
        lines.append(f"{name}: {bytes_text(link.bandwidth)}/s + {duration(link.latency_ns)}")
    if (error := profile.fit_error) is not None:
        lines.append(f"sizes left out are predicted within {error:.1%}")
    if device.block_overhead_ns:
        lines.append(
            f"every block costs {duration(device.block_overhead_ns)} beside its computation"
        )
    if noisy := sum(t.noisy for t in times):
        lines.append(f"! {noisy} of {len(times)} cases scatter by more than {NOISY:.0%}")
    # the GPU may have waited for the host, so that the time is that of the launch
    if bound := sum(1.3 * t.launch_ns > t.median_ns for t in times):
        lines.append(
            f"{bound} of {len(times)} blocks take no longer on the GPU than the host "
            "needs to launch them: larger micro-batches or fewer stages"
        )
    return "\n".join(lines)


def _spread(times: Times) -> str:
    return f"{duration(times.median_ns)} {times.spread:4.0%}{'!' * times.noisy}"
