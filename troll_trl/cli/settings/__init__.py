"""Turns YAML files and flags into dataclasses, strictly."""
