from django.db import transaction
from idempotency_django.contrib.messaging import publish

from shop.models import Order


def place(reference, amount):
    with transaction.atomic():
        order = Order.objects.create(reference=reference, amount=amount)
        data = {"order": reference, "amount": amount}
        publish("orders", data, type="order.placed", group=reference)
    return order
