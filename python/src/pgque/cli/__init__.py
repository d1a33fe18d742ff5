"""The command `pgque`, a module for each group of commands.

`program` puts them together, and `common` is what they share. Public is `main`, the command itself.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .program import main
else:
    # Imported with its first use: the web page and the demo need `common` alone.
    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from .program import main

        return main


__all__ = ["main"]
