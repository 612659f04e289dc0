"""``/v1/documents`` and ``/v1/jobs``: what is indexed, and how it gets there."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import PurePosixPath
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field, ValidationError, field_validator
from starlette.datastructures import UploadFile

from rag_service.api.face import Face, face_of
from rag_service.api.replies import (
    ERRORS,
    Deleted,
    DocumentList,
    DocumentWithChunks,
    Job,
)
from rag_service.auth import Principal
from rag_service.errors import ApiError, validation_error
from rag_service.question import check_domain
from rag_service.schemas import Body, scalar_filters
from retrieval.types import Document, DocumentInfo, JobStatus, Passage

router = APIRouter(tags=["documents"])
MAX_FILES = 500
T = TypeVar("T")
Identifier = Annotated[str, Path(min_length=1, max_length=512)]


class NewDocument(Body):
    """A text to index. The same ``id`` again replaces it; without one the id comes from title and text."""

    id: str | None = Field(default=None, min_length=1, max_length=512)
    title: str = Field(default="", max_length=1024)
    text: str = Field(min_length=1)
    domain: str | None = Field(default=None, description="Goes before the request's own.")
    metadata: dict[str, Any] = Field(default_factory=dict)

    _metadata = field_validator("metadata")(scalar_filters)


class NewDocuments(Body):
    """``POST /v1/documents`` as JSON."""

    documents: list[NewDocument] = Field(min_length=1, max_length=10_000)
    domain: str | None = None


_REQUEST_BODY = {
    "required": True,
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["documents"],
                "properties": {
                    "domain": {"type": "string"},
                    "documents": {
                        "type": "array",
                        "minItems": 1,
                        "items": {
                            "type": "object",
                            "required": ["text"],
                            "additionalProperties": False,
                            "properties": {
                                "id": {"type": "string"},
                                "title": {"type": "string"},
                                "text": {"type": "string", "minLength": 1},
                                "domain": {"type": "string"},
                                "metadata": {"type": "object"},
                            },
                        },
                    },
                },
            },
            "example": {
                "domain": "general",
                "documents": [{"title": "Opening hours", "text": "The library opens at nine on weekdays."}],
            },
        },
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["files", "domain"],
                "properties": {
                    "domain": {"type": "string"},
                    "files": {"type": "array", "items": {"type": "string", "format": "binary"}},
                },
            }
        },
    },
}


@router.post(
    "/v1/documents",
    status_code=202,
    response_model=Job,
    responses=ERRORS,
    openapi_extra={"requestBody": _REQUEST_BODY},
)
async def add_documents(request: Request) -> Response:
    """Index documents, given as JSON or as files (multipart). Answers with a job at once."""
    face = face_of(request)
    principal = await face.admit(request, "ingest")
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type == "multipart/form-data":
        status = await _ingest_files(face, principal, request)
    elif content_type == "application/json":
        status = await _ingest_json(face, principal, request)
    else:
        message = "Send documents as application/json, or files as multipart/form-data."
        raise ApiError(415, message, code="unsupported_media_type")
    return JSONResponse(job_object(status), status_code=202, headers={"Location": f"/v1/jobs/{status.id}"})


@router.get("/v1/jobs/{job_id}", response_model=Job, responses=ERRORS)
async def get_job(job_id: Identifier, request: Request) -> Response:
    """How far an ingestion is."""
    face = face_of(request)
    principal = face.principal(request, "ingest")
    status = await face.backends.retriever.job(job_id, principal.tenant)
    return JSONResponse(job_object(_existing(status, "job", job_id)))


@router.delete("/v1/jobs/{job_id}", response_model=Job, responses=ERRORS)
async def cancel_job(job_id: Identifier, request: Request) -> Response:
    """Stop an ingestion; what is indexed already stays."""
    face = face_of(request)
    principal = face.principal(request, "ingest")
    status = await face.backends.retriever.cancel_job(job_id, principal.tenant)
    return JSONResponse(job_object(_existing(status, "job", job_id)))


@router.get("/v1/documents", response_model=DocumentList, responses=ERRORS)
async def list_documents(
    request: Request,
    domain: str | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str | None, Query(max_length=512)] = None,
) -> Response:
    """The caller's documents, a page at a time."""
    face = face_of(request)
    principal = await face.admit(request, "search", "ingest", "chat")
    check_domain(domain, face.settings, "domain")
    found, following = await face.backends.retriever.documents(principal.tenant, domain, limit, after)
    return JSONResponse(
        {"object": "list", "data": [document_object(info) for info in found], "next": following}
    )


