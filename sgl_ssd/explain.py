"""`"return_ssd_trace": true`: a request's rounds in the `meta_info` of its answer.

In the HTTP process, around two methods of SGLang's `TokenizerManager`. The wish stands in the body
of the request, or in its `custom_params`, which is also how it travels to the scheduler; the rounds
come back as `customized_info`. Requests without it pass by untouched.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

FIELD = "return_ssd_trace"
KEY = "ssd_trace"
LAST_ROUNDS = 256
MAX_REQUESTS = 4096  # whose rounds are kept until their answer is taken

_rounds: OrderedDict[str, deque[dict[str, Any]]] = OrderedDict()


def install() -> None:
    """Register the hooks with SGLang; they still have to be applied."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    manager = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    for name, hook in (
        ("generate_request", _generate_request),
        ("_handle_batch_output", _handle_batch_output),
    ):
        HookRegistry.register(f"{manager}.{name}", hook, HookType.AROUND)


def wanted(custom_params: Any) -> bool:
    """Whether these `custom_params` of a request ask for its rounds.

    Raises `ValueError`, which SGLang answers with HTTP 400, for anything but true and false.
    """
    value = custom_params.get(FIELD, False) if isinstance(custom_params, dict) else False
    if not isinstance(value, bool):
        raise ValueError(f"{FIELD} must be true or false, not {value!r}")
    return value


def _generate_request(orig: Any, manager: Any, obj: Any, request: Any = None) -> Any:
    if _ask(obj, request):
        return _with_rounds(orig(manager, obj, request))
    return orig(manager, obj, request)


def _ask(obj: Any, request: Any) -> bool:
    """Whether a request asks; what its body says goes into its `custom_params`."""
    # FastAPI has parsed the body already; what its own model of it does not know is only here.
    body = getattr(request, "_json", None)
    in_body = wanted(body)
    params = getattr(obj, "sampling_params", None)
    if not in_body and not params:
        return False
    rows = params if isinstance(params, list) else [params or {}]
    if in_body and hasattr(obj, "sampling_params"):
        rows = [
            {**row, "custom_params": {**(row.get("custom_params") or {}), FIELD: True}}
            for row in rows
        ]
        obj.sampling_params = rows if isinstance(params, list) else rows[0]
        return True
    return any([wanted(row.get("custom_params")) for row in rows])


async def _with_rounds(answers: Any) -> AsyncIterator[Any]:
    async with aclosing(answers):
        async for answer in answers:
            for part in answer if isinstance(answer, list) else [answer]:
                info = part["meta_info"]
                if info.get("finish_reason") is not None:
                    info[KEY] = list(_rounds.pop(info["id"], ()))
            yield answer


async def _handle_batch_output(orig: Any, manager: Any, output: Any) -> Any:
    if getattr(output, "customized_info", None) is not None:
        _take_rounds(output)
    return await orig(manager, output)


def _take_rounds(output: Any) -> None:
    """Out of `customized_info`, which would show them in answers to all requests of the batch."""
    from sglang.srt.managers.io_struct import unwrap_from_pickle, wrap_as_pickle

    info = dict(unwrap_from_pickle(output.customized_info))
    for rid, rounds in zip(output.rids, info.pop(KEY, ()), strict=False):
        new = [entry for entry in rounds if entry is not None]
        if new:
            _rounds.setdefault(rid, deque(maxlen=LAST_ROUNDS)).extend(new)
    while len(_rounds) > MAX_REQUESTS:  # clients that went away
        _rounds.popitem(last=False)
    output.customized_info = wrap_as_pickle(info) if info else None
