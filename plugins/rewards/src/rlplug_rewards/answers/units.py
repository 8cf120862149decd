"""Units: what stands behind a number, as a dimension with a factor, or as the words of what is counted.

Two units are the same where both are known and have one dimension (``500 cm`` is ``5 m``), or share a word (``5 red
balls``, ``5 balls``). A number without a unit goes with any.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

Dimension = frozenset[tuple[str, int]]


@dataclass(frozen=True)
class Unit:
    """A unit.

    Attributes:
        dimension: Powers of base units; empty for words.
        factor: Size in base units.
        words: Words of what is counted, in the singular.
        modulus: The modulus of a residue, ``7`` of ``3 \\pmod 7``.
    """

    dimension: Dimension = frozenset()
    factor: Fraction = Fraction(1)
    words: frozenset[str] = frozenset()
    modulus: int | None = None


def _table() -> dict[str, tuple[str, int, Fraction]]:
    """Return base unit, power and factor by name. Names of one letter are told from symbols by where they stand."""
    rows = """
    m metre metres meter meters = m 1 1; km kilometer kilometers kilometre kilometres = m 1 1000
    cm centimeter centimeters centimetre centimetres = m 1 1/100
    mm millimeter millimeters millimetre millimetres = m 1 1/1000; nm nanometer nanometers = m 1 1/1000000000
    dm decimeter decimeters = m 1 1/10; inch inches in = m 1 254/10000; ft foot feet = m 1 3048/10000
    yd yds yard yards = m 1 9144/10000; mi mile miles = m 1 1609344/1000; s sec secs second seconds = s 1 1
    ms millisecond milliseconds = s 1 1/1000; min mins minute minutes = s 1 60; h hr hrs hour hours = s 1 3600
    day days = s 1 86400; week weeks = s 1 604800; month months = month 1 1; year years yr yrs = month 1 12
    decade decades = month 1 120; century centuries = month 1 1200; g gram grams = g 1 1
    kg kilogram kilograms kilo kilos = g 1 1000; mg milligram milligrams = g 1 1/1000
    ton tons tonne tonnes = g 1 1000000; lb lbs pound pounds = lb 1 1; oz ounce ounces = lb 1 1/16
    L l liter liters litre litres = m 3 1/1000; mL ml milliliter milliliters millilitre = m 3 1/1000000
    cc = m 3 1/1000000; gallon gallons gal = gal 1 1; quart quarts qt = gal 1 1/4; pint pints = gal 1 1/8
    cup cups = gal 1 1/16; acre acres = m 2 40468564224/10000000; hectare hectares ha = m 2 10000
    dollar dollars usd bucks = usd 1 1; cent cents ¢ = usd 1 1/100; dime dimes = usd 1 1/10
    nickel nickels = usd 1 1/20; quarter quarters = usd 1 1/4; euro euros eur = eur 1 1; gbp sterling = gbp 1 1
    yen jpy = jpy 1 1; rupee rupees inr rs = inr 1 1; yuan rmb cny = cny 1 1; peso pesos = peso 1 1; won = krw 1 1
    deg degree degrees = deg 1 1; rad radian radians rads = rad 1 1; arcmin arcminute arcminutes = deg 1 1/60
    N newton newtons = newton 1 1; J joule joules = joule 1 1; kJ kilojoule kilojoules = joule 1 1000
    W watt watts = watt 1 1; kW kilowatt kilowatts = watt 1 1000; MW megawatt megawatts = watt 1 1000000
    kWh = joule 1 3600000; cal calorie calories = calorie 1 1; kcal = calorie 1 1000; eV = ev 1 1; keV = ev 1 1000
    MeV = ev 1 1000000; V volt volts = volt 1 1; mV = volt 1 1/1000; kV = volt 1 1000
    A amp amps ampere amperes = ampere 1 1; mA = ampere 1 1/1000; ohm ohms = ohm 1 1
    C coulomb coulombs = coulomb 1 1; Hz hertz = hertz 1 1; kHz = hertz 1 1000; MHz = hertz 1 1000000
    GHz = hertz 1 1000000000; Pa pascal pascals = pascal 1 1; kPa = pascal 1 1000; MPa = pascal 1 1000000
    atm = atm 1 1; bar = pascal 1 100000; K kelvin kelvins = kelvin 1 1; celsius = celsius 1 1
    fahrenheit = fahrenheit 1 1; mol mole moles = mol 1 1; mmol = mol 1 1/1000; M molar = molar 1 1
    T tesla = tesla 1 1; F farad farads = farad 1 1; bit bits = bit 1 1; byte bytes = bit 1 8; kb KB = bit 1 8000
    MB = bit 1 8000000; GB = bit 1 8000000000
    """
    table: dict[str, tuple[str, int, Fraction]] = {}
    for row in re.split(r"[;\n]", rows):
        names, _, meaning = row.partition("=")
        if meaning:
            base, count, factor = meaning.split()
            table |= {name: (base, int(count), Fraction(factor)) for name in names.split()}
    return table


KNOWN: Final = _table()
RATES: Final = {
    "mph": ("mi", "h"),
    "kph": ("km", "h"),
    "kmh": ("km", "h"),
    "kmph": ("km", "h"),
    "rpm": ("revolution", "min"),
    "fps": ("ft", "s"),
    "mps": ("m", "s"),
}
CURRENCIES: Final = {"$": "dollar", "€": "euro", "£": "gbp", "¥": "yen", "₹": "rupee", "₩": "won", "¢": "cent"}
REFUSED: Final = frozenset(
    {
        *("or", "and", "not", "than", "to", "if", "then", "when", "squared", "cubed", "factorial", "times"),
        *("plus", "minus", "over", "half", "halves", "thirds", "negative", "base", "mod", "is", "are", "be"),
        *("was", "equals", "equal", "remainder", "either", "neither", "nor", "but", "except", "because", "so"),
        *("since", "while", "sqrt", "sin", "cos", "tan", "log", "ln", "pi", "infinity", "x", "y", "z", "versus"),
        *("vs", "with", "without", "wait", "no", "wrong", "incorrect", "below", "under", "above", "less"),
        *("fewer", "short", "off", "ago", "before", "after", "past", "until", "from", "deep", "choose", "again"),
        *("has", "have", "had", "remains", "holds", "fails", "works", "follows", "suffices"),
    }
)
IGNORED: Final = frozenset(
    {
        *("a", "an", "the", "of", "in", "total", "altogether", "each", "every", "all", "more", "different"),
        *("possible", "ways", "way", "only", "left", "remaining", "other", "total:", "value", "ones", "one"),
        *("it", "its"),
    }
)
COUNTING: Final = frozenset(
    {
        *("ways", "way", "times", "total", "units", "unit", "items", "item", "things", "thing", "solutions"),
        *("solution", "values", "pieces"),
    }
)
TOKEN: Final = re.compile(
    r"\s*(?:([A-Za-z¢Ω]+)\s*(?:\^\s*\{?\s*(-?\d)\s*\}?)?|(/|\*|\\cdot|\\times|-|\.(?=\s|$))|(\()|(\)))"
)
SQUARES: Final = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}


def read_unit(text: str) -> Unit | None:
    """Return the unit that a text behind a number is, or ``None`` where it is none.

    Args:
        text: Such as ``km/h``, ``square meters``, ``dollars per day``, ``m^2`` or ``red balls``.
    """
    text = (
        text.replace("«", " ")
        .replace("»", " ")
        .replace(r"\deg", " degrees ")
        .replace(r"\Omega", " ohm ")
        .replace(r"\mu", " micro")
    )
    text = re.sub(r"[.,;:!]+\s*$", "", text.strip())
    text = re.sub(r"^ms(?=\s*\^\s*\{?\s*-)", "m s", text)  # no milliseconds
    text = re.sub(r"(?<![A-Za-z])(units?)\s*\^\s*\{?[23]\}?$", r"\1", text)
    text = re.sub(r"degrees\s+(?:C\b|[Cc]elsius)", "celsius", text)
    text = re.sub(r"degrees\s+(?:F\b|[Ff]ahrenheit)", "fahrenheit", text)
    if not text or len(text) > 60 or re.search(r"\d", re.sub(r"\^\s*\{?\s*-?\d\s*\}?", "", text)):
        return None
    return _known(text) or _counted(text)


def _known(text: str) -> Unit | None:
    powers: Counter[str] = Counter()
    factor, sign, square, at = Fraction(1), 1, 1, 0
    found = False
    while at < len(text):
        match = TOKEN.match(text, at)
        if match is None:
            return None
        at = match.end()
        word = match[1]
        if word is None:
            sign = -1 if match[3] == "/" else sign
            continue
        if word.lower() in ("per", "an", "a", "each", "of"):
            if word.lower() == "of":
                return None
            sign = -1
        elif word.lower() in SQUARES:
            square = SQUARES[word.lower()]
        elif word.lower() in RATES and RATES[word.lower()][0] in KNOWN:
            for name, power in zip(RATES[word.lower()], (1, -1), strict=True):
                base, count, size = KNOWN[name]
                powers[base] += power * count
                factor *= size**power
            found = True
        else:
            known = KNOWN.get(word) or KNOWN.get(word.lower() if len(word) > 1 else word)
            if known is None:
                return None
            base, count, size = known
            power = sign * square * int(match[2] or 1)
            powers[base] += power * count
            factor *= size**power
            square, found = 1, True
    if not found:
        return None
    return Unit(frozenset((base, power) for base, power in powers.items() if power), factor)


def _counted(text: str) -> Unit | None:
    if not re.fullmatch(r"[A-Za-z][A-Za-z\s'/.()-]*", text):
        return None
    words = [word for word in re.split(r"[^A-Za-z']+", text.lower()) if word]
    if not words or len(words) > 5 or any(word in REFUSED for word in words) or (len(words) == 1 and len(words[0]) < 3):
        return None
    return Unit(words=frozenset(_singular(word) for word in words if word not in IGNORED))


def _singular(word: str) -> str:
    irregular = {
        "people": "person",
        "persons": "person",
        "children": "child",
        "men": "man",
        "women": "woman",
        "feet": "foot",
        "mice": "mouse",
    }
    if word in irregular:
        return irregular[word]
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith(("ches", "shes", "xes", "sses")):
        return word[:-2]
    return word[:-1] if word.endswith("s") and not word.endswith("ss") and len(word) > 3 else word


def same_kind(one: Unit | None, other: Unit | None) -> bool:
    """Return whether numbers with these units can be compared."""
    if one is None or other is None:
        return True
    if one.modulus != other.modulus:
        return False
    if one.dimension and other.dimension:
        return one.dimension == other.dimension
    if one.dimension or other.dimension:
        words = one.words or other.words
        return not words or words <= COUNTING
    ignored = {_singular(word) for word in COUNTING}
    left, right = one.words - ignored, other.words - ignored
    return not left or not right or bool(left & right)
