"""SGLang's detokenizer process, for texts that grow by several tokens at once.

While a text ends inside a character, SGLang streams a part of it chosen by a rule about words and
CJK characters. That part may be shorter than the one before, and what lies between the two is then
streamed twice; with runs of tokens that is frequent. Here it is all that is whole: it only grows.
"""

from __future__ import annotations

from typing import Any


def printable_text(text: str) -> str:
    """`text` without the incomplete character at its end."""
    return text.rstrip("\ufffd")


def run_detokenizer_process(*args: Any, **kwargs: Any) -> None:
    """SGLang's function of this name, in a process of its own."""
    from sglang.srt.managers import detokenizer_manager

    detokenizer_manager.find_printable_text = printable_text
    detokenizer_manager.run_detokenizer_process(*args, **kwargs)


def launch(orig: Any, cls: type, *, run_detokenizer_process_func: Any, **kwargs: Any) -> Any:
    """Hook around `Engine._launch_detokenizer_subprocesses`: ours instead of SGLang's own."""
    from sglang.srt.managers import detokenizer_manager

    if run_detokenizer_process_func is detokenizer_manager.run_detokenizer_process:
        run_detokenizer_process_func = run_detokenizer_process
    return orig(cls, run_detokenizer_process_func=run_detokenizer_process_func, **kwargs)
