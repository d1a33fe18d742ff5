"""A project of Django for tests: that of tests/examples/django_tasks, with more queues and tasks.

Its commands are those of `python -m support.django_project`; tests/python/test_django_tasks.py starts them.
"""
