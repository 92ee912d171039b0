"""Checks of options against their annotations, so that signature, help and check agree.

`mu: Annotated[float, at_least(0)]` in the signature of a part, or in a table of the plan, is all that a setting needs:
its type, its range and that it is finite are checked wherever a part is built or a table is read.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from atoll.core.errors import PlanError, close_to

TYPE_NAMES = {int: "a whole number", float: "a number", str: "text in quotes", bool: "true or false"}
LIST_TYPES = (list, tuple, Sequence)
WHOLE_LIMIT = 2**63 - 1
"""Largest whole number unless a range allows more: tensors and arrays hold no larger ones."""
MAX_SHOWN = 80
"""Maximum number of characters of a value in an error text."""


class WrongKind(PlanError):
    """Refusal of a value of the wrong type; a number outside of its range is a plain PlanError."""


class Range(NamedTuple):
    """The numbers that a setting allows. Both ends are allowed unless open; `hint` says what to do instead.

    >>> str(Range(0, 1, open_high=True)), str(Range(low=1)), str(Range(low=0, open_low=True))
    ('in [0, 1)', 'at least 1', 'above 0')
    """

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    hint: str = ""
    infinite: bool = False
    """Whether infinity is allowed; NaN never is."""

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, int | float):
            return False
        above_low = value > self.low if self.open_low else value >= self.low
        return above_low and (value < self.high if self.open_high else value <= self.high)

    def __str__(self) -> str:
        if self.low > -math.inf and self.high < WHOLE_LIMIT:
            return f"in {'(' if self.open_low else '['}{self.low}, {self.high}{')' if self.open_high else ']'}"
        if self.low > -math.inf:
            closed = "0 or more" if self.low == 0 else f"at least {self.low}"
            return f"above {self.low}" if self.open_low else closed
        if self.high < WHOLE_LIMIT:
            return f"{'below' if self.open_high else 'at most'} {self.high}"
        return ""

    @property
    def after_kind(self) -> str:
        """The range in words that follow "a number"."""
        text = str(self)
        return f" of {text}" if text[:1].isdigit() or text.startswith("at ") else f" {text}" if text else ""


def at_least(low: float, hint: str = "") -> Range:
    """Return the range of all numbers from `low` on."""
    return Range(low=low, hint=hint)


def above(low: float, hint: str = "") -> Range:
    """Return the range of all numbers above `low`."""
    return Range(low=low, open_low=True, hint=hint)


Count = Annotated[int, at_least(1)]
Seed = Annotated[int, Range(0, 2**256 - 1)]
Positive = Annotated[float, above(0)]
NotNegative = Annotated[float, at_least(0)]
Share = Annotated[float, Range(0, 1)]
ShareBelowOne = Annotated[float, Range(0, 1, open_high=True)]
ShareAboveZero = Annotated[float, Range(0, 1, open_low=True)]


def read_value(hint: Any, value: Any, where: str, owner: str = "") -> Any:
    """Check a value against the annotation of its setting, and return it in the annotated type.

    `where` is the setting's key in the plan, `owner` the name of the part that takes it. Annotations of types that a
    plan cannot hold allow every value.

    >>> read_value(Annotated[float, above(0)], 1, "local.lr")
    1.0
    """
    from_plain = getattr(hint, "from_plain", None)
    if from_plain is not None:  # a part or a table has a reader of its own
        with errors_naming(owner):
            return from_plain(value, where)
    hint, limits = split(hint)
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return _read_union(get_args(hint), value, where, owner)
    if origin in LIST_TYPES:
        return _read_list(hint, value, where, owner)
    subject = f"{owner}: {where}" if owner else where
    if origin is Literal:
        return _read_choice(hint, value, subject)
    if hint in TYPE_NAMES:
        return _read_scalar(hint, limits, value, subject)
    return value


@contextmanager
def errors_naming(owner: str) -> Iterator[None]:
    """Put the name of a part in front of every PlanError that does not contain it."""
    try:
        yield
    except PlanError as error:
        if owner in str(error):
            raise
        raise PlanError(f"{owner}: {error}") from error


def split(hint: Any) -> tuple[Any, Range]:
    """Split `Annotated[X, Range(...)]` into X and its range; without a range every finite number is allowed.

    >>> split(Positive)[1] == above(0)
    True
    """
    if get_origin(hint) is not Annotated:
        return hint, Range()
    base, *notes = get_args(hint)
    return base, next((note for note in notes if isinstance(note, Range)), Range())


def _read_scalar(kind: type, limits: Range, value: Any, subject: str) -> Any:
    """Check a number, a text or a truth value."""
    fits = isinstance(value, int | float if kind is float else kind)
    if not fits or (isinstance(value, bool) and kind is not bool):
        allowed = TYPE_NAMES[kind] + limits.after_kind
        raise WrongKind(f"{subject} must be {allowed}, got {show_value(value)}{_quotes_hint(kind, value)}")
    if kind not in (int, float):
        return value
    number = _as_float(value) if kind is float else value
    if kind is float and (math.isnan(number) or (math.isinf(number) and not limits.infinite)):
        allowed = f"a finite number{limits.after_kind}"
        raise PlanError(f"{subject} must be {allowed}, got {show_value(value)}{_range_hint(limits)}")
    largest = WHOLE_LIMIT if limits.high == math.inf else int(limits.high)
    if kind is int and abs(number) > largest >= WHOLE_LIMIT:
        raise PlanError(f"{subject} must be a whole number below 2^{largest.bit_length()}, got {show_value(value)}")
    if number not in limits:
        raise PlanError(f"{subject} must be {limits}, got {show_value(value)}{_range_hint(limits)}")
    return number


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number that exceeds every float
        return math.inf if value > 0 else -math.inf


def _range_hint(limits: Range) -> str:
    return f"; {limits.hint}" if limits.hint else ""


def _quotes_hint(kind: type, value: Any) -> str:
    """Return advice to leave out the quotes if the text is a valid number without them, else ""."""
    if kind not in (int, float) or not isinstance(value, str):
        return ""
    try:
        kind(value)
    except ValueError:
        return ""
    return ": leave out the quotes"


def _read_choice(hint: Any, value: Any, subject: str) -> Any:
    """Check that a value is one of the choices of a Literal; 1, 1.0 and True are different."""
    choices = get_args(hint)
    if any(value == choice and type(value) is type(choice) for choice in choices):
        return value
    names = [choice for choice in choices if isinstance(choice, str)]
    suggestion = close_to(value, names) if isinstance(value, str) else ""
    raise WrongKind(
        f"{subject} must be {describe(hint)}, got {show_value(value)}{f': {suggestion}' if suggestion else ''}"
    )


def _read_list(hint: Any, value: Any, where: str, owner: str) -> Any:
    """Check each item of a list; a single value is read as a list of one."""
    items = value if isinstance(value, list | tuple) else [value]
    kinds = [kind for kind in get_args(hint) if kind is not ...]
    if len(kinds) == 1:
        kinds = kinds * len(items)
    if len(kinds) != len(items):
        raise WrongKind(f"{f'{owner}: ' if owner else ''}{where} must be {describe(hint)}, got {show_value(value)}")
    pairs = enumerate(zip(kinds, items, strict=True))
    values = [read_value(kind, item, f"{where}[{index}]", owner) for index, (kind, item) in pairs]
    return tuple(values) if get_origin(hint) is tuple else values


def _read_union(hints: tuple[Any, ...], value: Any, where: str, owner: str) -> Any:
    """Check a value of one of several types.

    Where one type fits and only its range is violated, raise the error of that type, since it says more than a list of
    all types.
    """
    if value is None and type(None) in hints:
        return None
    kinds = [hint for hint in hints if hint is not type(None)]
    problems: list[PlanError] = []
    for hint in kinds:
        try:
            return read_value(hint, value, where, owner)
        except PlanError as error:
            problems.append(error)
    range_errors = [problem for problem in problems if not isinstance(problem, WrongKind)]
    if range_errors or len(problems) == 1:
        raise (range_errors or problems)[0]
    subject = f"{owner}: {where}" if owner else where
    raise WrongKind(f"{subject} must be {' or '.join(map(describe, kinds))}, got {show_value(value)}")


def describe(hint: Any) -> str:
    """Describe in words the values that an annotation allows.

    >>> describe(Count), describe(Literal["loss", "norm"] | None), describe(tuple[int, ...])
    ('a whole number of at least 1', "'loss' or 'norm'", 'a list, each item a whole number')
    """
    base, limits = split(hint)
    origin, args = get_origin(base), _plain_args(base)
    if origin is Literal:
        return _joined_by_or([repr(choice) for choice in args])
    if origin in (Union, UnionType):
        return " or ".join(map(describe, args))
    if origin in LIST_TYPES:
        return f"a list{f' of {len(args)}' if len(args) > 1 else ''}, each item {describe(args[0])}"
    if base in TYPE_NAMES:
        return TYPE_NAMES[base] + limits.after_kind
    return getattr(base, "in_words", "anything")


def _plain_args(base: Any) -> list[Any]:
    """Return the type arguments of an annotation without `...` and None."""
    return [arg for arg in get_args(base) if arg not in (..., type(None))]


def _joined_by_or(words: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def show_value(value: object) -> str:
    """Format a value for an error text: mark strings as text, and cut long values.

    >>> show_value("8"), show_value(8)
    ("the text '8'", '8')
    """
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        return f"{type(value).__name__} that is too long to show"
    text = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
    return f"the text {text}" if isinstance(value, str) else text


def option_hints(function: Callable[..., Any], num_args: int = 0) -> dict[str, Any]:
    """Return the annotation of each option of a part, by name; skip the first `num_args`, which are passed by position.

    >>> def rule(dataset: object, alpha: Positive = 1.0) -> None: ...
    >>> list(option_hints(rule, 1))
    ['alpha']
    """
    parameters = list(inspect.signature(function).parameters.values())[num_args:]
    keywords = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY)]
    return {parameter.name: _resolved_hint(function, parameter) for parameter in keywords}


def is_plain(hint: Any) -> bool:
    """Return whether a plan can hold values of this annotation: numbers, texts, lists and parts, or Any."""
    base, _ = split(hint)
    if get_origin(base) in (Union, UnionType, *LIST_TYPES):
        return all(map(is_plain, _plain_args(base)))
    readable = hasattr(base, "from_plain") and not getattr(base, "is_whole", False)
    return base is Any or base in TYPE_NAMES or get_origin(base) is Literal or readable


def _resolved_hint(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """Evaluate an annotation in the module of its function; Any for one that cannot be evaluated at run time."""
    if parameter.annotation is inspect.Parameter.empty:
        return Any
    untyped: Any = function
    written_in = untyped.__init__ if isinstance(function, type) else inspect.unwrap(function)

    def holder() -> None: ...

    holder.__annotations__ = {"it": parameter.annotation}
    try:
        return get_type_hints(holder, getattr(written_in, "__globals__", {}), include_extras=True)["it"]
    except (NameError, AttributeError, TypeError, SyntaxError):
        return Any
