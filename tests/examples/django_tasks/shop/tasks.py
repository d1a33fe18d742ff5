"""What is done after a request."""

import pgque
from shop.models import Order

try:
    from django.tasks import task
except ImportError:  # before Django 6.0
    from django_tasks import task


@task(takes_context=True)
def confirm(context, order_id):
    """Send a mail, and note that it was sent."""
    order = Order.objects.get(pk=order_id)
    if order.confirmed:  # a task may run twice
        return
    if "@" not in order.address:
        raise pgque.Dead("no address")
    if context.attempt == 1 and order.address.startswith("joe"):
        print(f"attempt 1 for {order.address}: the mail server is busy", flush=True)
        raise pgque.Retry(retry_after=0, reason="the mail server is busy")
    order.confirmed = True
    order.save(update_fields=["confirmed"])
    print(f"confirmed to {order.address}", flush=True)
