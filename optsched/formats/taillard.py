"""Taillard's job shops: his two text layouts, and his generator with the seeds of ta01-ta80.

E. Taillard, Benchmarks for basic scheduling problems, EJOR 64 (1993) 278-285.
"""

from __future__ import annotations

from typing import Final

from optsched.errors import InputError
from optsched.formats.registry import Reader
from optsched.formats.standard import ShopText, layout, refuse_windows
from optsched.io.values import did_you_mean, format_value, integer
from optsched.problems.jobshop.document import shop_of
from optsched.problems.jobshop.flexible import marked
from optsched.problems.jobshop.problem import JobShop

TITLE: Final = (
    "nb of jobs", "nb of machines", "time seed", "machine seed", "upper bound", "lower bound",
)  # fmt: skip
_FACTS: Final = ("time_seed", "machine_seed", "upper_bound", "lower_bound")
_MODULUS: Final = 2**31 - 1
_MAX_OPERATIONS: Final = 10_000_000

_SIZES: Final = ((15, 15), (20, 15), (20, 20), (30, 15), (30, 20), (50, 15), (50, 20), (100, 20))
_SEEDS: Final = """
840612802/398197754 1314640371/386720536 1227221349/316176388 342269428/1806358582
1603221416/1501949241 1357584978/1734077082 44531661/1374316395 302545136/2092186050
1153780144/1393392374 73896786/1544979948
533484900/317419073 1894307698/1474268163 874340513/509669280 1124986343/1209573668
1463788335/529048107 1056908795/25321885 195672285/1717580117 961965583/1353003786
1610169733/1734469503 532794656/998486810
1035939303/773961798 5997802/1872541150 1357503601/722225039 806159563/1166962073
1902815253/1879990068 1503184031/1850351876 1032645967/99711329 229894219/1158117804
823349822/108033225 1297900341/489486403
98640593/1981283465 1839268120/248890888 573875290/2081512253 1670898570/788294565
1118914567/1074349202 178750207/294279708 1549372605/596993084 798174738/151685779
553410952/1329272528 1661531649/1173386294
1841414609/1357882888 2116959593/1546338557 796392706/1230864158 532496463/254174057
2020525633/978943053 524444252/185526083 1569394691/487269855 1460267840/1631446539
198324822/1937476577 38071822/1541985579
17271/718939 660481279/449650254 352229765/949737911 1197518780/166840558 1376020303/483922052
2106639239/955932362 1765352082/1209982549 1105092880/1349003108 907248070/919544535
2011630757/1845447001
8493988/2738939 1991925010/709517751 342093237/786960785 1634043183/973178279
341706507/286513148 320167954/1411193018 1089696753/298068750 433032965/1589656152
615974477/331205412 236150141/592292984
302034063/1203569070 1437643198/1692025209 1792475497/1039908559 1647273132/1012841433
696480901/1689682358 1785569423/1092647459 117806902/739059626 1639154709/1319962509
2007423389/749368241 682761130/262763021
"""


class Lehmer:
    """The generator x <- 16807 x mod (2^31 - 1) of Lewis, Goodman & Miller, in exact integers."""

    def __init__(self, seed: int, place: str = "seed") -> None:
        self.state = integer(place, seed, 1, _MODULUS - 1)

    def uniform(self, low: int, high: int) -> int:
        """The next integer, uniform in low..high (Taillard 1993, U[a, b])."""
        self.state = 16807 * self.state % _MODULUS
        return low + self.state * (high - low + 1) // _MODULUS


