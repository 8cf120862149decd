"""The part of unmarked prose that is its answer: the last sentence that says what the answer is, else the last one.

A sentence that denies, doubts, supposes or asks has no answer, but for its last clause. What follows words of
correction, such as "wait", counts alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from rlplug_rewards.answers.doubt import doubts, is_conditional, is_supposed, last_clause
from rlplug_rewards.answers.numerals import NUMBER_WORDS, in_words
from rlplug_rewards.answers.sentences import after_correction, first_sentence, last_sentence, plain, shortened
from rlplug_rewards.answers.wording import DATE

HEADING: Final = r"(?:[*_]*(?:step|part|case)\b|[*_]*\d[.)] [a-z][^\n]*\n\s*\S|[^\d\n]*[a-z]{4}[^\d\n]*\n\s*\S)"
"""What makes ``####`` a heading of a step, and no mark of an answer."""
CUE: Final = re.compile(
    r"(?:\b(?:answer|choice|option|result|solution)s?\b"
    r"(?:\s+(?:to|of|for)\b[^.\n:=$]{0,80}?)?"
    r"\W{0,4}?\s*(?:\bis\b|['’]s\b|\bare\b|\bwould be\b|\bshould be\b|\bmust be\b|\bequals\b|:|=|：|\n)"
    rf"|^\s*#{{4}}(?!#|\s*{HEADING})|^\s*(?:A|Ans|Sol)\s*[:.](?=\s)"
    r"|答案\s*(?:是|为|：|:|=)|答え\s*(?:は|：|:)|Ответ\s*:)",
    re.IGNORECASE | re.MULTILINE,
)
VERB: Final = re.compile(
    r"(?:\b(?:is|are|was|were|be|equals|equal to|gives|give|get|gets|yields|obtain|becomes|makes|make|has|have"
    r"|needs?|costs?|earns?|earned|pays?|paid|spends?|spent|takes?|took|made|sells?|sold|buys?|bought|receives?|received"
    r"|uses?|used|eats?|ate|drinks?|drank|walks?|walked|runs?|ran|saves?|saved|owes?|owed|collects?|collected|reads?"
    r"|contains?|total of|(?<!\d\s)to)\b"
    r"|=|:(?!\d)|(?<!\d):|\\implies|\\Rightarrow|⇒|→)",
    re.IGNORECASE,
)
CONSEQUENCE: Final = re.compile(
    r",?\s+(?:so(?! that| far| much| many)|thus|hence|therefore|giving|meaning(?: that)?|which (?:gives|means"
    r"|is|equals))\s+",
    re.IGNORECASE,
)
CIRCUMSTANCE: Final = re.compile(
    r",?\s+(?:when|where|because|since|attained|achieved|reached|occurring)\b.*", re.IGNORECASE
)
LAST_PART: Final = re.compile(r"(?<!\\);\s+((?=[^;]*\d)(?=[^;]*[A-Za-z]{3})[^;]+)$")
"""The last of several parts of a sentence that give a number each: ``before it $230; after it, $207``."""
OBJECT: Final = re.compile(r"\{\s*\"\w+\"\s*:.*\}", re.DOTALL)
FIELD: Final = re.compile(
    r"\"(?:final[_ ]?)?(?:answer|result|solution|value|output|choice|ans)\"\s*:\s*(\"[^\"]*\"|\[[^\]]*\]|[^,}\n]+)",
    re.IGNORECASE,
)
"""The field of an object in JSON that is its answer."""
ADVERBS: Final = re.compile(
    r"^(?:\s|[*_:=,]|\b(?:therefore|thus|hence|simply|just|indeed|clearly|then|so|now|exactly|only|equal to"
    r"|equals|given by|is|are|that|the|at|on|by|an?(?=\s+[\d$\\A-Z])|option|choice|letter|found to be|a total of"
    r"|in total|also|of course|definitely|probably)\b[,:]?)+",
    re.IGNORECASE,
)
LEAD: Final = re.compile(
    r"^(?:(?:[=-]>|[⇒⟹→∴]|(?:so|thus|therefore|hence|then|and|finally|now|overall|altogether|consequently"
    r"|accordingly|in total|in conclusion|as a result|to conclude|it follows|this gives|giving"
    r"|we (?:get|have|find|obtain|see|conclude)|i g[eo]t|it is|it's|that's|this is|that is|there (?:is|are)"
    r"|which is|it equals|that)\b)[,:]?\s*)+",
    re.IGNORECASE,
)
ASIDE: Final = re.compile(r"^(\$?[$€£]?-?\d[\d.,]*\$?(?:\s+[a-z]{2,}){0,3})\s+\(.*\)$")
"""A number, perhaps with its unit, with a remark in brackets, which is no product in prose."""
IN_BRACKETS: Final = re.compile(r"([a-z]+(?:[ -][a-z]+){0,5})\s+\((-?\d[\d.,]*)\)", re.IGNORECASE)
"""A number in words and, behind it, in digits."""
CLAUSE: Final = re.compile(
    r"(?:,?\s*[(—–]\s*(?=[a-zA-Z]{3})|,?\s+(?:because|since|which|where|when|as (?:this|it|the|we)|so that|if|after"
    r"|attained|and (?:the|this|that|we|so)\b|for (?:the|this|all)\b)\b"
    r"|,\s+(?:so|as|not|the|and not|but|with|while)\b).*",
    re.IGNORECASE | re.DOTALL,
)
BEHIND: Final = re.compile(
    r"(\\?[$€£]?-?\d[\d,]*(?:\.\d+)?%?(?:\s+[a-z]+){0,3}?)\s+"
    r"(?:(?:for|in|after|from|by|with|at|during)\s(?!\d+\W*$|most|least|base|terms)(?:(?!\band \\?[$€£]?\d).)+"
    r"|(?:to|of)\s[^\d]+)",
    re.IGNORECASE,
)
"""A number with its unit, and what follows it in a sentence, as ``$64 for 16 glasses``."""
YES_OR_NO: Final = re.compile(
    r"(yes|no|true|false)\b(?:[,.!]|\s+[-–—])(?!\s*(?:wait|that|actually|sorry|I )\b)[^?\n]{0,200}", re.IGNORECASE
)
"""An answer of one sentence, or a few, that begins with yes or no."""
NONE: Final = re.compile(
    r"\b(?:(?:does not|doesn['’]t|do not|don['’]t|did not) exist"
    r"|no (?:real |integer |such )?(?:solutions?|values?|roots?)(?: exists?)?|(?:un|not )defined)\W*$",
    re.IGNORECASE,
)
"""What a sentence ends with that says that there is nothing, in words that would deny any other answer."""
RESTATED: Final = re.compile(
    r",?\s+\(?(?:i\.\s?e\.|that is,|or,? equivalently,?|equivalently,|in other words,|namely)\s*,?\s*", re.IGNORECASE
)
"""What stands between an answer and the same in another form."""
SYSTEM: Final = re.compile(
    r"\$?\s*[A-Za-z]\w?\s*=[^=]{1,60}(?:(?:,|\band\b|;)[\s$\\()]*(?:and\b[\s$\\()]*)?[A-Za-z]\w?\s*=[^=]{1,60})+$"
)
"""Values of several symbols at the end of a sentence: ``x = 5 and y = 2``."""
EMPHASIS: Final = re.compile(r"\*\*(?!\s)([^*\n]+?)(?<![\s:])\*\*")
NAMED: Final = re.compile(
    r"([A-Z]\w*(?:\s[A-Z]\w*){0,2})\s+(?:(?:is|has|was|had)\s+the\s+(?:most|least|best|winner|\w+est)"
    r"|(?:finished|came|arrived)\s+(?:first|last))\b"
)
"""A name that begins a sentence which says that it is the one asked for: ``Evelyn has the largest speed``."""
MATHEMATICS: Final = re.compile(r"\$([^$\n]+)\$")
COUNTED: Final = re.compile(r"\$(-?\d[\d,]*)\$\s+[a-z]{2}(?!.*\$-?\d[\d,.]*\$)")
"""The only number of a sentence, with what it counts behind it: ``$113$ integers $n$ with ...``."""
TOTAL: Final = re.compile(
    r"(?P<number>\\?[$€£]?\d[\d,]*(?:\.\d+)?%?(?:\s+[a-z]+)?)\s+(?:in total|in all|altogether)\W*$"
    r"|\b(?:for|making|giving) a total of (?P<behind>\\?[$€£]?\d[\d,]*(?:\.\d+)?%?(?:\s+[a-z]+)?)\W*$",
    re.IGNORECASE,
)
"""A number that a sentence ends with as its total."""
BOUND: Final = re.compile(
    r"\b(?:at least|at most|case|cases|question|problem|step|stuck|up at|example|given|(?:more|less|greater|fewer"
    r"|larger|smaller|other) than|up to|or (?:more|less|fewer)|squared|cubed|root of|(?:half|twice|double) (?:of )?\d"
    r"|base|equation|figure|page|section)\b|[<>]|\\[lg]eq?\b",
    re.IGNORECASE,
)
VALUE: Final = re.compile(
    rf"\b(?:{DATE.pattern})\b"
    r"|(?<![A-Za-z\d_.:])\d{1,2}(?::\d{2}(?:\s*[ap]\.?m\b\.?)?|\s*[ap]\.?m\b\.?)(?!\w)"
    r"|(?<![A-Za-z\d_.])[-−]?[$€£]?\d[\d,]*(?:\.\d+)?(?:/\d+)?%?(?![A-Za-z\d_/^])",
    re.IGNORECASE,
)
"""A date, a time or a number in prose."""
SPOKEN_OF: Final = re.compile(r"\s+(?:is|are|was|were)\s+(?!the\b)")
"""What follows a number that a sentence says something of: ``14 is even``."""
LAST_WORD: Final = re.compile(
    r"(?<!\bthan)(?<!\bas)(?<!\bfrom)(?<!\bnear)(?<!\bwith)(?<!\bby)(?<!\bto)(?<!\bof)(?<!\bin)(?<!\bfor)(?<!\blike)"
    r"(?<!\band)(?<!\bor)\s+(?:an?\s+|the\s+)?([a-z]{3,})\W*$"
    r"|\b(?:on|we (?:reach|get|find))\s+(?:an?\s+)?([A-Z][a-z]{2,})\W*$"
)
"""What a sentence ends with, where it does not only relate to what the sentence is about: ``falls on a Thursday``."""
IN_WORDS: Final = re.compile(
    rf"\b(?!one\b(?!-))(?:{NUMBER_WORDS})(?:(?:-|\s+(?:and\s+)?)(?:{NUMBER_WORDS}))*\b", re.IGNORECASE
)


