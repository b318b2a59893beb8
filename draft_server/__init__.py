"""The draft server: sessions, speculation cache and draft engine."""
