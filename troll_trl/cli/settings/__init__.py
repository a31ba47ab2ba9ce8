"""From YAML files and flags to dataclasses, strictly."""
