"""The table of orders, pgque, and the queue of tasks."""

from django.db import migrations, models

import pgque.django


class Migration(migrations.Migration):
    """The first migration."""

    initial = True
    dependencies = []
    operations = [
        migrations.CreateModel(
            "Order",
            [
                ("id", models.BigAutoField(primary_key=True)),
                ("address", models.CharField(max_length=200)),
                ("confirmed", models.BooleanField(default=False)),
            ],
        ),
        pgque.django.Install(),
        pgque.django.CreateQueue("default"),
        pgque.django.Subscribe("default", "tasks"),
    ]
