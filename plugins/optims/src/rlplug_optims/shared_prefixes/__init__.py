"""Completions that begin alike are laid out as a tree, and what they share is computed once.

tree.py        which rows share what, and the row of tokens that a tree becomes
layout.py      ``PrefixLayout``: plans bundles of rows and packs them
attention.py   attention of each token to those before it in its sequence
decision.py    whether a run shares prefixes, and why not
comparison.py  FlexAttention beside attention by segments, before a run on a GPU
"""
