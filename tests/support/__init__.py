"""What the tests, the lints and CI share."""
