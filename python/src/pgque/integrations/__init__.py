"""Figures and traces of handlers for OpenTelemetry and Prometheus; `telemetry` calls those that are enabled.

Public are `pgque.enable_opentelemetry` and `pgque.enable_prometheus`. Frameworks have modules that programs
import, at the top: alembic, asgi, celery, django, spark.
"""
