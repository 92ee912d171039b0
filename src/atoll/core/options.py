"""Options: what a setting may be, read from its annotation, so that the signature, the help and the check agree.

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

WORDS = {int: "a whole number", float: "a number", str: "text in quotes", bool: "true or false"}
LISTS = (list, tuple, Sequence)
WHOLE_LIMIT = 2**63 - 1
"""Whole numbers stay below 2^63 unless their range says otherwise: tensors and arrays hold no larger ones."""
SHOWN = 80
"""Characters of a value that an error shows."""


class WrongKind(PlanError):
    """A value of another type than the setting's, where a wrong number is a plain PlanError."""


class Range(NamedTuple):
    """The numbers that a setting may be. Both ends count unless they are open; `hint` says what to do instead.

    >>> str(Range(0, 1, open_high=True)), str(Range(low=1)), str(Range(low=0, open_low=True))
    ('in [0, 1)', 'at least 1', 'above 0')
    """

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    hint: str = ""
    infinite: bool = False
    """Whether infinity means something here; it is refused everywhere else, as NaN is always."""

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, int | float):
            return False
        above = value > self.low if self.open_low else value >= self.low
        return above and (value < self.high if self.open_high else value <= self.high)

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
        """The range as words that follow "a number"."""
        text = str(self)
        return f" of {text}" if text[:1].isdigit() or text.startswith("at ") else f" {text}" if text else ""


def at_least(low: float, hint: str = "") -> Range:
    """Allow this number and all above."""
    return Range(low=low, hint=hint)


def above(low: float, hint: str = "") -> Range:
    """Allow all numbers above this one."""
    return Range(low=low, open_low=True, hint=hint)


Count = Annotated[int, at_least(1)]
Seed = Annotated[int, Range(0, 2**256 - 1)]
Positive = Annotated[float, above(0)]
NotNegative = Annotated[float, at_least(0)]
Share = Annotated[float, Range(0, 1)]
ShareBelowOne = Annotated[float, Range(0, 1, open_high=True)]
ShareAboveZero = Annotated[float, Range(0, 1, open_low=True)]
Inside = Annotated[float, Range(0, 1, open_low=True, open_high=True)]


def read_value(hint: Any, value: Any, where: str, owner: str = "") -> Any:
    """Return a value as its setting wants it, or refuse it: say what was given and what is allowed.

    `where` is the setting's key in the plan, `owner` the part that takes it. Annotations that say nothing of plain data
    allow everything.

    >>> read_value(Annotated[float, above(0)], 1, "local.lr")
    1.0
    """
    from_plain = getattr(hint, "from_plain", None)
    if from_plain is not None:  # a part or a table, which reads itself
        with named(owner):
            return from_plain(value, where)
    hint, limits = split(hint)
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return _one_of(get_args(hint), value, where, owner)
    if origin in LISTS:
        return _items(hint, value, where, owner)
    subject = f"{owner}: {where}" if owner else where
    if origin is Literal:
        return _choice(hint, value, subject)
    if hint in WORDS:
        return _plain_value(hint, limits, value, subject)
    return value


@contextmanager
def named(owner: str) -> Iterator[None]:
    """Let refusals begin with the name of the part that they are about, unless they tell it."""
    try:
        yield
    except PlanError as error:
        if owner in str(error):
            raise
        raise PlanError(f"{owner}: {error}") from error


def split(hint: Any) -> tuple[Any, Range]:
    """Take `Annotated[X, Range(...)]` apart; without a range every finite number is allowed.

    >>> split(Positive)[1] == above(0)
    True
    """
    if get_origin(hint) is not Annotated:
        return hint, Range()
    base, *notes = get_args(hint)
    return base, next((note for note in notes if isinstance(note, Range)), Range())


def _plain_value(kind: type, limits: Range, value: Any, subject: str) -> Any:
    """Check a number, a text or a truth value."""
    fits = isinstance(value, int | float if kind is float else kind)
    if not fits or (isinstance(value, bool) and kind is not bool):
        allowed = WORDS[kind] + limits.after_kind
        raise WrongKind(f"{subject} must be {allowed}, got {shown(value)}{_unquote(kind, value)}")
    if kind not in (int, float):
        return value
    number = _as_float(value) if kind is float else value
    if kind is float and (math.isnan(number) or (math.isinf(number) and not limits.infinite)):
        raise PlanError(f"{subject} must be a finite number{limits.after_kind}, got {shown(value)}{_hint(limits)}")
    largest = WHOLE_LIMIT if limits.high == math.inf else int(limits.high)
    if kind is int and abs(number) > largest >= WHOLE_LIMIT:
        raise PlanError(f"{subject} must be a whole number below 2^{largest.bit_length()}, got {shown(value)}")
    if number not in limits:
        raise PlanError(f"{subject} must be {limits}, got {shown(value)}{_hint(limits)}")
    return number


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number beyond all floats
        return math.inf if value > 0 else -math.inf


def _hint(limits: Range) -> str:
    return f"; {limits.hint}" if limits.hint else ""


