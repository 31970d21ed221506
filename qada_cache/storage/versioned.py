"""Buffers whose replacement is counted: a count that has changed tells that references to buffers are outdated."""

from typing import TYPE_CHECKING, Generic, TypeVar

T = TypeVar("T")


class Versioned:
    """An object that has buffers."""

    replaced = 0  # how often one of them was replaced by another


class Buffer(Generic[T]):
    """An attribute of a `Versioned` that others refer to, as they do to the memory of a tensor. It is kept among the
    owner's own attributes, where it is read as fast as any other."""

    def __set_name__(self, owner: type[Versioned], name: str) -> None:
        self.name = name

    if TYPE_CHECKING:

        def __get__(self, owner: Versioned, kind: type[Versioned] | None = None) -> T: ...

    def __set__(self, owner: Versioned, value: T) -> None:
        owner.replaced += owner.__dict__.get(self.name, owner) is not value
        owner.__dict__[self.name] = value
