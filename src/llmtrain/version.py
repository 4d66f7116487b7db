"""The version, in a module that imports nothing: the only place that has it."""

__version__ = "0.2.0"
