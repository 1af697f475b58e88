"""4. Django, sync: the web tier enqueues by name and has no agent code; workers run elsewhere."""

from functools import partial

from django.db import transaction
from django.http import HttpRequest, HttpResponse, JsonResponse

from outlast import Outlast
from outlast.errors import Refused, RunNotFound

outlast = Outlast()  # OUTLAST_STORE; opened on first use, so gunicorn may fork


def create(request: HttpRequest) -> HttpResponse:
    run_id = f"ticket-{request.POST['id']}"
    # after the request's own transaction; the id makes a double submit one run
    transaction.on_commit(partial(outlast.start, "kitebase-support", request.POST["text"], run_id=run_id, tags={"tenant": "northwind"}))
    return JsonResponse({"run_id": run_id}, status=202)


def status(request: HttpRequest, run_id: str) -> HttpResponse:
    try:
        return JsonResponse(outlast.get(run_id).to_dict())
    except RunNotFound as e:
        return JsonResponse({"error": {"type": "run_not_found", "message": str(e)}}, status=404)


def follow_up(request: HttpRequest, run_id: str) -> HttpResponse:
    try:
        outlast.send(run_id, request.POST["text"], by=request.user.get_username())
    except Refused as e:
        return JsonResponse({"error": {"type": "run_exists", "message": str(e)}}, status=409)
    return JsonResponse({}, status=202)