@router.get("/v1/documents/{document_id:path}", response_model=DocumentWithChunks, responses=ERRORS)
async def get_document(document_id: Identifier, request: Request) -> Response:
    """One document with its passages, in order."""
    face = face_of(request)
    principal = await face.admit(request, "search", "ingest", "chat")
    found = await face.backends.retriever.document(document_id, principal.tenant)
    info, passages = _existing(found, "document", document_id)
    chunks = [chunk_object(passage) for passage in passages]
    return JSONResponse({**document_object(info), "chunks": chunks})


@router.delete("/v1/documents/{document_id:path}", response_model=Deleted, responses=ERRORS)
async def delete_document(document_id: Identifier, request: Request) -> Response:
    """Remove a document and its passages from the index."""
    face = face_of(request)
    principal = await face.admit(request, "ingest")
    if not await face.backends.retriever.delete(document_id, principal.tenant):
        _existing(None, "document", document_id)
    return JSONResponse({"object": "document.deleted", "id": document_id, "deleted": True})


async def _ingest_json(face: Face, principal: Principal, request: Request) -> JobStatus:
    try:
        body = NewDocuments.model_validate_json(await request.body())
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False)) from None
    documents = [
        Document(
            id=document.id or _derived_id(document),
            domain=_domain(face, document.domain or body.domain, f"documents.{index}.domain"),
            title=document.title,
            text=document.text,
            metadata=document.metadata,
            tenant=principal.tenant,
        )
        for index, document in enumerate(body.documents)
    ]
    different = dict.fromkeys((one.id, one.domain, one.title, one.text) for one in documents)
    _refuse_twice([document_id for document_id, *_ in different], "document", "documents")
    return await face.backends.retriever.ingest(documents)


async def _ingest_files(face: Face, principal: Principal, request: Request) -> JobStatus:
    async with request.form(max_files=MAX_FILES) as form:
        for name in form:
            if name not in ("domain", "files", "file"):
                raise ApiError(400, f"There is no field {name[:64]}.", param=name[:64], code="unknown_field")
        given = form.get("domain")
        domain = _domain(face, given if isinstance(given, str) else None, "domain")
        parts = [*form.getlist("files"), *form.getlist("file")]
        uploads = [part for part in parts if isinstance(part, UploadFile)]
        if not uploads or len(uploads) != len(parts):
            raise ApiError(
                400, "Give at least one file in the field files.", param="files", code="missing_field"
            )
        files = [(_file_name(upload, index), await upload.read()) for index, upload in enumerate(uploads)]
    _refuse_twice([name for name, _ in files], "file", "files")
    return await face.backends.retriever.ingest_files(files, domain, principal.tenant)


def _domain(face: Face, domain: str | None, param: str) -> str:
    if not domain:
        known = ", ".join(face.settings.service.domains)
        raise ApiError(400, f"Name the documents' domain: {known}.", param=param, code="missing_field")
    check_domain(domain, face.settings, param)
    return domain


def _derived_id(document: NewDocument) -> str:
    digest = hashlib.sha256(f"{document.title}\0{document.text}".encode("utf-8", "surrogatepass"))
    return f"doc-{digest.hexdigest()[:24]}"


def _file_name(upload: UploadFile, index: int) -> str:
    """What the client calls the file: a path within its folder, so that ``a/notes.txt`` and ``b/notes.txt`` stay
    two documents. Of a path from the root, or one that leads upwards, only the last part: no path of the client's
    machine becomes one of ours.
    """
    path = PurePosixPath((upload.filename or "").replace("\\", "/"))
    leads_out = path.is_absolute() or ".." in path.parts or (path.parts and path.parts[0].endswith(":"))
    name = path.name if leads_out or not path.name else path.as_posix()
    return name[-255:] or f"file-{index + 1}"


def _refuse_twice(names: Sequence[str], kind: str, param: str) -> None:
    """Two of one name in one request: the second would silently take the first one's place."""
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        message = f"Two {kind}s of this request are called {name[:100]!r}; give each its own name."
        raise ApiError(400, message, param=param, code="duplicate_name")


def _existing(found: T | None, kind: str, name: str) -> T:
    if found is None:
        raise ApiError(404, f"There is no {kind} {name[:100]!r}.", code=f"{kind}_not_found")
    return found


def job_object(status: JobStatus) -> dict[str, Any]:
    values = asdict(status)
    values["failures"] = [{"name": name, "reason": reason} for name, reason in status.failures]
    return {"object": "job", **values}


def document_object(info: DocumentInfo) -> dict[str, Any]:
    return {
        "object": "document",
        "id": info.id,
        "domain": info.domain,
        "title": info.title,
        "num_chunks": info.num_chunks,
        "metadata": dict(info.metadata),
    }


def chunk_object(passage: Passage) -> dict[str, Any]:
    metadata = dict(passage.metadata)
    return {
        "chunk_id": passage.chunk_id,
        "text": passage.text,
        "start": metadata.get("start"),
        "end": metadata.get("end"),
        "metadata": metadata,
    }
