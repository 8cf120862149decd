"""Completions that begin alike are laid out as a tree, and what they share is computed once.

tree.py             which rows share what, and the row of tokens that a tree becomes
layout.py           ``PrefixLayout``: plans bundles of rows and packs them
tree_attention.py   attention on a GPU, as one operator
tile_lists.py       which tiles its kernels compute
launch.py           runs its kernels
kernels.py          Triton kernels
segments.py         attention by torch, segment by segment, on any device
decision.py         whether a run shares prefixes, and why not
comparison.py       the kernels beside attention by segments, before a run on a GPU
"""
