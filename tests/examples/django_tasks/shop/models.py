"""What the shop stores."""

from django.db import models


class Order(models.Model):
    """One order."""

    address = models.CharField(max_length=200)
    confirmed = models.BooleanField(default=False)
