"""Named exceptions. Each message names what is wrong and what to do about it."""

from __future__ import annotations


class SSDError(Exception):
    """Base of every error that sgl_ssd raises on purpose."""


class ConfigError(SSDError, ValueError):
    """A flag, or a combination of flags, that cannot work. Stops the start."""


class ProtocolError(SSDError):
    """A message that is malformed, of another version, or out of range. Dropped and counted."""


class PairMismatchError(SSDError):
    """Target and draft cannot serve together (token ids, limits, protocol version)."""


class DraftUnavailableError(SSDError):
    """The draft server did not come up, or is gone."""


class StartRefusedError(DraftUnavailableError):
    """The draft server refused its settings, and has said why itself."""

    def __init__(self) -> None:
        super().__init__("the draft server refused its settings; its own message is above")