def instance(name: str) -> JobShop:
    """One of ta01 to ta80, generated from its published seeds.

    Raises
    ------
    InputError
        Unknown name.
    """
    names = [f"ta{i:02d}" for i in range(1, 81)]
    if name not in names:
        hint = did_you_mean(str(name)[:20].lower(), names)
        raise InputError(f"there is no instance {format_value(name)}: expected ta01 to ta80{hint}")
    index = names.index(name)
    time_seed, machine_seed = map(int, _SEEDS.split()[index].split("/"))
    return generate(*_SIZES[index // 10], time_seed, machine_seed, name)


def generate(
    jobs: int, machines: int, time_seed: int, machine_seed: int, name: str = ""
) -> JobShop:
    """A random shop: durations uniform in 1..99, every job a random order of all machines.

    Parameters
    ----------
    jobs, machines
        Sizes, >= 1.
    time_seed, machine_seed
        Seeds of the two streams, 1 .. 2^31 - 2.
    name
        Name of the instance.
    """
    n = integer("jobs", jobs, 1, _MAX_OPERATIONS)
    m = integer("machines", machines, 1, _MAX_OPERATIONS)
    if n * m > _MAX_OPERATIONS:
        raise InputError(f"jobs x machines: expected at most {_MAX_OPERATIONS}, got {n * m}")
    times, places = Lehmer(time_seed, "time_seed"), Lehmer(machine_seed, "machine_seed")
    durations = [[times.uniform(1, 99) for _ in range(m)] for _ in range(n)]
    rows = []
    for _ in range(n):
        row = list(range(m))
        for i in range(m):
            other = places.uniform(i, m - 1)
            row[i], row[other] = row[other], row[i]
        rows.append(row)
    chains = [list(zip(r, d, strict=True)) for r, d in zip(rows, durations, strict=True)]
    seeds = {"time_seed": int(time_seed), "machine_seed": int(machine_seed)}
    return JobShop(chains, [f"m{k}" for k in range(m)], name=name, metadata=seeds)


def from_text(text: str, name: str) -> JobShop:
    """Read one instance; machines are numbered from 1 in both layouts.

    Long layout: a title line of six names, six integers, ``Times``, n rows of m, ``Machines``, n
    rows of m; its seeds and bounds become `JobShop.metadata`. Short layout: ``n m``, then n rows
    of m durations and n rows of m machines.

    Raises
    ------
    InputError
        With ``file:line`` and the expected and found count, value or range.
    """
    lines = ShopText(text, name)
    facts: dict[str, int] | None = None
    titled = lines.line[0].isalpha()
    if titled:
        n, m, facts = _title(lines)
    else:
        n, m = lines.sizes()

    def wide(values: list[int], what: str) -> list[int]:
        if len(values) != m:
            lines.fail(f"expected {m} {what}, one a machine, got {len(values)}")
        return values

    def durations(values: list[int]) -> list[int]:
        lines.check_durations(wide(values, "durations"))
        return values

    def machines(values: list[int]) -> list[int]:
        lines.check_machines(wide(values, "machines"), 1, m, once=True)
        return [k - 1 for k in values]

    rows = []
    for word, row in (("Times", durations), ("Machines", machines)):
        if titled and lines.line.lower() != word.lower():
            got = format_value(lines.line) if lines.line else "the end of the file"
            lines.fail(f'expected the line "{word}", got {got}')
        lines.at += titled
        rows.append(lines.rows(n, row.__name__, row))
    jobs = [list(zip(k, p, strict=True)) for p, k in zip(*rows, strict=True)]
    return lines.shop(jobs, m, facts)


def to_text(shop: JobShop) -> str:
    """The long layout if the metadata hold both seeds and both bounds, else the short one.

    Raises
    ------
    InputError
        The shop has windows, or a job that does not visit every machine exactly once.
    """
    refuse_windows(shop, "taillard")
    if not shop.visits_every_machine_once:
        raise InputError(
            "the taillard format needs every job to visit every machine once: write it as json"
        )
    size = (shop.n_jobs, shop.n_machines)
    times = [" ".join(map(str, row)) for row in shop.duration.reshape(size).tolist()]
    places = [" ".join(map(str, row)) for row in (shop.machine.reshape(size) + 1).tolist()]
    facts = [shop.metadata.get(key) for key in _FACTS]
    if all(type(fact) is int and fact >= 0 for fact in facts):
        title = "Nb of jobs, Nb of Machines, Time seed, Machine seed, Upper bound, Lower bound"
        head = [title, " ".join(map(str, (*size, *facts))), "Times"]
        rows = [*head, *times, "Machines", *places]
    else:
        rows = [f"{size[0]} {size[1]}", *times, *places]
    return marked("\n".join(rows) + "\n")


def _title(lines: ShopText) -> tuple[int, int, dict[str, int]]:
    names = tuple(" ".join(part.lower().split()) for part in lines.line.split(","))
    if names != TITLE:
        other = names[0] == "number of jobs"
        known = "; this looks like a flow shop or an open shop, which are not supported" * other
        title = ", ".join(TITLE)
        lines.fail(f'expected the title "{title}", got {format_value(lines.line)}{known}')
    lines.at += 1
    if not lines.line:
        lines.fail("expected six numbers after the title, got nothing")
    values = lines.numbers()
    if len(values) != 6:
        lines.fail(f"expected six numbers ({', '.join(TITLE)}), got {len(values)}")
    for what, value, low in zip(TITLE, values, (1, 1, 0, 0, 0, 0), strict=True):
        if value < low:
            lines.fail(f"{what}: expected an integer >= {low}, got {value}")
    lines.at += 1
    return values[0], values[1], dict(zip(_FACTS, values[2:], strict=True))


READER = Reader(
    "taillard",
    recognises=lambda source: layout(source) == "taillard",
    read=lambda source: from_text(source.text, source.file),
    write=lambda problem: to_text(shop_of(problem)),
)
