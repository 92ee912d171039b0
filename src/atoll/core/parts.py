"""Part: a named, exchangeable component of a plan, found by convention.

`fedprox` in the family `algorithms` is `atoll.algorithms.fedprox:fedprox`; `my_pkg.my_mod:rule` is a user's own
function. There is no registry: a new member is one new file.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from atoll.core.errors import AtollError, PlanError, nearest
from atoll.core.options import errors_naming, is_plain, option_hints, read_value, show_value
from atoll.core.suggestions import suggest

Value = bool | int | float | str | list["Value"] | dict[str, "Value"] | None


class Part:
    """A name and its options, such as `Part("fedprox", mu=0.1)`; a user's own function may replace the name.

    >>> Part("fedprox", mu=0.1).to_dict()
    {'name': 'fedprox', 'mu': 0.1}
    """

    __slots__ = ("call", "name", "options", "where")
    in_words: ClassVar[str] = "a name or a table with a name"

    def __init__(self, name: str | Callable[..., Any], /, **options: Any) -> None:
        call = None if isinstance(name, str) else name
        if call is not None and not hasattr(call, "__qualname__"):
            raise PlanError(
                f"a part is a name, a function or a class, got {call!r}: pass its options as keywords of Part instead"
            )
        label = name if isinstance(name, str) else f"{name.__module__}:{name.__qualname__}"
        self.name: str = label
        self.options: dict[str, Any] = {key: _plain(value, f"{label}.{key}") for key, value in options.items()}
        self.call: Callable[..., Any] | None = call
        self.where = ""  # key in the plan, for error texts

    @classmethod
    def of(cls, value: object, *, default: str = "", where: str = "") -> Part:
        """Read a part from a name, a table with a name in it, a function, or another part."""
        if isinstance(value, Part):
            return value._at(where)
        if hasattr(value, "as_part"):
            return cls.of(value.as_part(), where=where)  # an object that a plan may hold, such as a data set
        if isinstance(value, str) or callable(value):
            return cls(value)._at(where)
        if isinstance(value, Mapping):
            options = {str(key): option for key, option in value.items()}
            name = options.pop("name", default)
            if not isinstance(name, str) or not name:
                raise PlanError(f'{where} needs a name: add name = "..." to its table, got {show_value(value)}')
            return cls(name, **options)._at(where)
        raise PlanError(f"{where} must be {cls.in_words}, got {show_value(value)}")

    @classmethod
    def from_plain(cls, value: object, where: str) -> Part:
        """Read a part that is the value of a setting; a table without a name gets the default name of its key."""
        return cls.of(value, default=DEFAULT_NAMES.get(where, ""), where=where)

    def _at(self, where: str) -> Part:
        """Return this part with its key in a plan set."""
        if where == self.where or not where:
            return self
        part = Part(self.call or self.name, **self.options)
        part.where = where
        return part

    def to_dict(self) -> dict[str, Any]:
        """Return the part as plain data."""
        return {"name": self.name, **self.options}

    def build(self, family: str, *args: Any, **defaults: Any) -> Any:
        """Find the part's function and call it with `args`, the plan's options, and those `defaults` that it takes.

        Options are checked by the annotations of the function: their types, ranges, and that numbers are finite.
        """
        with errors_naming(self.where):
            function = self.call or find(family, self.name)
        options = self._checked_options(function, len(args), defaults)
        used_defaults = self._used_defaults(function, defaults)
        try:
            with errors_naming(self.name):
                return function(*args, **used_defaults, **options)
        except AtollError:
            raise
        except (TypeError, ValueError) as error:
            raise PlanError(f"{self._title} refused its options {self.options}: {error}") from error
        except Exception as error:
            raise PlanError(
                f"{self._title} failed with {type(error).__name__}: {error}; correct it or its options {self.options}"
            ) from error

    def _used_defaults(self, function: Callable[..., Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return the caller's defaults that the function takes and the plan does not set."""
        parameters = inspect.signature(function).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        return {
            key: value
            for key, value in defaults.items()
            if (key in parameters or takes_any) and key not in self.options
        }

    def _checked_options(
        self, function: Callable[..., Any], num_args: int, defaults: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the options in the function's types; refuse unknown, missing and wrong ones by their keys."""
        parameters = inspect.signature(function).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        hints = option_hints(function, num_args)
        # An argument such as a dataset is set by the caller alone: no plan can hold its value.
        hints = {name: hint for name, hint in hints.items() if name not in defaults or is_plain(hint)}
        options = {}
        for option, value in self.options.items():
            if option not in hints and (option in parameters or not takes_any):
                raise PlanError(f"{self._title} has no option '{option}': {suggest(option, hints, self.where)}")
            options[option] = read_value(hints.get(option, Any), value, self._key(option), self.name)
        required = [name for name in hints if parameters[name].default is inspect.Parameter.empty]
        missing = [self._key(name) for name in required if name not in options and name not in defaults]
        if missing:
            example = f", e.g. --set {missing[0]}=VALUE" if self.where and "[" not in self.where else ""
            verb, them = ("is", "it") if len(missing) == 1 else ("are", "them")
            raise PlanError(f"{self.name}: {', '.join(missing)} {verb} missing: give {them} a value{example}")
        return options

    def _key(self, option: str) -> str:
        """Return the key of an option in the plan; its bare name if the part's own key is unknown."""
        return f"{self.where}.{option}" if self.where else option

    @property
    def _title(self) -> str:
        return f"{self.where} {self.name}" if self.where else self.name

    def __or__(self, other: Part) -> Part:
        """Return a mixture: the first part deals out the samples, and the others change the result in turn.

        >>> (Part("dirichlet", alpha=0.1) | Part("rotation")).to_dict()
        {'name': 'mixture', 'parts': [{'name': 'dirichlet', 'alpha': 0.1}, {'name': 'rotation'}]}
        """
        mixed = [part.options["parts"] if part.name == "mixture" else [part.to_dict()] for part in (self, other)]
        return Part("mixture", parts=mixed[0] + mixed[1])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Part) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash((self.name, repr(self.options)))

    def __repr__(self) -> str:
        return f"Part({', '.join([repr(self.name), *(f'{k}={v!r}' for k, v in self.options.items())])})"


