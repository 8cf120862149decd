"""The token log of a run: numbers of single tokens, for some completions of its steps, in the folder ``tokens/``."""
