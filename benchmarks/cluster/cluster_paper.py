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
