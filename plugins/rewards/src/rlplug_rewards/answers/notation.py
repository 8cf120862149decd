r"""One notation for LaTeX, Unicode and plain text, in which answers are read.

Text in LaTeX (``\text{cm}``) becomes ``«cm»``, braces of sets ``⦃`` and ``⦄``, ``\,`` a thin space until numerals are
joined, and a dollar sign that is left is a currency.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from typing import Final

from rlplug_rewards.answers.calls import NAMES, in_one_notation

THIN: Final = "\u2009"
SUPERSCRIPTS: Final = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱˣʸ", "0123456789+-()nixy")
SUBSCRIPTS: Final = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋ₙₓ", "0123456789+-nx")
CHARACTERS: Final = {
    **dict.fromkeys("−–—‐‑‒﹣－", "-"),
    **dict.fromkeys("\u00a0\u2002\u2003\u2004\u2005\u2007\u2008\u3000", " "),
    **dict.fromkeys("\u2009\u200a\u202f", THIN),
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u200e\u200f", ""),
    **dict.fromkeys("’‘′", "'"),
    **dict.fromkeys("“”″", '"'),
    "×": r"\times ",
    "·": r"\cdot ",
    "⋅": r"\cdot ",
    "•": r"\cdot ",
    "∙": r"\cdot ",
    "∗": "*",
    "÷": "/",
    "⁄": "/",
    "∕": "/",
    "≤": r"\le ",
    "⩽": r"\le ",
    "≦": r"\le ",
    "≥": r"\ge ",
    "⩾": r"\ge ",
    "≧": r"\ge ",
    "≠": r"\ne ",
    "≈": r"\approx ",
    "∞": r"\infty ",
    "∑": r"\sum ",
    "∏": r"\prod ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∈": r"\in ",
    "∅": r"\emptyset ",
    "Ø": r"\emptyset ",
    "±": r"\pm ",
    "∓": r"\mp ",
    "√": r"\sqrt ",
    "∛": r"\sqrt[3]",
    "∜": r"\sqrt[4]",
    "°": r"\deg ",
    "º": r"\deg ",
    "ℝ": r"\mathbb{R}",
    "π": r"\pi ",
    "𝜋": r"\pi ",
    "ℤ": r"\mathbb{Z}",
    "ℕ": r"\mathbb{N}",
    "ℚ": r"\mathbb{Q}",
    "ℂ": r"\mathbb{C}",
    "…": "...",
    "∖": r"\setminus ",
    "⌊": r"\lfloor ",
    "⌋": r"\rfloor ",
    "⌈": r"\lceil ",
    "⌉": r"\rceil ",
    "⟨": r"\langle ",
    "⟩": r"\rangle ",
    "（": "(",
    "）": ")",
    "，": ",",
    "；": ";",
    "：": ":",
    "。": ".",
    "％": "%",
    "＝": "=",
    "＋": "+",
    "∧": r"\land ",
    "∨": r"\lor ",
    "＜": "<",
    "＞": ">",
    "𝑥": "x",
    "𝑦": "y",
    "⟹": "=",
    "⇒": "=",
    "→": r"\to ",
    "≡": r"\equiv ",
    "∣": "|",
    "∶": ":",
}
GREEK_NAMES: Final = (
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "zeta",
    "eta",
    "theta",
    "iota",
    "kappa",
    "lambda",
    "mu",
    "nu",
    "xi",
    "rho",
    "sigma",
    "tau",
    "phi",
    "chi",
    "psi",
    "omega",
)
GREEK: Final = {
    unicodedata.lookup(f"GREEK SMALL LETTER {'LAMDA' if name == 'lambda' else name.upper()}"): f"\\{name} "
    for name in GREEK_NAMES
} | {"µ": r"\mu ", "Δ": r"\Delta ", "Ω": r"\Omega ", "Σ": r"\Sigma ", "Φ": r"\Phi ", "ϕ": r"\phi ", "θ": r"\theta "}
DROPPED: Final = re.compile(
    r"\\(?:left|right|bigg?|Bigg?|[bB]igg?[lrm]|displaystyle|textstyle|scriptstyle|limits|nolimits|boxed|fbox|!|null|cr|checkmark)(?![A-Za-z])"
    r"|\\(?:begin|end)\s*\{(?:align|aligned|equation|gather|gathered|split|center|multline|eqnarray|alignat|math|displaymath)\*?\}"
    r"|\\(?:text)?color\s*\{[^{}]*\}|\\color(?![A-Za-z])\s*[a-z]+|\\(?:bf|it|sf|tt|cal|tiny|small|large|Large|LARGE|huge|Huge)(?![A-Za-z])"
    r"|\\(?:left|right)\.|\\(?:phantom|hspace|vspace|label|tag)\*?\{[^{}]*\}"
)
SPACES: Final = re.compile(r"\\(?:quad|qquad|enspace|enskip|thinspace|hfill|newline)(?![A-Za-z])|\\[;: ]|~|&nbsp;")
TEXT: Final = re.compile(
    r"\\(?:text|textbf|textit|textrm|texttt|textsf|textnormal|textup|mbox|hbox|mathrm|rm|operatorname\*?|mathit|emph|mathsf|mathtt|unit|si)"
    r"\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
)
OVER: Final = re.compile(r"\{([^{}]*)\\(over|choose)(?![A-Za-z])([^{}]*)\}")
ROW: Final = "\x02"
"""What ends a row of a matrix, while a text is rewritten."""
TIMES: Final = re.compile(r"(\d\s*(?:«?\s*[a-z]{1,2}\s*»?)?)\s+x\s+(?=\d)")
"""An x between numbers, or lengths, that multiplies them: ``10 cm x 5 cm``."""
STYLE: Final = re.compile(
    r"\\(?:mathbf|boldsymbol|bm|pmb|vec|overrightarrow|hat|mathcal|mathscr|mathfrak|underline|bold|mathop|ensuremath|displaystyle)(?![A-Za-z])\s*(?=\{|[A-Za-z\\])"
)
SAME: Final = {
    r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\cfrac": r"\frac", r"\nicefrac": r"\frac", r"\sfrac": r"\frac",
    r"\leq": r"\le", r"\leqslant": r"\le", r"\lte": r"\le", r"\geq": r"\ge", r"\geqslant": r"\ge", r"\gte": r"\ge",
    r"\neq": r"\ne", r"\lt": "<", r"\gt": ">", r"\varnothing": r"\emptyset", r"\to": r"\to", r"\lvert": "|",
    r"\rvert": "|", r"\vert": "|", r"\mid": "|", r"\lbrace": "⦃", r"\rbrace": "⦄", r"\div": "/", r"\lbrack": "[",
    r"\rbrack": "]", r"\lparen": "(", r"\rparen": ")", r"\ast": "*", r"\degree": r"\deg", r"\bullet": r"\cdot",
    r"\ldots": "...", r"\dots": "...", r"\cdots": "...", r"\dotsc": "...", r"\dotsb": "...", r"\varphi": r"\phi",
    r"\varepsilon": r"\epsilon", r"\vartheta": r"\theta", r"\binom": r"\binom", r"\dbinom": r"\binom",
    r"\tbinom": r"\binom", r"\backslash": r"\setminus", r"\infin": r"\infty", r"\R": r"\mathbb{R}",
    r"\reals": r"\mathbb{R}", r"\Reals": r"\mathbb{R}", r"\wedge": r"\land", r"\vee": r"\lor", r"\imath": "i",
    r"\jmath": "j", r"\colon": ":", r"\eq": "=", r"\cong": r"\approx", r"\approxeq": r"\approx",
    r"\thickapprox": r"\approx", r"\thicksim": r"\approx", r"\simeq": r"\approx", r"\Rightarrow": "=",
    r"\implies": "=", r"\iff": "=", r"\pounds": "£", r"\euro": "€", r"\textdollar": "$", r"\cent": "¢", r"\And": "&",
    r"\exponentialE": "e", r"\bigcup": r"\cup", r"\bigcap": r"\cap", r"\prime": "'", r"\ell": "l",
    r"\textdegree": r"\deg", r"\celsius": r"\deg C", r"\percent": "%", r"\textpercent": "%", r"\arctg": r"\arctan",
    r"\tg": r"\tan", r"\ctg": r"\cot", r"\lVert": "|", r"\rVert": "|", r"\Vert": "|",
    r"\bar": r"\overline",
}  # fmt: skip
NAMED: Final = frozenset((
    "arcsin", "arccos", "arctan", "arccot", "arcsec", "arccsc", "sin", "cos", "tan", "cot", "sec", "csc", "sinh",
    "cosh", "tanh", "coth", "arcsinh", "arccosh", "arctanh", "ln", "log", "lg", "exp", "max", "min", "gcd", "lcm",
    "det", "cis", "sgn", "abs", "floor", "ceil", "Re", "Im",
))  # fmt: skip
"""Names of functions that may stand in a command of text."""


@lru_cache(maxsize=256)
def clean(text: str) -> str:
    """Return an answer in one notation, without marks of mathematics, emphasis and punctuation around it."""
    text = _characters(text.strip())
    text = _without_emphasis(text)
    text = re.sub(r"\\\\\s*&?\s*(?==)", " ", text)  # a line of an aligned equation goes on
    if "\\begin" not in text or re.search(r"\\begin\s*\{(?:align|gather|split|eqn)", text):
        text = text.replace("&", " ")
    text = (
        text.replace("\\\\", ROW)
        .replace(r"\$", "\x01")
        .replace(r"\%", "%")
        .replace(r"\#", "#")
        .replace(r"\&", "&")
        .replace(r"\_", "_")
    )
    text = _without_delimiters(text)
    text = text.replace("\x01", "$").replace(r"\{", "⦃").replace(r"\}", "⦄").replace(r"\|", "|")
    text = DROPPED.sub("", text)
    text = text.replace(r"\,", THIN).replace(r"{,}", ",").replace("{ }", " ").replace(r"{\cdot}", r"\cdot ")
    text = SPACES.sub(" ", text)
    text = re.sub(r"\\[A-Za-z]+", lambda match: SAME.get(match[0], match[0]), text)
    text = re.sub(r"\^\s*(?:\{\s*)?(?:\\circ|\\deg|\{\\circ\})\s*\}?", r"\\deg ", text).replace(r"\circ ", r"\deg ")
    text = OVER.sub(lambda match: rf"\{'frac' if match[2] == 'over' else 'binom'}{{{match[1]}}}{{{match[3]}}}", text)
    text = re.sub(r"\^\s*\{?\s*('+)\s*\}?", r"\1", text)
    text = re.sub(r"\\mp(?![A-Za-z])", r"\\pm", text) if r"\pm" not in text else text
    text = TEXT.sub(_marked_text, text)
    text = re.sub(r"\\frac\s*\{\s*(?:«([^»]*)»)\s*\}\s*\{\s*«([^»]*)»\s*\}", r"«\1/\2»", text)
    text = re.sub(r"«\s*([$€£¥])\s*»", r"\1", text)
    text = re.sub(r"(?<=\S)\s*«\s*\((?!\s*base)[^()»]*\)\s*»$", "", text)  # a remark
    text = STYLE.sub("", text)
    text = TIMES.sub(r"\1\\times ", text)
    text = in_one_notation(text)
    if r"\equiv" in text:
        text = text.replace(r"\bmod", r"\pmod")
    text = _without_trailing(text).replace(ROW, r"\\")
    return re.sub(r"[ \t\n]+", " ", text).strip()


def _characters(text: str) -> str:
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱˣʸ]+", lambda match: "^{" + match[0].translate(SUPERSCRIPTS) + "}", text)
    text = re.sub(r"[₀₁₂₃₄₅₆₇₈₉₊₋ₙₓ]+", lambda match: "_{" + match[0].translate(SUBSCRIPTS) + "}", text)
    text = re.sub(r"√\s*(\d+)", r"\\sqrt{\1}", text)
    text = re.sub(r"(\d)\u0305", r"\\overline{\1}", text)
    found = []
    for character in text:
        if character in CHARACTERS:
            found.append(CHARACTERS[character])
        elif character in GREEK:
            found.append(GREEK[character])
        elif "\u00bc" <= character <= "\u00be" or "\u2150" <= character <= "\u215e":
            above, _, below = unicodedata.normalize("NFKC", character).partition("⁄")
            found.append(f"\\frac{{{above}}}{{{below}}}")
        elif "\uff01" <= character <= "\uff5e" or "\U0001d400" <= character <= "\U0001d7ff" or character.isdigit():
            found.append(unicodedata.normalize("NFKC", character))
        else:
            found.append(character)
    return "".join(found)


def _without_emphasis(text: str) -> str:
    for mark in ("***", "**", "__", "`", "*", '"', "'"):
        while len(text) > 2 * len(mark) and text.startswith(mark) and text.rstrip(".,").endswith(mark):
            text = text.rstrip(".,")[len(mark) : -len(mark)].strip()
    return text.replace("**", "") if text.count("**") == 2 and re.search(r"\*\*\s|\s\*\*|^\*\*|\*\*$", text) else text


def _without_delimiters(text: str) -> str:
    r"""Return a text without ``$``, ``\(`` and the like around mathematics; a ``$`` of a currency stays."""
    text = re.sub(r"(?<!\\)\\[()]", " ", text)
    text = re.sub(r"(?<!\\)\\[\[\]]", " ", text)
    text = text.replace("$$", " ")
    marks = [match.start() for match in re.finditer(r"\$", text)]
    if not marks:
        return text
    is_currency = all(re.match(r"\s?-?\.?\d", text[at + 1 :]) for at in marks)
    if is_currency:
        return text
    if len(marks) % 2:  # one of them is a currency: the one in front of a digit
        kept = next((at for at in marks if re.match(r"\.?\d", text[at + 1 :])), -1)
        return "".join(each for at, each in enumerate(text) if each != "$" or at == kept)
    return text.replace("$", " ")


def _marked_text(match: re.Match[str]) -> str:
    inner = " ".join(match[1].split())
    if not inner:
        return " "
    name = inner if inner in NAMED else NAMES.get(inner.lower(), inner.lower())
    is_unit = name == "min" and re.match(r"\s*[(\[{⦃_]", match.string[match.end() :]) is None
    if name in NAMED and not is_unit:
        return f"\\{name} "
    if inner in ("nCr", "nPr"):
        return inner
    if re.fullmatch(r"[\d\s.,+\-*/=<>()%$^\[\]:]+", inner) or (len(inner) == 1 and inner in "eixyzdt"):
        return inner
    return f" «{inner.replace(THIN, ' ')}»"


def _without_trailing(text: str) -> str:
    text = text.strip().strip("\n")
    while text and not text.endswith("..."):
        shorter = text.rstrip(" \n\t.,;:?" + THIN + ROW)
        if shorter.endswith("\\"):
            shorter = shorter[:-1]
        if shorter == text:
            break
        text = shorter
    return text.lstrip(",; \t\n")


def compact(text: str) -> str:
    """Return a text in one notation without white space and marks of text, to compare it literally."""
    text = re.sub(r"\\([A-Za-z]+)", r"\\\1 ", text)
    text = re.sub(r"(?<=\d)\s+(?=\d)", "_", text)
    return re.sub(r"([\^_])\{(\w)\}", r"\1\2", re.sub(r"\s+|[«»]", "", text))
