"""Names that a package offers from its modules, each imported when it is first asked for (PEP 562).

So `import idempotency_django` needs neither Django's settings nor an extra.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any


def lazily(
    package: str, namespace: dict[str, Any], homes: Mapping[str, str]
) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package.

    It has no ``__dir__``: tools that read each name of each module, such as freezegun, would import
    what the project has not installed.

    Args:
        package: its name.
        namespace: its ``globals()``, where a name is kept once it was imported.
        homes: the names, and the module in the package that each comes from; with a dot in front,
            in the package above.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        namespace[name] = getattr(import_module(f".{homes[name]}", package), name)
        return namespace[name]

    return get


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Have an import of a package that is missing say which extra to install.

    Args:
        name: the extra that the block's imports need, such as ``"celery"``.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        text = f'{error.msg}. Install it with: pip install "idempotency-django[{name}]"'
        raise ModuleNotFoundError(text, name=error.name) from error
