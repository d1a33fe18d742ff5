"""Settings of the project. The database is that of the PG* environment variables."""

import os

import django

DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": os.environ.get("PGDATABASE", "shop"),
        "ATOMIC_REQUESTS": True,  # so a task is enqueued only where its view does not raise
    }
}

INSTALLED_APPS = ["shop", "pgque.django"]
if django.VERSION < (6, 0):
    INSTALLED_APPS.append("django_tasks")

TASKS = {
    "default": {
        "BACKEND": "pgque.django.tasks.PgqueBackend",
        "QUEUES": ["default"],
    }
}

ROOT_URLCONF = "shop.views"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
SECRET_KEY = "of an example"
ALLOWED_HOSTS = ["*"]
USE_TZ = True
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"stderr": {"class": "logging.StreamHandler"}},
    "root": {"handlers": ["stderr"], "level": "WARNING"},
}
