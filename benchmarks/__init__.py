"""Measurements of SSD beside plain SGLang."""
