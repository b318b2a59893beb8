"""Speculative Speculative Decoding for SGLang.

While the target model verifies one speculation, a draft model on other hardware predicts how that
verification may end and drafts ahead for each likely ending.
"""

from pathlib import Path as _Path
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from sgl_ssd.engine import Engine as Engine

__version__ = "0.1.0"

# An installed distribution has `scheduler` and `draft_server` inside this folder. In a source tree
# they lie beside it, and a process started at the top of that tree finds this folder first, also
# when a wheel is installed. Looking beside this folder as well makes the imports the same there.
_here = _Path(__file__).parent
if not (_here / "scheduler").is_dir() and (_here.parent / "draft_server/__init__.py").is_file():
    __path__.append(str(_here.parent))


def __getattr__(name: str) -> _Any:
    # SGLang takes seconds to import: only for those who want an engine.
    if name == "Engine":
        from sgl_ssd.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
