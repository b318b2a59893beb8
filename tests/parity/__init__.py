"""Equality of outputs: drafting on, drafting off, plain SGLang. See `docs/exactness.md`."""
