from idempotency_django.contrib.messaging import Consumer

from shop.models import Charge

billing = Consumer("billing")


@billing.on("order.placed")
def book(event):
    Charge.objects.create(reference=event.data["order"], amount=event.data["amount"])
