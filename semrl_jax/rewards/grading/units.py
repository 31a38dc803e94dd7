"""Units of measurement after a number, and what one is worth: 5 km is 5000 m, and not 5 m."""

from __future__ import annotations

import functools
import re
from fractions import Fraction
from typing import NamedTuple

# dimension: names = worth of one; the plural in -s and other spellings of a name need no entry.
_TABLE = {
    "length": "mm millimeter 毫米 = 1/1000; cm centimeter 厘米 = 1/100; dm decimeter 分米 = 1/10; "
    "m meter 米 = 1; km kilometer 千米 公里 = 1000; in inch inches = 127/5000; "
    "ft foot feet = 381/1250; yd yard = 1143/1250; mi mile = 201168/125",
    "mass": "mg milligram = 1/1000000; g gram 克 = 1/1000; kg kilogram 千克 公斤 = 1; "
    "吨 tonne = 1000; "
    "lb lbs pound = 45359237/100000000; oz ounce = 45359237/1600000000",
    "time": "s sec second 秒 = 1; min minute 分钟 = 60; h hr hour 小时 = 3600; day 天 = 86400; "
    "week 周 = 604800",
    "years": "month 个月 = 1; year 年 = 12",
    "volume": "ml milliliter 毫升 = 1/1000; l liter 升 = 1",
    "angle": "degree 度 = 1; celsius = 1",
    "radians": "radian rad = 1",
    "fahrenheit": "fahrenheit = 1",
    "dollars": "dollar usd buck = 1; cent ¢ = 1/100",
    "yuan": "yuan rmb cny 元 = 1; jiao 角 = 1/10",
    "euros": "euro eur = 1",
    "pounds sterling": "gbp = 1",
    "rupees": "rupee rs inr = 1",
}  # fmt: skip
_PREFIXES = {"square": 2, "sq": 2, "平方": 2, "cubic": 3, "cu": 3, "立方": 3}
_PREFIX = re.compile(rf"({'|'.join(_PREFIXES)})\.?\s*(?=\S)")
_POWER = re.compile(r"\s*\^\s*\{?\s*(-?[1-3])\s*\}?$|\s+(squared|cubed)$")
_PER = re.compile(r"\s*/\s*|\s+per\s+|\bp(?=h\b)")
_SPELLINGS = ((r"\\(?:text|mathrm)|[{}~\\]", " "), ("metre", "meter"), ("litre", "liter"))


class Worth(NamedTuple):
    """What a unit measures, such as (("length", 1), ("time", -1)), and how much one of it is."""

    dimensions: tuple[tuple[str, int], ...]
    size: Fraction


@functools.lru_cache(maxsize=1024)
def worth(unit: str) -> Worth | None:
    """The worth of a unit such as `cm`, `square feet`, `km/h`; None if it is not known."""
    for pattern, plain in _SPELLINGS:
        unit = re.sub(pattern, plain, unit)
    unit = unit.replace("mph", "mi/h").strip(" .")
    dimensions: dict[str, int] = {}
    size = Fraction(1)
    for index, part in enumerate(_PER.split(unit)):
        name, power = part.strip(), 1
        if prefix := _PREFIX.match(name):
            name, power = name[prefix.end() :], _PREFIXES[prefix[1]]
        if found := _POWER.search(name):
            name = name[: found.start()]
            power *= int(found[1]) if found[1] else {"squared": 2, "cubed": 3}[found[2]]
        known = _names().get(name) or _names().get(name.casefold().removesuffix("s"))
        known = known or _names().get(name.casefold())
        if known is None:
            return None
        power = -power if index else power
        dimensions[known[0]] = dimensions.get(known[0], 0) + power
        size *= known[1] ** power
    return Worth(tuple(sorted(dimensions.items())), size)


@functools.cache
def _names() -> dict[str, tuple[str, Fraction]]:
    return {
        name: (dimension, Fraction(size.strip()))
        for dimension, entries in _TABLE.items()
        for names, size in (entry.split("=") for entry in entries.split(";"))
        for name in names.split()
    }
