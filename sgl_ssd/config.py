"""The settings of sgl_ssd itself, validated once, and how they reach child processes.

SGLang's own settings stay in its `ServerArgs`. Ours travel to the processes that SGLang spawns as
JSON in one environment variable.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field

import msgspec

from sgl_ssd.errors import ConfigError
from sgl_ssd.fan_out import check_fan_out
from sgl_ssd.protocol import BACKUPS, MAX_STEPS, MAX_TOP_M
from sgl_ssd.transport import check_endpoint

ENV = "SGLANG_SSD_CONFIG"  # SGLang renames what begins with SGL_, with a warning
VERIFICATIONS = ("coupled", "rejection")


@dataclass(frozen=True)
class DraftServerConfig:
    """What a draft server process needs to know. Lengths in tokens."""

    endpoint: str
    model_path: str
    name: str | None = None  # of one of several, for its log
    num_steps: int = 4
    fan_out: list[int] = field(default_factory=lambda: [4] * 5)
    backup: str = "jit"
    max_branch_rows: int = 256
    device: str = "auto"
    base_gpu_id: int = 0
    dtype: str = "auto"
    attention_backend: str | None = None
    mem_fraction_static: float | None = None
    max_total_tokens: int | None = None
    context_length: int | None = None
    max_sessions: int = 256
    prefill_chunk: int = 512
    lease_s: float = 60.0
    trust_remote_code: bool = False
    log_level: str = "info"
    http_port: int | None = None
    keys: str | None = None

    def __post_init__(self) -> None:
        check_endpoint(self.endpoint, self.keys is not None)
        _check_common(self.num_steps, self.backup, self.max_branch_rows)
        check_fan_out(self.fan_out, self.num_steps)
        _require(
            self.mem_fraction_static is None or 0 < self.mem_fraction_static < 1,
            f"--ssd-draft-mem-fraction-static {self.mem_fraction_static}: must lie between 0 and 1",
        )
        for flag, count in (
            ("--ssd-draft-max-total-tokens", self.max_total_tokens),
            ("--ssd-draft-context-length", self.context_length),
            ("--max-running-requests/--max-sessions", self.max_sessions),
            ("--prefill-chunk", self.prefill_chunk),
            ("--lease-s", self.lease_s),
        ):
            _require(count is None or count > 0, f"{flag} {count}: must be positive")
        _require(
            self.base_gpu_id >= 0, f"--ssd-draft-base-gpu-id {self.base_gpu_id}: must be at least 0"
        )
        _require(
            self.http_port is None or 0 < self.http_port < 65536,
            f"--ssd-draft-http-port {self.http_port}: must lie in 1..65535",
        )


@dataclass(frozen=True)
class VerifierConfig:
    """What the verifier (SGLang's scheduler process) needs to know."""

    endpoints: list[str]  # of the draft servers
    num_steps: int = 4
    fan_out: list[int] = field(default_factory=lambda: [4] * 5)
    backup: str = "jit"
    drafting: bool = True
    fan_out_auto: bool = False  # begins with `fan_out`, then follows the load
    steps_auto: bool = False  # so does K, from `num_steps` down
    push: bool = True  # the draft server sends complete caches ahead
    verification: str = "coupled"
    saguaro_c: float = 1.0
    proposal_top_m: int = 64
    draft_timeout_ms: float | None = None
    draft_required: bool = False
    draft_start_timeout_s: float = 600.0
    draft_keys: str | None = None
    trace_file: str | None = None

    def __post_init__(self) -> None:
        _require(bool(self.endpoints), "--ssd-draft-endpoint: name at least one")
        for endpoint in self.endpoints:
            check_endpoint(endpoint, self.draft_keys is not None)
            _require(
                self.endpoints.count(endpoint) == 1,
                f"--ssd-draft-endpoint {endpoint}: named twice",
            )
        _check_common(self.num_steps, self.backup, 1)
        _require(
            0 < self.draft_start_timeout_s < math.inf,
            f"--ssd-draft-start-timeout {self.draft_start_timeout_s}: must be positive and finite",
        )
        check_fan_out(self.fan_out, self.num_steps)
        _require(
            self.verification in VERIFICATIONS,
            f"--ssd-verification {self.verification!r}: choose one of {', '.join(VERIFICATIONS)}",
        )
        _require(
            0 < self.saguaro_c <= 1, f"--ssd-saguaro-c {self.saguaro_c}: must lie in 0 < C <= 1"
        )
        _require(
            1 <= self.proposal_top_m <= MAX_TOP_M,
            f"--ssd-proposal-top-m {self.proposal_top_m}: must lie in 1..{MAX_TOP_M}",
        )
        _require(
            self.draft_timeout_ms is None or 0 < self.draft_timeout_ms < math.inf,
            f"--ssd-draft-timeout-ms {self.draft_timeout_ms}: must be positive and finite "
            "(leave it out for a deadline from measured times)",
        )

    def to_environment(self) -> None:
        """Publish to this process and those it will spawn."""
        os.environ[ENV] = msgspec.json.encode(self).decode()

    @staticmethod
    def from_environment() -> VerifierConfig | None:
        """The published configuration; None when this process was not started by sgl_ssd."""
        text = os.environ.get(ENV)
        return msgspec.json.decode(text, type=VerifierConfig) if text else None


def _require(ok: bool, text: str) -> None:
    if not ok:
        raise ConfigError(text)


def check_num_steps(num_steps: int) -> None:
    """Refuse a K that the wire cannot carry. Raises `ConfigError`."""
    _require(
        1 <= num_steps <= MAX_STEPS,
        f"--speculative-num-steps {num_steps}: must lie in 1..{MAX_STEPS}",
    )


def _check_common(num_steps: int, backup: str, max_branch_rows: int) -> None:
    check_num_steps(num_steps)
    _require(backup in BACKUPS, f"--ssd-backup {backup!r}: choose one of {', '.join(BACKUPS)}")
    _require(max_branch_rows >= 1, f"--ssd-max-branch-rows {max_branch_rows}: must be positive")
