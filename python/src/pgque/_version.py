"""The version of the package and, up to the patch number, of the SQL it can talk to."""

__version__ = "1.0.0-rc1"
