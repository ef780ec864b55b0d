from django.contrib import admin
from django.urls import path
from rest_framework.routers import DefaultRouter

from shop.views import ChargeViewSet

router = DefaultRouter()
router.register("charges", ChargeViewSet)

urlpatterns = [
    path("admin/", admin.site.urls),
    *router.urls,
]
