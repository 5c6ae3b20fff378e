"""Jobs for `smoke.py`, importable by workers."""


def nothing() -> None:
    pass


def fail() -> None:
    raise ValueError("on purpose")
