# shop/tasks.py
from celery import shared_task
from shop.settling import PAUSE, settle


@shared_task(bind=True, acks_late=True, reject_on_worker_lost=True, max_retries=None)
def handle_event(self, body: str) -> None:
    redelivered = bool(self.request.retries or self.request.delivery_info.get("redelivered"))
    if not settle(body.encode(), self.request.id, redelivered=redelivered):
        raise self.retry(countdown=PAUSE)
