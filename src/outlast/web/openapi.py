"""The OpenAPI document of `/api/v1`: closed schemas and real examples, so that a machine that reads it can call and test every path."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

STATUSES = [
    "running", "waiting_for_approval", "waiting_for_verification", "waiting_for_budget", "waiting_for_event", "waiting_for_run",
    "waiting_for_timer", "waiting_for_code", "done", "failed", "cancelled"]  # fmt: skip
ERRORS = [
    "usage_error", "run_not_found", "refused", "run_exists", "run_busy", "gate_closed", "not_allowed", "not_logged_in", "wrong_host", "store_error",
    "commit_unknown", "lease_lost", "schema_too_new", "model_error", "invariant_violated", "internal_error"]  # fmt: skip
TEXT: dict[str, Any] = {"type": "string"}
MAYBE_TEXT: dict[str, Any] = {"type": ["string", "null"]}
NUMBER: dict[str, Any] = {"type": "integer", "minimum": 0}
INSTANT: dict[str, Any] = {"type": "string", "format": "date-time", "examples": ["2026-11-30T11:00:00.000Z"]}
MAYBE_INSTANT: dict[str, Any] = {"type": ["string", "null"], "format": "date-time"}
TAGS: dict[str, Any] = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 256}, "maxProperties": 16}
INPUT: dict[str, Any] = {
    "oneOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "object"}, "minItems": 1}],
    "description": "a text, content blocks, or a whole message list", "examples": ["Ticket KITE-142 just came in."]}  # fmt: skip


def document() -> dict[str, Any]:
    return {
        "openapi": "3.1.0",
        "info": {"title": "Outlast", "version": version("outlast"), "description": "Runs of agents, and the decisions that they wait for."},
        "servers": [{"url": "/"}],
        "security": [{"bearer": []}],
        "paths": _paths(),
        "components": {
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer", "description": "OUTLAST_WEB_TOKEN"}},
            "schemas": {"Run": _run(), "Gate": _gate(), "Entry": _entry(), "Error": _error()},
        },
    }


def _paths() -> dict[str, Any]:
    run_id = {
        "name": "run_id",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "minLength": 1, "maxLength": 1000},
        "example": "run-kite-142",
    }
    run, gate = _ref("Run"), _ref("Gate")
    return {
        "/api/v1/health": {"get": {**_op("health", "Does the store answer?", _object({"type": {"const": "health"}, "status": {"const": "ok"}})), "security": []}},
        "/api/v1/runs": {
            "get": _op("list_runs", "Runs, newest first.", _list(run), parameters=[
                _query("status", {"enum": STATUSES}), _query("agent"), _query("tag", {"type": "array", "items": {"type": "string", "pattern": "^[^=]+=.*$"}}),
                _query("since", {"type": "string", "examples": ["4h", "2026-11-30"]}), _query("unfinished", {"type": "boolean"}),
                _query("stuck", {"type": "boolean"}), _query("q"), _query("limit", {"type": "integer", "minimum": 1, "maximum": 1000}), _query("before")]),
            "post": _op("start_run", "Start a run; the same again gives the run that is there.", run, also={"201": run}, body=_object(
                {"agent": {"type": "string", "minLength": 1, "examples": ["kitebase-support"]}, "input": INPUT,
                 "run_id": {"type": ["string", "null"], "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"}, "tags": TAGS}, ["agent", "input"])),
        },
        "/api/v1/runs/{run_id}": {"get": _op("get_run", "One run with its gates.", run, parameters=[run_id, _query("messages", {"type": "boolean"})])},
        "/api/v1/runs/{run_id}/journal": {"get": _op("get_journal", "Its journal, oldest first.", _list(_ref("Entry"), NUMBER), parameters=[
            run_id, _query("after", NUMBER), _query("limit", {"type": "integer", "minimum": 1, "maximum": 1000})])},
        "/api/v1/inbox": {"get": _op("inbox", "What waits for a person, soonest deadline first.", _list(gate), parameters=[
            _query("role"), _query("agent"), _query("limit", {"type": "integer", "minimum": 1, "maximum": 1000})])},
        "/api/v1/runs/{run_id}/decide": {"post": _op("decide", "Approve or reject a call, or the raising of a limit.", gate, parameters=[run_id], body=_object(
            {"call_id": MAYBE_TEXT, "approved": {"type": "boolean"}, "note": MAYBE_TEXT,
             "args": {"type": ["object", "null"]}, "digest": MAYBE_TEXT}, ["approved"]))},
        "/api/v1/runs/{run_id}/verify": {"post": _op("verify", "Say what became of a call in doubt.", gate, parameters=[run_id], body=_object(
            {"call_id": MAYBE_TEXT, "outcome": {"enum": ["happened", "run_again", "give_up"]}, "result": {}, "note": MAYBE_TEXT}, ["outcome"]))},
        "/api/v1/runs/{run_id}/send": {"post": _op("send", "Say something to a run.", run, parameters=[run_id], body=_object({"input": INPUT}, ["input"]))},
        "/api/v1/runs/{run_id}/cancel": {"post": _op("cancel", "End a run.", run, parameters=[run_id], body=_object({"note": MAYBE_TEXT}, []))},
        "/api/v1/runs/{run_id}/retry": {"post": _op("retry", "Take a failed or cancelled run up again.", run, parameters=[run_id], body=_object({}, []))},
        "/api/v1/runs/{run_id}/event": {"post": _op("event", "Tell a run that something happened.", _object(
            {"type": {"const": "event_received"}, "run_id": TEXT, "name": TEXT, "first": {"type": "boolean"}}), parameters=[run_id], body=_object(
            {"name": {"type": "string", "minLength": 1, "maxLength": 128}, "data": {},
             "event_id": {"type": ["string", "null"], "minLength": 1, "maxLength": 256}}, ["name"]))},
    }  # fmt: skip


def _op(name: str, summary: str, answer: dict[str, Any], *, parameters: list[Any] | None = None, body: dict[str, Any] | None = None,
        also: dict[str, Any] | None = None) -> dict[str, Any]:  # fmt: skip
    responses = {status: _response("what stands now", schema) for status, schema in {"200": answer, **(also or {})}.items()}
    responses["default"] = _response("an error; nothing was changed, unless its type says otherwise", _ref("Error"))
    op: dict[str, Any] = {"operationId": name, "summary": summary, "responses": responses}
    if parameters:
        op["parameters"] = parameters
    if body is not None:
        op["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return op


def _response(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _query(name: str, schema: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": schema or TEXT}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(properties: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


def _list(items: dict[str, Any], following: dict[str, Any] | None = None) -> dict[str, Any]:
    after = {"oneOf": [following or TEXT, {"type": "null"}]}
    return _object({"type": {"const": "list"}, "items": {"type": "array", "items": items}, "next": after})


def _run() -> dict[str, Any]:
    properties: dict[str, Any] = {
        "type": {"const": "run"}, "run_id": TEXT, "agent": TEXT, "agent_version": TEXT, "status": {"enum": STATUSES}, "reason": MAYBE_TEXT, "seq": NUMBER,
        "model_calls": NUMBER, "input_tokens": NUMBER, "output_tokens": NUMBER, "cache_read_tokens": NUMBER, "cache_write_tokens": NUMBER,
        "cost_usd": MAYBE_TEXT, "attempts": NUMBER, "tags": TAGS, "started_by": MAYBE_TEXT, "parent_run_id": MAYBE_TEXT, "parent_call_id": MAYBE_TEXT,
        "lease_owner": MAYBE_TEXT, "lease_until": MAYBE_INSTANT, "wake_at": MAYBE_INSTANT, "created_at": INSTANT, "updated_at": INSTANT}  # fmt: skip
    more = {"output": {}, "gates": {"type": "array", "items": _ref("Gate")}, "messages": {"type": "array", "items": {"type": "object"}}}
    return {"type": "object", "properties": {**properties, **more}, "required": list(properties)}


def _gate() -> dict[str, Any]:
    properties: dict[str, Any] = {
        "type": {"const": "gate"}, "run_id": TEXT, "gate_id": TEXT, "kind": {"enum": ["approval", "verification", "budget", "event", "run"]},
        "call_id": MAYBE_TEXT, "tool": MAYBE_TEXT, "args": {"type": "object"}, "digest": TEXT, "text": TEXT, "role": MAYBE_TEXT, "level": NUMBER,
        "deadline": MAYBE_INSTANT, "created_at": INSTANT, "notified_at": MAYBE_INSTANT,
        "outcome": {"enum": ["approved", "rejected", "expired", "cancelled", "happened", "run_again", "give_up", "arrived", None]},
        "decided_at": MAYBE_INSTANT, "decided_by": MAYBE_TEXT, "note": MAYBE_TEXT, "edited_args": {"type": ["object", "null"]}, "agent": TEXT,
        "tags": TAGS, "started_by": MAYBE_TEXT}  # fmt: skip
    return {"type": "object", "properties": properties, "required": list(properties)}


def _entry() -> dict[str, Any]:
    properties: dict[str, Any] = {
        "type": {"const": "entry"}, "run_id": TEXT, "entry_no": NUMBER, "seq": NUMBER, "kind": TEXT, "at": INSTANT, "by": MAYBE_TEXT,
        "status": {"enum": STATUSES}, "fence": NUMBER, "meta": {"type": ["object", "null"]}, "body": {"type": "object"}}  # fmt: skip
    return {"type": "object", "properties": properties, "required": list(properties)}


def _error() -> dict[str, Any]:
    properties: dict[str, Any] = {
        "type": {"enum": ERRORS},
        "message": TEXT,
        "hint": TEXT,
        "run_id": MAYBE_TEXT,
        "gate": {"oneOf": [_ref("Gate"), {"type": "null"}]},
    }
    error = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "object", "properties": {"type": {"const": "error"}, "error": error}, "required": ["type", "error"]}
