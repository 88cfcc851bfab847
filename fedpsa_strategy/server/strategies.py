"""Methods as Flower strategies: their settings are keyword arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

from flwr.app import ArrayRecord
from numpy.typing import NDArray

from fedpsa_strategy.checks import describe_range
from fedpsa_strategy.methods.ace import ACEMethod
from fedpsa_strategy.methods.aced import ACEDMethod
from fedpsa_strategy.methods.area import AREAMethod
from fedpsa_strategy.methods.base import Given, Method, Vector, check_declared
from fedpsa_strategy.methods.ca2fl import CA2FLMethod
from fedpsa_strategy.methods.fadas import FADASMethod
from fedpsa_strategy.methods.fedac import FedACMethod
from fedpsa_strategy.methods.fedasync import FedAsyncMethod
from fedpsa_strategy.methods.fedavg import FedAvgMethod
from fedpsa_strategy.methods.fedbuff import FedBuffMethod
from fedpsa_strategy.methods.fedfa import FedFaMethod
from fedpsa_strategy.methods.mapped_memory import MappedMemory
from fedpsa_strategy.methods.midpoint import MidpointMethod
from fedpsa_strategy.methods.rescaled import RescaledMethod
from fedpsa_strategy.server.strategy import AsyncStrategy


def _docstring(method: type[Method]) -> str:
    lines = [inspect.getdoc(method) or method.label, "", "Parameters", "----------"]
    for item in fields(method):
        lines += [
            f"{item.name} : {type(item.default).__name__} (default: {item.default!r})",
            f"    {item.metadata['meaning']}; {describe_range(item.metadata)}.",
        ]
    return "\n".join([*lines, "**kwargs : Any", "    See `AsyncStrategy`."])


def _signature(method: type[Method]) -> inspect.Signature:
    keyword = inspect.Parameter.KEYWORD_ONLY
    own = [
        inspect.Parameter(item.name, keyword, default=item.default, annotation=type(item.default))
        for item in fields(method)
    ]
    rest = inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD, annotation=Any)
    return inspect.Signature([*own, rest])


class MethodStrategy(AsyncStrategy):
    """Runs a method; base of the strategies that are named after one.

    Parameters
    ----------
    method : Method (default: None)
        The method; None makes one from the keyword arguments that are its settings.
    memory_path : str | Path (default: None)
        For methods that remember every client: a file for that memory, which is memory-mapped; None
        keeps it in memory.
    sketch : Callable[[Vector], Sequence[float]] (default: None)
        For methods that need sketches, the sketch of a global model; see `FedPSA`.
    **kwargs : Any
        Settings of the method, and arguments of `AsyncStrategy`.
    """

    method_type: ClassVar[type[Method]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "method_type" in cls.__dict__ and "__init__" not in cls.__dict__:
            cls.__doc__ = _docstring(cls.method_type)
            cls.__signature__ = _signature(cls.method_type)  # type: ignore[attr-defined]

    def __init__(
        self,
        *,
        method: Method | None = None,
        memory_path: str | Path | None = None,
        sketch: Callable[[Vector], Sequence[float] | NDArray[Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        if method is None:
            method = self.method_type.taken_from(kwargs)
        if method.needs_sketch and sketch is None:
            raise ValueError(
                f"{method.label} needs sketches: use FedPSA(method=..., sketch_fn=...)"
            )
        if method.remembers_clients and kwargs.get("num_clients") is None:
            raise ValueError(
                f"{method.label} remembers every client: say how many, num_clients=..."
            )
        if getattr(method, "memory", "") == "file" and memory_path is None:
            raise ValueError(f"{method.label} with memory='file': say which file, memory_path=...")
        in_memory = not method.remembers_clients or getattr(method, "memory", "") == "half"
        if memory_path is not None and in_memory:
            raise ValueError(
                f"memory_path = {str(memory_path)!r}: {method.label} keeps nothing in a file"
            )
        self.method = method
        self.memory_path = None if memory_path is None else Path(memory_path)
        given = Given(kwargs.get("num_clients") or 1, sketch)
        super().__init__(rule=method.make_rule(given), **kwargs)

    def begin(self, arrays: ArrayRecord, node_ids: Iterable[int] = ()) -> None:
        """Set up a new run, with a memory of clients on disk if that is wanted."""
        super().begin(arrays, node_ids)
        if self.memory_path is not None:
            layout = self.state.layout
            memory = MappedMemory(self.memory_path, layout.size, layout.dtype)
            self.rule.memory = memory


class FedBuff(MethodStrategy):  # noqa: D101
    method_type = FedBuffMethod


class CA2FL(MethodStrategy):  # noqa: D101
    method_type = CA2FLMethod


class Midpoint(MethodStrategy):  # noqa: D101
    method_type = MidpointMethod


class FedAsync(MethodStrategy):  # noqa: D101
    method_type = FedAsyncMethod


class FedFa(MethodStrategy):  # noqa: D101
    method_type = FedFaMethod


class FedAvg(MethodStrategy):  # noqa: D101
    method_type = FedAvgMethod


class ACE(MethodStrategy):  # noqa: D101
    method_type = ACEMethod


class ACED(MethodStrategy):  # noqa: D101
    method_type = ACEDMethod


class AREA(MethodStrategy):  # noqa: D101
    method_type = AREAMethod


class FADAS(MethodStrategy):  # noqa: D101
    method_type = FADASMethod


class FedAC(MethodStrategy):  # noqa: D101
    method_type = FedACMethod


class Rescaled(MethodStrategy):  # noqa: D101
    method_type = RescaledMethod


def strategy_of(method: type[Method]) -> type[MethodStrategy]:
    """Return a method as a strategy class, for methods that need nothing special of the server.

    Raises
    ------
    TypeError
        When its settings are not declared as they must be.
    """
    check_declared(method)
    return type(method.label, (MethodStrategy,), {"method_type": method})
