"""The part of unmarked prose that is its answer: the last sentence that says what the answer is, else the last one.

A sentence that denies, doubts or asks has no answer. What follows words of correction, such as "wait", counts alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from rlplug_rewards.answers.doubt import doubts, is_conditional, is_supposed, last_clause
from rlplug_rewards.answers.numerals import NUMBER_WORDS, in_words
from rlplug_rewards.answers.wording import DATE

CUE: Final = re.compile(
    r"(?:\b(?:final\s+|correct\s+|right\s+)?(?:answer|choice|option|result|solution)\b(?:\s*\([^()\n]{0,30}\))?"
    r"(?:\s+(?:to|of|for|as)\b[^.\n:=$]{0,80}?|\s+(?:therefore|thus|then|here|choice|option))?"
    r"\W{0,4}?\s*(?:\bis\b|\bare\b|\bwould be\b|\bshould be\b|\bmust be\b|\bequals\b|:|=|：|\n)"
    r"|^\s*#{4}(?!#)|^\s*(?:A|Ans|Sol)\s*[:.](?=\s)|\bans(?:wer)?\s*[:=]"
    r"|答案\s*(?:是|为|：|:|=)|答え\s*(?:は|：|:)|Ответ\s*:)",
    re.IGNORECASE | re.MULTILINE,
)
VERB: Final = re.compile(
    r"(?:\b(?:is|are|was|were|be|equals|equal to|gives|give|get|gets|yields|obtain|becomes|makes|make|has|have"
    r"|need|needs|"
    r"costs?|earns?|earned|pays?|paid|spends?|spent|takes?|took|made|sells?|sold|total of|(?<!\d\s)to)\b"
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
NEARLY: Final = re.compile(r"≈|\\approx")
ADVERBS: Final = re.compile(
    r"^(?:\s|[*_:=,]|\b(?:therefore|thus|hence|simply|just|indeed|clearly|then|so|now|exactly|only|equal to"
    r"|equals|given by|is|"
    r"are|that|the|at|on|by|an?(?=\s+[\d$\\A-Z])|option|choice|letter|found to be|a total of|in total|also|of course"
    r"|definitely|probably)\b[,:]?)+",
    re.IGNORECASE,
)
LEAD: Final = re.compile(
    r"^(?:(?:[=-]>|[⇒⟹→∴]|(?:so|thus|therefore|hence|then|and|finally|now|overall|altogether|consequently"
    r"|accordingly|in total"
    r"|in conclusion|as a result|"
    r"to conclude|it follows|this gives|giving|we (?:get|have|find|obtain|see|conclude)|i g[eo]t|it is|it's|that's"
    r"|this is|that is|there are|"
    r"there is|which is|it equals|that)\b)[,:]?\s*)+",
    re.IGNORECASE,
)
ASIDE: Final = re.compile(r"^(\$?[$€£]?-?\d[\d.,]*\$?(?:\s+[a-z]{2,}){0,3})\s+\(.*\)$")
"""A number, perhaps with its unit, with a remark in brackets, which is no product in prose."""
IN_BRACKETS: Final = re.compile(r"([a-z]+(?:[ -][a-z]+){0,5})\s+\((-?\d[\d.,]*)\)", re.IGNORECASE)
"""A number in words and, behind it, in digits."""
CLAUSE: Final = re.compile(
    r"(?:,?\s*[(—–]\s*(?=[a-zA-Z]{3})|,?\s+(?:because|since|which|where|when|whereas|as (?:this|it|the|we)"
    r"|so that|if|after|assuming|"
    r"and (?:the|this|that|we|so)\b|I hope|for (?:the|this|all)\b)\b|,\s+(?:so|as|not|the|and not|but|with"
    r"|while|hence|therefore)\b).*",
    re.IGNORECASE | re.DOTALL,
)
BEHIND: Final = re.compile(
    r"(\\?[$€£]?-?\d[\d,]*(?:\.\d+)?%?(?:\s+[a-z]+){0,3}?)\s+"
    r"(?:(?:for|in|after|from|by|with|at|during)\s(?!\d+\W*$|most|least|base|terms)(?:(?!\band \\?[$€£]?\d).)+"
    r"|(?:to|of)\s[^\d]+)",
    re.IGNORECASE,
)
"""A number with its unit, and what follows it in a sentence, as ``$64 for 16 glasses``."""
CONTRAST: Final = re.compile(
    r"\bnot\s+\\?\$?-?\d[^,.;\n]{0,30}?,?\s+but\s+(?:rather\s+)?"
    r"|,\s+(?:and\s+)?not\s+\\?\$?-?\d[^,;\n]{0,30}?(?=[.;,](?:\s|$)|\n|$)",
    re.IGNORECASE,
)
"""A number that a sentence denies beside the one that it gives: ``not 16 but 18``, ``18, not 16``."""
YES_OR_NO: Final = re.compile(
    r"(yes|no|true|false)\b[,.!](?!\s*(?:wait|that|actually|sorry|I )\b)[^?\n]{0,200}", re.IGNORECASE
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
    r"(?:\$|\\\()?\s*[A-Za-z]\w?\s*=[^=]{1,60}(?:(?:,|\band\b|;)[\s$\\()]*(?:and\b[\s$\\()]*)?[A-Za-z]\w?\s*=[^=]{1,60})+$"
)
"""Values of several symbols at the end of a sentence: ``x = 5 and y = 2``."""
REMARK: Final = re.compile(
    r"(?:(?<=[.!?\n*$}\])])|(?<=[.!?] ))\s*(?:please )?(?:let me know|if you(?:['’]d| would| need| have| want)"
    r"|feel free|i hope|hope (?:this|that|it)|good luck|happy to|thank|is there anything|would you like|do you)\b[^\n]*\s*\Z",
    re.IGNORECASE,
)
"""What a reply says to its reader at its end."""
EMPHASIS: Final = re.compile(r"\*\*(?!\s)([^*\n]+?)(?<![\s:])\*\*")
NAMED: Final = re.compile(
    r"([A-Z]\w*(?:\s[A-Z]\w*){0,2})\s+(?:is|has|was|had|won|wins)\s+(?:the\s+)(?:\w+\s+)?"
    r"(?:most|least|best|correct|winner|first|last|only|\w+est)\b"
)
"""A name that begins a sentence which says that it is the one asked for: ``Evelyn has the largest speed``."""
PROGRAM: Final = re.compile(
    r"^\s*```[ \t]*(?:python|py|c|cpp|c\+\+|java|javascript|js|bash|sh|sql|r|rust|go|sage|matlab|ruby)\b"
    r".*?(?:^\s*```\s*$|\Z)",
    re.IGNORECASE | re.DOTALL | re.MULTILINE,
)
MARKS: Final = re.compile(
    r"</?(?:b|strong|i|em|u|p|br|code|span|div)(?:\s[^<>]*)?/?>|(?<![\w)])\*\*|\*\*(?![\w(])|~~[^~\n]+~~"
    r"|(?<![\w\\])_(?=\d[\d.,]*_(?!\w))|(?<=\d)_(?!\w|\{)|\\text(?:bf)?\{([^{}]{4,})\}"
)
"""Emphasis, and text in mathematics."""
END_MARKS: Final = re.compile(
    r"(?:\s*(?:\\(?:blacksquare|square|qed|Box|checkmark)(?![A-Za-z])"
    r"|[■□▪∎✓✔✅☑\ufe0f\U0001f300-\U0001faff]))+(?=[\s$]*$)"
)
"""What ends a proof or a reply."""
MATHEMATICS: Final = re.compile(r"\$([^$\n]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]")
TOTAL: Final = re.compile(
    r"(?P<number>\\?[$€£]?\d[\d,]*(?:\.\d+)?%?(?:\s+[a-z]+)?)\s+(?:in total|in all|altogether)\W*$"
    r"|\b(?:for|making|giving) a total of (?P<behind>\\?[$€£]?\d[\d,]*(?:\.\d+)?%?(?:\s+[a-z]+)?)\W*$",
    re.IGNORECASE,
)
"""A number that a sentence ends with as its total."""
BOUND: Final = re.compile(
    r"\b(?:at least|at most|question|problem|step|stuck|up at|example|given|(?:more|less|greater|fewer|larger"
    r"|smaller|other) than|up to|or (?:more|less|fewer)|squared|cubed|root of|(?:half|twice|double) (?:of )?\d|base"
    r"|equation|figure|page|section)\b|[<>]|\\[lg]eq?\b",
    re.IGNORECASE,
)
VALUE: Final = re.compile(
    rf"\b(?:{DATE.pattern})\b"
    r"|(?<![A-Za-z\d_.:])\d{1,2}:\d{2}(?:\s*[ap]\.?m\.?)?(?!\w)"
    r"|(?<![A-Za-z\d_.])[-−]?[$€£]?\d[\d,]*(?:\.\d+)?(?:/\d+)?%?(?![A-Za-z\d_/^])",
    re.IGNORECASE,
)
"""A date, a time or a number in prose."""
IN_WORDS: Final = re.compile(
    rf"\b(?!one\b(?!-))(?:{NUMBER_WORDS})(?:(?:-|\s+(?:and\s+)?)(?:{NUMBER_WORDS}))*\b", re.IGNORECASE
)
CORRECTION: Final = re.compile(
    r"(?:^|(?<=[.!?,;\n])|(?<=[.!?,;\n] )|(?<=[-—–] ))\s*(?:oh |but |hmm,? |no,? )?"
    r"(?:wait|actually|correction|scratch that|sorry|hold on|let me (?:re|double)|i made (?:a|an) (?:mistake"
    r"|error)|no(?=,)|on second thought)\b",
    re.IGNORECASE,
)
SENTENCE_END: Final = re.compile(r"(?:[.!?](?:[*_\"'”)]{0,3})(?=\s+[A-Z*\\$\"“(]|\s*$)|\n)", re.MULTILINE)
ABBREVIATIONS: Final = ("i.e", " i", "e.g", "approx", " vs", " no", " eq", " fig", "sq", " cf")
CURRENCY: Final = re.compile(r"(?<![\\$])\$(?=\d+(?:\.\d+)?(?:[\s.,]|$))")
LONGEST: Final = 4000
"""Characters at the end of a completion in which unmarked answers are looked for."""


def candidates(text: str, is_marked: bool = False) -> Iterator[str]:
    """Yield texts that may be the answer, the likeliest first: the first that has a meaning is the answer.

    Args:
        text: Prose.
        is_marked: Whether a tag or a box holds it: then only a sentence that says what the answer is has one.
    """
    text = REMARK.sub("", PROGRAM.sub("", text))
    text = re.sub(r"^\s*(?:```\w*|~~~)\s*$", "", text[-LONGEST:], flags=re.MULTILINE)
    text = re.sub(r"\$\$\s*([^$]*?)\s*\$\$", r"$\1$", text)
    emphasised = EMPHASIS.findall(_last_sentence(text.strip()))
    text = CONTRAST.sub("", MARKS.sub(lambda match: match[1] or "", END_MARKS.sub("", text)))
    if not is_marked and (answer := YES_OR_NO.fullmatch(text.strip())) is not None:
        yield answer[1]
    text = _after_correction(re.sub(r"\s*\n\s*\n\s*", "\n\n", re.sub(r"[ \t]+", " ", text))).strip()
    if not text:
        return
    cue = None
    for match in CUE.finditer(text):
        begin = text[: match.start()] + match[0]
        is_one_of_two = (
            is_conditional(begin) and _first_sentence(text[match.end() :]).strip() != text[match.end() :].strip()
        )
        cue = cue if is_supposed(begin) or is_one_of_two else match
    if cue is not None:
        sentence = _first_sentence(text[cue.end() :])
        if sentence.strip(" *_:$"):
            if not doubts(sentence):
                yield from _parts_of_statement(sentence)
                if cue[0].endswith((":", "：", "\n")) and '":' not in sentence:
                    yield from _parts_of_sentence(sentence)
            return
    if is_marked:
        is_plain = "=" not in text and not BOUND.search(text) and not doubts(text)
        if is_plain and (verb := _last(VERB, text)) is not None:
            yield from _parts_of_statement(text[verb.end() :])
        return
    sentence = LEAD.sub("", CONSEQUENCE.split(_last_sentence(text))[-1])
    if "\n" not in text and len(text) < 200 and not doubts(text):
        yield LEAD.sub("", CONSEQUENCE.split(text)[-1])
    if (none := NONE.search(sentence)) is not None and not doubts(sentence[: none.start()]):
        yield none[0]
    if doubts(sentence):
        sentence = LEAD.sub("", last_clause(sentence.rstrip(" .!")).strip())
        if doubts(sentence):
            return
    if len(emphasised) == 1:
        yield emphasised[0]
    yield sentence
    if (named := NAMED.match(sentence)) is not None:
        yield named[1]
    yield from _parts_of_sentence(sentence)
    if LEAD.match(_last_sentence(text)) or sentence.strip() == text.strip():
        yield from _only_number(sentence)


def _parts_of_sentence(sentence: str) -> Iterator[str]:
    """Yield the total that a sentence ends with, the number that it begins with, and what its last verb says."""
    if (total := TOTAL.search(sentence)) is not None:
        yield total["number"] or total["behind"]
    if (behind := BEHIND.fullmatch(sentence.rstrip(" ."))) is not None:
        yield behind[1]
    if (restated := RESTATED.split(sentence))[1:]:
        yield restated[-1]
        sentence = restated[0]
    if (system := SYSTEM.search(sentence.rstrip(" ."))) is not None:
        yield system[0]
    short = CIRCUMSTANCE.sub("", sentence)
    if short != sentence and re.search(r"\d", short) and (verb := _last(VERB, short)) is not None:
        yield from _parts_of_statement(short[verb.end() :])
    verb = _last(VERB, sentence) or _last(NEARLY, sentence)
    if verb is not None:
        yield from _parts_of_statement(sentence[verb.end() :])


def _parts_of_statement(text: str) -> Iterator[str]:
    text = ADVERBS.sub("", text, count=1).strip()
    whole = re.sub(r"\s+(?:left|remaining|more)$", "", text.rstrip(" .!*_"))
    if whole.count("}") > whole.count("{"):  # of JSON
        whole = whole.rstrip("}\"' \n").lstrip("\"'")
    cut = IN_BRACKETS.sub(_number_in_brackets, ASIDE.sub(r"\1", CLAUSE.sub("", whole, count=1).strip()))
    if cut and cut != whole:
        yield cut
    yield whole
    if (behind := BEHIND.fullmatch(whole)) is not None:
        yield behind[1]
    math = _mathematics(whole)
    rest = MATHEMATICS.sub("", whole)
    if len(math) == 1 and not re.search(r"\d", rest) and not BOUND.search(f"at {rest}"):
        yield math[0]


def _number_in_brackets(match: re.Match[str]) -> str:
    return match[0] if in_words(match[1]) is None else match[2]


def _only_number(sentence: str) -> Iterator[str]:
    """Yield the only mathematics of a sentence, or its only number with the word behind it."""
    if len(sentence) > 400 or BOUND.search(sentence):
        return
    math = _mathematics(sentence)
    if len(math) == 1:
        yield math[0]
        return
    numbers = [match[0] for match in VALUE.finditer(sentence)] or [match[0] for match in IN_WORDS.finditer(sentence)]
    if not math and len(numbers) == 1 and not re.search(r"\d[^\s]*[=+*/^]|[=+*/^]\s*\d", sentence):
        yield numbers[0].rstrip(",")


def _mathematics(text: str) -> list[str]:
    return [next(filter(None, match.groups())) for match in MATHEMATICS.finditer(text)]


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found: re.Match[str] | None = None
    for match in pattern.finditer(text):
        found = match
    return found


def _after_correction(text: str) -> str:
    at = 0
    for match in CORRECTION.finditer(text):
        at = match.end()
    return re.sub(r"^(?:[\s,.:;!—]|-\s)+", "", text[at:]) if text[at:].strip(" .,!") else text[:at]


def _first_sentence(text: str) -> str:
    """Return the first sentence, of the first line that has one."""
    text = text.lstrip(" \n\t*_:")
    end = _end_of_sentence(text, 0)
    return text[:end]


def _last_sentence(text: str) -> str:
    begin, end = 0, _end_of_sentence(text, 0)
    while end < len(text) and text[end:].strip(" .*_\n"):
        begin = end
        end = _end_of_sentence(text, begin + 1)
    return re.sub(r"^(?:[\s#>*]|-\s)+|[\s#>*-]+$", "", text[begin:end])


def _end_of_sentence(text: str, begin: int) -> int:
    """Return where a sentence ends; a full stop or line end in ``$...$``, ``\\[...\\]`` or brackets ends none."""
    for match in SENTENCE_END.finditer(text, begin):
        before = text[begin : match.start()]
        marks = before.count("$") - before.count("\\$") - len(CURRENCY.findall(before))
        is_outside = marks == 0 or before.count("$") % 2 == 0
        is_short = match[0].startswith(".") and before.lower().endswith(ABBREVIATIONS)
        if is_outside and not is_short and before.count("\\[") == before.count("\\]") and before.strip():
            return match.end()
    return len(text)
