"""The bundled pair: a small language model and a smaller draft of the same tokenizer."""

from pathlib import Path

TARGET_PATH = Path(__file__).parent / "target"
DRAFT_PATH = Path(__file__).parent / "draft"
