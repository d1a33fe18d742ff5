"""pgque in a Django project: operations for migrations.

class Migration(migrations.Migration):
    operations = [pgque.django.Install(), pgque.django.CreateQueue("orders")]

`pgque.send(connection, …)` sends in the transaction of Django's connection.
"""

from .operations import CreateQueue, Install, Subscribe, Upgrade

__all__ = ["CreateQueue", "Install", "Subscribe", "Upgrade"]
