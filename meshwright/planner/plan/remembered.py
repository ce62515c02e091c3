"""The planner's memory: a function of a config remembers results by named fields.

    class Parts:
        @remembered("model", "layout.tensor", "micro")
        def kept_bytes(self, config: Config, layers: int) -> int: ...

A result's key is the named fields' values and the other arguments. In place of the config the function gets a view
with the named fields only. So a key without a field that the function reads is an error, not a wrong plan.

| read from a view                | result                                                                        |
|---------------------------------|-------------------------------------------------------------------------------|
| a named field                   | the field's value                                                             |
| a section with named fields     | a view of the section                                                         |
| a named property (`micro`)      | the property's value in the config                                            |
| another property, a method      | evaluated with the view as `self`: it can read named fields only              |
| another field                   | UnnamedField                                                                  |
| `model_copy`, hence with_field  | a view with the new values, named or not; named properties are evaluated anew |

So a function that does not depend on a field replaces the field, and needs not name it.

A section that may be of several classes (model, data, layout.tensor) is named as a whole: the class is a fact, too.
A view has no equality and no hash: a section that is part of a key is named. The results of a method are stored in its
instance, and live as long.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cache, wraps
from inspect import isfunction
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

from meshwright.config import Config
from meshwright.config.section import Section, with_field

F = TypeVar("F", bound=Callable[..., Any])

LAYER = ("layout.data.expert", "layout.context", "layout.tensor")
"""The fields that say how a layer is cut."""

PARTS = (
    "model", "data", "loss", "bits", "precision", "compile", "memory.summa", "memory.logits", "layout.data.exchange",
    *LAYER,
)  # fmt: skip
"""The fields on which a part of the model depends under any layout of stages and replicas."""


COUNTS = ("micro", "num_microbatches", "widens_gradients")
"""Properties that depend on the batch and the number of replicas, whichever other fields are replaced."""


class UnnamedField(AttributeError):
    """A remembered function has read a field that is not in its key."""


class _Reader(NamedTuple):
    """A remembered function, for the error."""

    name: str
    fields: tuple[str, ...]


class View:
    """A section with some of its fields. `values`: of fields and properties by name; `above`: the section's dotted name
    and a point."""

    _kind: type[Section]
    _reader: _Reader
    _above: str

    def __init__(
        self, section_class: type[Section], values: Mapping[str, Any], reader: _Reader, above: str = ""
    ) -> None:
        # Values are attributes, as a section's fields are: __getattr__ is for other names only, and ten times slower.
        self.__dict__ = {**values, "_kind": section_class, "_reader": reader, "_above": above}

    def __getattr__(self, name: str) -> Any:
        how, member = _member(self._kind, name)
        if how == "property":
            # Kept as an attribute of the view, which never changes.
            self.__dict__[name] = value = member(self)
            return value
        if how == "section":
            return View(member, {}, self._reader, f"{self._above}{name}.")
        if how == "field":
            raise self._unnamed(name)
        return member.__get__(self, self._kind) if how == "method" else member

    def model_copy(self, *, update: Mapping[str, Any]) -> View:
        """Return the view with other values. As in a section, nothing is checked."""
        fields = self._kind.model_fields
        values = {name: value for name, value in vars(self).items() if name in fields}
        return View(self._kind, {**values, **update}, self._reader, self._above)

    def _as_a_whole(self, *_: object) -> NoReturn:
        raise self._unnamed("", " as a whole")

    __eq__ = __hash__ = _as_a_whole

    def _unnamed(self, name: str, how: str = "") -> UnnamedField:
        path, named = (self._above + name).removesuffix(".") or "the config", ", ".join(self._reader.fields)
        return UnnamedField(
            f"{self._reader.name} reads {path}{how}, but is remembered by {named} alone: name it, or replace it"
        )


@cache
def _member(section_class: type[Section], name: str) -> tuple[str, Any]:
    """(`section`, a field that is a section of one class, `field`, `property`, `method`, `value`; class, function or
    value)."""
    if name in section_class.model_fields:
        annotation = section_class.model_fields[name].annotation
        of_one_class = isinstance(annotation, type) and issubclass(annotation, Section)
        return ("section", annotation) if of_one_class else ("field", None)
    for base in section_class.__mro__[: section_class.__mro__.index(Section)]:
        if name in vars(base):
            found = vars(base)[name]
            if isinstance(found, property):
                return "property", found.fget
            return ("method" if isfunction(found) else "value"), found
    raise AttributeError(f"{section_class.__name__} has no {name}")


def viewer(fields: tuple[str, ...], reader: str) -> Callable[[Config], Config]:
    """Return a function that makes a view of a config with these fields, for a function `reader`.

    Raises:
        AttributeError: a section has no member of a name.
        TypeError: a name that is no field or property, or a part of a section that may be of several classes.
    """
    about = _Reader(reader, fields)

    def of_section(section_class: type[Section], above: str) -> Callable[[Any], View]:
        names: list[str] = []
        inner: list[tuple[str, Callable[[Any], View]]] = []
        for name in dict.fromkeys(
            each.removeprefix(above).partition(".")[0] for each in fields if each.startswith(above)
        ):
            how, member = _member(section_class, name)
            if above + name in fields:
                if how not in ("field", "section", "property"):
                    raise TypeError(f"{reader} is remembered by {above}{name}, which is neither a field nor a property")
                names.append(name)
            elif how == "section":
                inner.append((name, of_section(member, f"{above}{name}.")))
            else:
                rule = f"{name} is no section of one class: name it whole"
                raise TypeError(f"{reader} is remembered by a field of {above}{name}, but {rule}")

        def view(section: Any) -> View:
            known = {name: getattr(section, name) for name in names}
            for name, view_of in inner:
                known[name] = view_of(getattr(section, name))
            return View(section_class, known, about, above)

        return view

    return cast("Callable[[Config], Config]", of_section(Config, ""))


def replaced(config: Config, field: str, value: object, *names: str) -> Config:
    """Return a config or a view with another value of a field. `names`: properties that do not depend on the field,
    which a view keeps."""
    if not isinstance(config, View):
        return with_field(config, field, value)
    return with_field(config, field, value).model_copy(update={name: attrgetter(name)(config) for name in names})


_MISSING = object()


@dataclass
class _Results:
    """An instance's results of a function. A search's layouts have most sections outside of the layout in common, as
    the same objects: these are compared with the last ones, and hashed only if they are others."""

    shared: Hashable = _MISSING
    own: dict[Hashable, Any] = field(default_factory=dict)
    by_shared: dict[Hashable, dict[Hashable, Any]] = field(default_factory=dict)
    config: Config | None = None
    """The last one that was asked for, with its arguments and the result."""
    arguments: tuple[Hashable, ...] = ()
    latest: Any = None


SHARED = frozenset(("model", "data", "loss", "bits", "precision", "optimizer"))
"""The sections that a search does not vary."""


def remembered(*fields: str, last: bool = False) -> Callable[[F], F]:
    """Remember a method's results by these fields of its first argument, a config, and by its other arguments.

    Without fields no argument is a config. The other arguments are positional.

    Args:
        last: remember the last result only.

    Raises:
        TypeError: a name that is no field of a config.
    """

    def decorate(function: F) -> F:
        slot, view = f"_remembered_{function.__name__}", viewer(fields, function.__qualname__)
        whole = {each for each in fields if not any(each.startswith(f"{section}.") for section in fields)}
        shared = tuple(each for each in dict.fromkeys(fields) if each in SHARED)
        varied = tuple(each for each in dict.fromkeys(fields) if each in whole - SHARED)
        read_shared, read_own = (attrgetter(*names) if names else lambda config: None for names in (shared, varied))

        # A key is hashed once, since the hash of a section takes microseconds; and not at all if the last config is
        # asked for again, as a search does.
        @wraps(function)
        def of_config(self: Any, config: Config, *arguments: Hashable) -> Any:
            results: _Results | None = self.__dict__.get(slot)
            if results is None:
                results = vars(self)[slot] = _Results()
            if config is results.config and arguments == results.arguments:
                return results.latest
            sections = read_shared(config)
            if sections != results.shared:
                results.shared, results.own = sections, results.by_shared.setdefault(sections, {})
            known = results.own
            values = read_own(config)
            key = values, arguments
            result = known.get(key, _MISSING)
            if result is _MISSING:
                result = function(self, view(config), *arguments)
                if last:
                    known.clear()
                known[key] = result
            results.config, results.arguments, results.latest = config, arguments, result
            return result

        @wraps(function)
        def of_arguments(self: Any, *arguments: Hashable) -> Any:
            known: dict[Hashable, Any] | None = self.__dict__.get(slot)
            if known is None:
                known = vars(self)[slot] = {}
            result = known.get(arguments, _MISSING)
            if result is _MISSING:
                result = known[arguments] = function(self, *arguments)
            return result

        recall = of_config if fields else of_arguments
        vars(recall)["fields"] = fields
        return cast(F, recall)

    return decorate
