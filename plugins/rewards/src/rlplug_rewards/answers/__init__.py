r"""Answers: which part of a completion is one, what it means, and whether two mean the same.

From a completion to a verdict, with the modules of each stage::

    completion
       | extraction      what follows the thought; what a tag or a box marks, or else all of it, as prose
       v
    judging              asks the readers below about one candidate after another, until one has a meaning
       | choices         a letter, or several, where the reference is one
       | prose           texts of unmarked prose that may be the answer, the likeliest first
       |   sentences       without programs, remarks, emphasis and what words of correction take back
       |   clauses         the main one of a sentence; phrases: the values in it
       |   doubt           sentences that deny, doubt, suppose or ask
       v
    reading              what a candidate means, one of the types in ``values``, the most structured first
       | notation, calls one notation for LaTeX, Unicode and plain text
       | numerals        thousands, mixed numbers, repeating decimals, powers of ten, bases, number words
       | wording, regions, quantities (with units), counting
       | expressions     algebra: tokens, expression_grammar, expression_parser, series, arithmetic
       v
    equality             whether two meanings are the same: equation_equality, quantity_equality

``references`` makes the accepted answers texts and refuses those that cannot be read; ``splitting`` knows brackets.

Nothing here imports rlplug: the processes that score samples need neither torch nor its memory.
"""
