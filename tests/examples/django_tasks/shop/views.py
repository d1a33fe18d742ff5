"""Taking orders."""

from django.http import HttpRequest, JsonResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt

from shop.models import Order
from shop.tasks import confirm


@csrf_exempt
def orders(request: HttpRequest) -> JsonResponse:
    """Store an order, and have it confirmed."""
    order = Order.objects.create(address=request.POST["address"])
    result = confirm.enqueue(order.pk)
    if request.POST.get("card") == "declined":
        raise ValueError("the card was declined")  # neither the order nor its task is stored
    return JsonResponse({"order": order.pk, "task": result.id})


urlpatterns = [path("orders", orders)]
