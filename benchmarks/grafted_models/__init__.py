"""Model classes for `SGLANG_EXTERNAL_MODEL_PACKAGE=benchmarks.grafted_models`."""