def candidates(text: str, is_marked: bool = False) -> Iterator[str]:
    """Yield texts that may be the answer, the likeliest first: the first that has a meaning is the answer.

    Args:
        text: Prose.
        is_marked: Whether a tag or a box holds it: then only a sentence that says what the answer is has one.
    """
    text = shortened(text)
    if OBJECT.fullmatch(text.strip()) is not None:
        yield from (field.strip(' "') for field in FIELD.findall(text)[-1:])
        return
    emphasised = EMPHASIS.findall(last_sentence(text.strip()))
    text = plain(text)
    if not is_marked and (answer := YES_OR_NO.fullmatch(text.strip())) is not None:
        yield answer[1]
    text = after_correction(re.sub(r"\s*\n\s*\n\s*", "\n\n", re.sub(r"[ \t]+", " ", text))).strip()
    cue = _last_cue(text)
    sentence = "" if cue is None else first_sentence(text[cue.end() :])
    if cue is not None and sentence.strip(" *_:$"):
        if not doubts(sentence):
            if len(emphasised) == 1 and emphasised[0] in sentence:
                yield emphasised[0]
            yield from _parts_of_statement(sentence)
            if cue[0].endswith((":", "：", "\n")) and '":' not in sentence:
                yield from _parts_of_sentence(sentence)
    elif is_marked:
        is_plain = "=" not in text and not BOUND.search(text) and not doubts(text)
        if is_plain and (verb := _last(VERB, text)) is not None:
            yield from _parts_of_statement(text[verb.end() :])
    elif text:
        yield from _parts_of_end(text, emphasised)