DEFAULT_NAMES = {
    "data": "digits",
    "partition": "iid",
    "model": "logistic",
    "algorithm": "fedavg",
    "policy": "cohort",
    "sampler": "uniform",
    "aggregator": "mean",
    "engine": "auto",
    "local.optimizer": "sgd",
    "local.schedule": "constant",
    "secagg.scheme": "pairwise",
    "split.parties.model": "mlp",
}
"""Key in a plan -> name of the part, for a table without a name."""


def _plain(value: Any, where: str) -> Value:
    """Return an option as a plan file would hold it, so that every run can be saved and resumed."""
    if getattr(value, "ndim", None) == 0:
        value = value.item()  # a NumPy scalar
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Part):
        return value.to_dict()
    if isinstance(value, list | tuple):
        return [_plain(item, where) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item, where) for key, item in value.items()}
    if value is None:
        raise PlanError(f"option {where} is None: leave it out")
    raise PlanError(
        f"option {where} must be a number, text, list or table, got {type(value).__name__}: name it instead"
    )


def members(family: str) -> list[str]:
    """List the members of a family, such as `algorithms`, from its folder, without helper modules."""
    package = importlib.import_module(f"atoll.{family}")
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if _is_member(family, m.name))


def _is_member(family: str, name: str) -> bool:
    """Return whether a module defines a function of its own name; read its source, since an import may be slow."""
    spec = importlib.util.find_spec(f"atoll.{family}.{name}") if name.isidentifier() else None
    loader: Any = spec.loader if spec else None
    return loader is not None and f"\ndef {name}(" in (loader.get_source(f"atoll.{family}.{name}") or "")


def find(family: str, name: str) -> Callable[..., Any]:
    """Return the function of a member of a family by its name, or a user's own as `module:function`."""
    if ":" in name:
        return imported(name)
    if not _is_member(family, name):
        raise PlanError(
            f"there is no '{name}' in {family}: {nearest(name, members(family))}; yours is 'module:function'"
        )
    member: Callable[..., Any] = getattr(importlib.import_module(f"atoll.{family}.{name}"), name)
    return member


def examples(family: str, member: str | Callable[..., Any]) -> list[dict[str, Any]]:
    """Return settings to try a member with: `EXAMPLE`, or several `EXAMPLES`, beside it in its module, else none.

    >>> examples("aggregators", "krum"), examples("aggregators", "median")
    ([{'f': 1}, {'f': 2}], [{}])
    """
    function = find(family, member) if isinstance(member, str) else member
    own = isinstance(member, str) and ":" in member
    module = sys.modules[str(member).partition(":")[0] if own else function.__module__]
    several = getattr(module, "EXAMPLES", None) or [getattr(module, "EXAMPLE", {})]
    return [dict(settings) for settings in several]


def imported(path: str) -> Callable[..., Any]:
    """Import `package.module:function`, also from the working directory."""
    module_name, _, attribute = path.partition(":")
    if attribute.startswith("<"):
        raise PlanError(
            f"'{path}' is an object of the script that made this plan, which no file, command or other process can "
            "hold: run the plan in that script, or name a function that returns such an object, as 'module:function'"
        )
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise PlanError(
            f"cannot import '{module_name}' for '{path}': {type(error).__name__}: {error}; "
            "check the spelling and run from the directory that holds it, or install it"
        ) from error
    target: Any = module
    for piece in attribute.split("."):
        if not hasattr(target, piece):
            public = [n for n in dir(target) if not n.startswith("_")]
            raise PlanError(f"'{module_name}' has no '{attribute}': {nearest(piece, public)}")
        target = getattr(target, piece)
    if not callable(target):
        raise PlanError(f"'{path}' is not a function but {type(target).__name__}: name a function")
    function: Callable[..., Any] = target
    return function
