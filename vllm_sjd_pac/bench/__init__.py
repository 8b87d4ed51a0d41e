"""``sjd-pac bench``: measurements with the engine itself, on any model. Never imported by anything that serves.

Every comparison runs its settings in one command and in turns (A B A B …), each engine in a process of its own, so that
a drift of the machine hits all of them alike, and reports medians of ratios within a turn.
"""