def _unquote(kind: type, value: Any) -> str:
    """Advise to leave the quotes out where a text would be fine without them."""
    if kind not in (int, float) or not isinstance(value, str):
        return ""
    try:
        kind(value)
    except ValueError:
        return ""
    return ": leave out the quotes"


def _choice(hint: Any, value: Any, subject: str) -> Any:
    """Check one of a few words or numbers; 1, 1.0 and True are different."""
    choices = get_args(hint)
    if any(value == choice and type(value) is type(choice) for choice in choices):
        return value
    meant = close_to(value, [choice for choice in choices if isinstance(choice, str)]) if isinstance(value, str) else ""
    raise WrongKind(f"{subject} must be {wanted(hint)}, got {shown(value)}{f': {meant}' if meant else ''}")


def _items(hint: Any, value: Any, where: str, owner: str) -> Any:
    """Check each item of a list; one item may stand for a list of one."""
    items = value if isinstance(value, list | tuple) else [value]
    kinds = [kind for kind in get_args(hint) if kind is not ...]
    if len(kinds) == 1:
        kinds = kinds * len(items)
    if len(kinds) != len(items):
        raise WrongKind(f"{f'{owner}: ' if owner else ''}{where} must be {wanted(hint)}, got {shown(value)}")
    pairs = enumerate(zip(kinds, items, strict=True))
    found = [read_value(kind, item, f"{where}[{place}]", owner) for place, (kind, item) in pairs]
    return tuple(found) if get_origin(hint) is tuple else found


def _one_of(hints: tuple[Any, ...], value: Any, where: str, owner: str) -> Any:
    """Check a value that may be of several kinds: a wrong number is told apart from a wrong kind."""
    if value is None and type(None) in hints:
        return None
    kinds = [hint for hint in hints if hint is not type(None)]
    problems: list[PlanError] = []
    for hint in kinds:
        try:
            return read_value(hint, value, where, owner)
        except PlanError as error:
            problems.append(error)
    telling = [problem for problem in problems if not isinstance(problem, WrongKind)]
    if telling or len(problems) == 1:
        raise (telling or problems)[0]
    subject = f"{owner}: {where}" if owner else where
    raise WrongKind(f"{subject} must be {' or '.join(map(wanted, kinds))}, got {shown(value)}")


def wanted(hint: Any) -> str:
    """Say in words what a setting may be.

    >>> wanted(Count), wanted(Literal["loss", "norm"] | None), wanted(tuple[int, ...])
    ('a whole number of at least 1', "'loss' or 'norm'", 'a list, each item a whole number')
    """
    base, limits = split(hint)
    origin, args = get_origin(base), [each for each in get_args(base) if each not in (..., type(None))]
    if origin is Literal:
        return _listed([repr(choice) for choice in args])
    if origin in (Union, UnionType):
        return " or ".join(map(wanted, args))
    if origin in LISTS:
        return f"a list{f' of {len(args)}' if len(args) > 1 else ''}, each item {wanted(args[0])}"
    if base in WORDS:
        return WORDS[base] + limits.after_kind
    return getattr(base, "in_words", "anything")


def _listed(words: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def shown(value: object) -> str:
    """A value as an error message shows it; texts are told from numbers, and long ones are cut.

    >>> shown("8"), shown(8)
    ("the text '8'", '8')
    """
    try:
        text = repr(value)
    except ValueError:  # Python does not write numbers of thousands of digits
        return f"{type(value).__name__} that is too long to show"
    text = text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
    return f"the text {text}" if isinstance(value, str) else text


def option_hints(function: Callable[..., Any], num_args: int = 0) -> dict[str, Any]:
    """The options of a part by name, each with its annotation; the first arguments, passed by place, are none.

    >>> def rule(dataset: object, alpha: Positive = 1.0) -> None: ...
    >>> list(option_hints(rule, 1))
    ['alpha']
    """
    parameters = list(inspect.signature(function).parameters.values())[num_args:]
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY)]
    return {parameter.name: _hint_of(function, parameter) for parameter in named}


def is_plain(hint: Any) -> bool:
    """Whether a plan can hold values for this annotation: numbers, texts, lists and parts, or anything at all."""
    base, _ = split(hint)
    inner = [each for each in get_args(base) if each not in (..., type(None))]
    if get_origin(base) in (Union, UnionType, *LISTS):
        return all(map(is_plain, inner))
    return base is Any or base in WORDS or get_origin(base) is Literal or hasattr(base, "from_plain")


def _hint_of(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """What an annotation means where it was written; one that only a type checker understands allows everything."""
    if parameter.annotation is inspect.Parameter.empty:
        return Any
    anything: Any = function
    written_in = anything.__init__ if isinstance(function, type) else inspect.unwrap(function)

    def holder() -> None: ...

    holder.__annotations__ = {"it": parameter.annotation}
    try:
        return get_type_hints(holder, getattr(written_in, "__globals__", {}), include_extras=True)["it"]
    except (NameError, AttributeError, TypeError, SyntaxError):
        return Any
