"""Figures that the Entropy paper prints (Sun & Huh, Appl. Sci. 2026, 16, 3725)."""

from __future__ import annotations

from typing import Final

HOURS: Final = ("JCT", "queue", "makespan", "P50", "P90", "P95", "P99", "max")
"""Columns of Tables 4 and 5 that we compare; the service time is JCT - queue."""

TABLES_4_AND_5: Final = {
    "FIFO": (10.12, 9.33, 20.00, 10.01, 17.06, 18.48, 19.82, 19.95),
    "SFJ": (9.83, 9.09, 18.68, 10.00, 17.87, 18.26, 18.55, 18.66),
    "Lucid": (7.46, 6.80, 17.27, 6.72, 14.26, 15.03, 16.44, 17.23),
    "Entropy": (5.69, 4.71, 14.56, 4.60, 11.05, 11.39, 13.13, 14.52),
}
"""50 jobs, 4 GPUs, hours."""

TABLE_7: Final = {
    "macro only": (3.32, 2.03, 8.61),
    "micro only": (4.17, 2.91, 10.04),
    "full": (2.39, 1.77, 6.77),
}
"""25 jobs, hours: JCT, queue, makespan."""

SIZES: Final = (64, 128, 256, 512, 1024)

TABLE_8: Final = {
    "FIFO": ((16832, 8358, 4172, 2102, 1083), (27683, 13890, 7101, 3751, 2087)),
    "SFJ": ((8263, 4465, 2567, 1448, 774), (21993, 11130, 5621, 2885, 1638)),
    "Lucid": ((8023, 4111, 2144, 1110, 593), (18759, 9535, 4837, 2588, 1324)),
    "Entropy": ((6679, 3355, 1686, 854, 444), (15035, 7637, 3806, 1939, 1085)),
}
"""2000 jobs on `SIZES` nodes, seconds: mean JCT, makespan."""

STATEMENT: Final = """\
* The paper gives no step times. Ours are scaled to its mean service of .79 h on two GPUs, and the
  speed-up to its own service times: agreement is consistency with these, not validation.
* FIFO keeps 4 GPUs 98.8 % busy if every job takes 2, so no *order* of the same work can end more
  than about 1 % earlier. The Entropy row's -27 % is less GPU time per job: smaller quotas, or less
  work. Elastic FIFO, which knows nothing of learning, has more than that.
* The Entropy row above is a fit with three free knobs (c, a factor on work, errors of estimates),
  and its order is by score *per remaining time*: the printed score, without the time, cannot rank
  jobs that never ran.
* Not reproducible: the SFJ row (it is not shortest-first: JCT/makespan is .53) and the Lucid row
  (estimates and packing table unknown; with constant pair speeds a Lucid-like policy has a *lower*
  mean JCT than the paper's Entropy row); Table 6; the order of Table 8; the absolute numbers of
  Table 7, whose "full" halves the service time although the text of Table 4 says that micro control
  lengthens it, and which uses a J9 that is defined nowhere.
* Table 8's makespans fit A/n + B with another A for every policy: another amount of work for the
  same 2000 jobs, which no order can produce.
* The micro factor is a number put in here: none (1.00), and the one that Table 7 would need. Really
  training shows no effect (docs/results/elastic.md).
* The paper prints N = g rho (12) samples a pass. Then a job on one GPU is done after half the
  training that it has on two, and any policy of small quotas looks twice as good, one that knows
  nothing of learning too. Here a pass is all samples at any quota, except in the rows marked (12).
* Table 2 prints counts, which are ours too, and priorities 1 to 3. Which job has which is not in
  what we have of the paper. Its scores and quotas (28)-(31) do not contain them; nor do our
  policies, except `priority`."""
