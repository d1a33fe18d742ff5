"""A history checker: random work and faults, every call recorded, judged afterwards."""