def _last_cue(text: str) -> re.Match[str] | None:
    """Return the last words that say that an answer follows, which nobody only supposes."""
    cue: re.Match[str] | None = None
    for match in CUE.finditer(text):
        begin, rest = text[: match.end()], text[match.end() :].strip()
        is_one_of_two = is_conditional(begin) and first_sentence(rest).strip() != rest
        if not is_one_of_two and not is_supposed(begin):
            cue = match
    return cue


def _parts_of_end(text: str, emphasised: list[str]) -> Iterator[str]:
    """Yield what the last sentence may give, where no words say that an answer follows."""
    *before, sentence = CONSEQUENCE.split(last_sentence(text))
    sentence = LEAD.sub("", sentence)
    if _gives_only_a_circumstance(sentence):
        return
    if "\n" not in text and len(text) < 200 and not doubts(text):
        yield LEAD.sub("", CONSEQUENCE.split(text)[-1])
    if (none := NONE.search(sentence)) is not None and not doubts(sentence[: none.start()]):
        yield none[0]
    if doubts(sentence):
        sentence = LEAD.sub("", last_clause(sentence.rstrip(" .!")).strip())
        if doubts(sentence):
            return
    if (part := LAST_PART.search(sentence)) is not None:
        sentence = part[1]
    if len(emphasised) == 1:
        yield emphasised[0]
    yield sentence
    if (named := NAMED.match(sentence)) is not None:
        yield named[1]
    if (last := LAST_WORD.search(sentence)) is not None and in_words(last[1] or last[2]) is None:
        yield last[1] or last[2]
    yield from _parts_of_sentence(sentence)
    if before:
        yield from _parts_of_statement(sentence)
    if LEAD.match(last_sentence(text)) or sentence.strip() == text.strip():
        yield from _only_number(sentence)


