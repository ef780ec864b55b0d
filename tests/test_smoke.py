import json, pytest
from django.test import RequestFactory
from django.urls import path
from django.http import JsonResponse
from rest_framework.views import APIView
from rest_framework.response import Response
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.decorators import idempotent
from idempotency_django.models import IdempotencyKey
from tests.models import Effect
import uuid

class V(IdempotentViewMixin, APIView):
    def post(self, request):
        e = Effect.objects.create(reference=request.data["reference"])
        return Response({"id": e.pk}, status=201, headers={"Location": f"/x/{e.pk}"})

@idempotent(required=True)
def fv(request):
    e = Effect.objects.create(reference=json.loads(request.body)["reference"])
    return JsonResponse({"id": e.pk}, status=201)

urlpatterns = [path("v/", V.as_view()), path("f/", fv)]

@pytest.mark.django_db(transaction=True)
@pytest.mark.urls(__name__)
@pytest.mark.parametrize("url", ["/v/", "/f/"])
def test_it(client, url, django_assert_num_queries):
    k = str(uuid.uuid4())
    post = lambda ref: client.post(url, {"reference": ref}, content_type="application/json", headers={"Idempotency-Key": k})
    with django_assert_num_queries(9, exact=False) as c: r = post("a")
    for q in c.captured_queries: print(q["sql"][:300])
    assert r.status_code == 201, r.content
    with django_assert_num_queries(9, exact=False) as c: r2 = post("a")
    for q in c.captured_queries: print(q["sql"][:300])
    assert r2.content == r.content and r2["Idempotent-Replayed"] == "true"
    assert {k: v for k, v in r.headers.items()}.items() <= dict(r2.headers).items()
    r3 = post("b"); assert r3.status_code == 422; print(r3.content, r3.headers)
    assert Effect.objects.count() == 1
    o = IdempotencyKey.objects.get(); print(o.__dict__)
    assert o.replay_count == 1
