"""The version of the package and, up to the patch number, of the SQL it can talk to."""

__version__ = "0.12.0"
