"""What watches handlers: OpenTelemetry, Prometheus, and `telemetry`, which calls those that are enabled.

Public are `pgque.enable_opentelemetry` and `pgque.enable_prometheus`. Frameworks have modules that programs
import, at the top: alembic, asgi, celery, django, spark.
"""
