"""The bundled tiny target and draft models."""