def _gives_only_a_circumstance(sentence: str) -> bool:
    """Return whether the numbers of a sentence say only when it holds: ``Equality holds when a = 3.``"""
    circumstance = CIRCUMSTANCE.search(sentence)
    if circumstance is None or re.search(r"\b(?:is|are|equals|gives)\b", circumstance[0]):
        return False
    return re.search(r"\d", circumstance[0]) is not None and not re.search(r"\d", sentence[: circumstance.start()])


def _parts_of_sentence(sentence: str) -> Iterator[str]:
    """Yield the total that a sentence ends with, the number that it begins with, and what its last verb says."""
    if (total := TOTAL.search(sentence)) is not None:
        yield total["number"] or total["behind"]
    if (behind := BEHIND.fullmatch(sentence.rstrip(" ."))) is not None:
        yield behind[1]
    sentence, *restated = RESTATED.split(sentence)
    yield from restated[-1:]
    if (counted := COUNTED.match(sentence)) is not None:
        yield counted[1]
    if (system := SYSTEM.search(sentence.rstrip(" ."))) is not None:
        yield system[0]
    short = CIRCUMSTANCE.sub("", sentence)
    if short != sentence and re.search(r"\d", short) and (verb := _last(VERB, short)) is not None:
        yield from _parts_of_statement(short[verb.end() :])
    if (verb := _last(VERB, sentence)) is not None:
        yield from _parts_of_statement(sentence[verb.end() :])


def _parts_of_statement(text: str) -> Iterator[str]:
    text, *restated = RESTATED.split(text)
    yield from restated[-1:]
    text = ADVERBS.sub("", text, count=1).strip()
    whole = re.sub(r"\s+(?:left|remaining|more)$", "", text.rstrip(" .!*_"))
    if whole.count("}") > whole.count("{"):  # of JSON
        whole = whole.rstrip("}\"' \n").lstrip("\"'")
    if whole.endswith(")") and whole.count(")") > whole.count("("):  # of a sentence in brackets
        whole = whole[:-1]
    cut = IN_BRACKETS.sub(_number_in_brackets, ASIDE.sub(r"\1", CLAUSE.sub("", whole, count=1).strip()))
    if cut and cut != whole:
        yield cut
    yield whole
    if (behind := BEHIND.fullmatch(whole)) is not None:
        yield behind[1]
    math = MATHEMATICS.findall(whole)
    rest = MATHEMATICS.sub("", whole)
    if len(math) == 1 and not re.search(r"\d", rest) and not BOUND.search(f"at {rest}"):
        yield math[0]


def _number_in_brackets(match: re.Match[str]) -> str:
    return match[0] if in_words(match[1]) is None else match[2]


def _only_number(sentence: str) -> Iterator[str]:
    """Yield the only mathematics of a sentence, or its only number with the word behind it."""
    if len(sentence) > 400 or BOUND.search(sentence):
        return
    math = [part for part in MATHEMATICS.findall(sentence) if len(part.strip()) > 1 or part.strip().isdigit()]
    if len(math) == 1:
        yield math[0]
        return
    numbers = list(VALUE.finditer(sentence)) or list(IN_WORDS.finditer(sentence))
    if math or len(numbers) != 1 or re.search(r"\d[^\s]*[=+*/^]|[=+*/^]\s*\d", sentence):
        return
    if not SPOKEN_OF.match(sentence, numbers[0].end()):
        yield numbers[0][0].rstrip(",")


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found: re.Match[str] | None = None
    for match in pattern.finditer(text):
        found = match
    return found
