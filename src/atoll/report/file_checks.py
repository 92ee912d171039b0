"""Checks of the files of a run directory, which may be damaged or of somebody else's making."""

from __future__ import annotations

import math
from typing import Any

Json = dict[str, Any]


def is_number(value: object) -> bool:
    """Return whether a value is a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def matrix_problem(rows: Any, name: str) -> str:
    """Return what is wrong with a matrix of counts; "" if nothing is."""
    if not (isinstance(rows, list) and rows and all(isinstance(row, list) and row for row in rows)):
        return f'"{name}" must be a list of lists of numbers'
    if len({len(row) for row in rows}) > 1:
        return f'the rows of "{name}" must be equally long: got lengths {sorted({len(row) for row in rows})}'
    if not all(is_number(value) and math.isfinite(value) and value >= 0 for row in rows for value in row):
        return f'"{name}" must hold counts of 0 or more'
    return ""


def partition_problem(table: Json) -> str:
    """Return what is wrong with the contents of partition.json."""
    return matrix_problem(table.get("counts"), "counts")


def confusion_problem(table: Json) -> str:
    """Return what is wrong with the contents of confusion.json."""
    problem = matrix_problem(table.get("matrix"), "matrix")
    if not problem and len(table["matrix"]) != len(table["matrix"][0]):
        return f'"matrix" must be square: got {len(table["matrix"])} rows of {len(table["matrix"][0])}'
    return problem


def sites_problem(table: Json) -> str:
    """Return what is wrong with the contents of sites.json."""
    sites = table.get("sites")
    if not (
        isinstance(sites, list) and all(isinstance(site, dict) and {"client", "name"} <= site.keys() for site in sites)
    ):
        return '"sites" must be a list of tables with "client" and "name"'
    secret = table.get("secret", {"clients": [], "names": []})
    if not (isinstance(secret, dict) and all(isinstance(secret.get(key), list) for key in ("clients", "names"))):
        return '"secret" must be a table with lists "clients" and "names"'
    return ""


def clients_problem(table: Json) -> str:
    """Return what is wrong with the contents of clients.json; a client without a value has null."""
    metric = table.get("metric", "accuracy")
    values = table.get(metric) if isinstance(metric, str) else None
    if not (isinstance(values, list) and values and all(value is None or is_number(value) for value in values)):
        return f'"{metric}" must be a list of numbers, one a client'
    if metric == "accuracy" and not all(value is None or 0 <= value <= 1 for value in values):
        return '"accuracy" must be a list of shares in [0, 1], one a client'
    return ""


def answers_problem(table: Json) -> str:
    """Return what is wrong with the contents of answers.json."""
    samples, asked = table.get("samples"), table.get("questions", {"num": 0})
    keys = ("prompt", "before", "after")
    if not (
        isinstance(samples, list)
        and all(isinstance(each, dict) and all(isinstance(each.get(key), str) for key in keys) for each in samples)
    ):
        return f'"samples" must be a list of tables with the texts {", ".join(keys)}'
    return "" if isinstance(asked, dict) and isinstance(asked.get("num"), int) else '"questions" must have "num"'
