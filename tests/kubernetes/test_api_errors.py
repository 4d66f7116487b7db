"""Refusals of real API servers, and the errors that they become."""

import json

import pytest

from llmtrain.core.redact import redacted_line
from llmtrain.errors import ClusterError, LlmtrainError, UsageError
from llmtrain.kubernetes.api_errors import AlreadyExists, Forbidden, KindNotFound, Request, quota, refusal_error

JOB = Request("create", "batch/v1", "Job", "team", "demo")
LIST = Request("list", "v1", "Pod", None)
SET = Request("create", "jobset.x-k8s.io/v1alpha2", "JobSet", "team", "demo")
QUOTA = (
    'pods "demo-0" is forbidden: exceeded quota: small, requested: limits.memory=4Gi, used: limits.memory=7Gi, '
    "limited: limits.memory=8Gi"
)
SECURITY = (
    'pods "demo-0" is forbidden: violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false '
    '(container "trainer" must set securityContext.allowPrivilegeEscalation=false)'
)
TERMINATING = (
    'jobs.batch "demo" is forbidden: unable to create new content in namespace team because it is being terminated'
)
RIGHTS = (
    'jobs.batch is forbidden: User "system:serviceaccount:team:dev" cannot create resource "jobs" in API group "batch" '
    'in the namespace "team"'
)
STRICT = 'Job in version "v1" cannot be handled as a Job: strict decoding error: unknown field "spec.paralelism"'
WEBHOOK = (
    'Internal error occurred: failed calling webhook "vjobset.kb.io": failed to call webhook: Post '
    '"https://jobset-webhook-service.jobset-system.svc:443/validate?timeout=10s": dial tcp 10.96.1.2:443: connect: '
    "connection refused"
)


def status(code: int, reason: str, message: str) -> str:
    return json.dumps(
        {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": reason,
            "code": code,
        }
    )


def refused(request: Request, code: int, body: str) -> LlmtrainError:
    error = refusal_error(request, code, body)
    assert error is not None
    assert error.details["status"] == f"HTTP {code}"
    return error


# name: request, status, body, error type, facts in the message, facts in the remedy
REFUSALS = {
    "no namespace": (
        JOB,
        404,
        status(404, "NotFound", 'namespaces "team" not found'),
        UsageError,
        "amespace team",
        "kubectl create namespace team",
    ),
    "RBAC": (
        JOB,
        403,
        status(403, "Forbidden", RIGHTS),
        Forbidden,
        "create jobs in namespace 'team' (RBAC)",
        "kubectl auth can-i create jobs -n team",
    ),
    "RBAC at the cluster scope": (
        LIST,
        403,
        status(
            403,
            "Forbidden",
            'pods is forbidden: User "dev" cannot list resource "pods" in API group "" at the cluster scope',
        ),
        Forbidden,
        "list pods in all namespaces (RBAC)",
        "can-i list pods --all-namespaces",
    ),
    "RBAC for a subresource": (
        Request("get", "v1", "Pod", "team", "demo-0", "log"),
        403,
        status(
            403,
            "Forbidden",
            'pods "demo-0" is forbidden: User "dev" cannot get resource "pods/log" in API group '
            '"" in the namespace "team"',
        ),
        Forbidden,
        "get pods/log in namespace 'team' (RBAC)",
        "can-i get pods/log -n team",
    ),
    "unreachable node": (
        Request("get", "v1", "Pod", "team", "demo-0", "log"),
        500,
        status(500, "InternalError", "no preferred addresses found; known addresses: [{Hostname }]"),
        ClusterError,
        "the log of Pod demo-0 in namespace team (HTTP 500): no preferred addresses found",
        "llmtrain why",
    ),
    "exec denied by a policy": (
        Request("create", "v1", "Pod", "team", "demo-0", "exec"),
        403,
        status(403, "Forbidden", 'admission webhook "policy.example.com" denied the request: no shells here'),
        UsageError,
        "exec in Pod demo-0 in namespace team: admission webhook",
        "--namespace",
    ),
    "quota": (
        JOB,
        403,
        status(403, "Forbidden", QUOTA),
        UsageError,
        "Job demo in namespace team: small, requested: limits.memory=4Gi, used: limits.memory=7Gi, limited: "
        "limits.memory=8Gi",
        "launch.resources",
    ),
    "namespace is terminating": (
        JOB,
        403,
        status(403, "Forbidden", TERMINATING),
        UsageError,
        "Namespace team",
        "--namespace",
    ),
    "object is terminating": (
        JOB,
        409,
        status(409, "AlreadyExists", 'object is being deleted: jobs.batch "demo" already exists'),
        AlreadyExists,
        "Job demo in namespace team",
        "Retry",
    ),
    "webhook is down": (
        SET,
        500,
        status(500, "InternalError", WEBHOOK),
        ClusterError,
        "connection refused",
        "operator",
    ),
    "login": (
        JOB,
        401,
        status(401, "Unauthorized", "Unauthorized"),
        ClusterError,
        "(Unauthorized)",
        "Log in again",
    ),
    "unknown kind, as text": (
        SET,
        404,
        "404 page not found\n",
        KindNotFound,
        "JobSet CRD",
        "jobset.sigs.k8s.io",
    ),
    "unknown kind, as JSON": (
        SET,
        404,
        status(404, "NotFound", "the server could not find the requested resource"),
        KindNotFound,
        "JobSet CRD (jobset.x-k8s.io/v1alpha2)",
        "--kind indexed_job",
    ),
    "unknown kind of Kubernetes itself": (
        Request("create", "policy/v1", "PodDisruptionBudget", "team", "demo"),
        404,
        "404 page not found\n",
        KindNotFound,
        "PodDisruptionBudget in policy/v1",
        "version",
    ),
    "busy": (
        JOB,
        429,
        status(429, "TooManyRequests", "the server has received too many requests and has asked us to try again later"),
        ClusterError,
        "too many requests",
        "Retry",
    ),
    "gateway": (LIST, 502, "<html>\r\n<h1>502 Bad Gateway</h1>\r\n</html>", ClusterError, "502 Bad Gateway", "Retry"),
}
# name: request, status, body, error type, facts in the message
WITH_ANY_REMEDY = {
    "security": (
        JOB,
        403,
        status(403, "Forbidden", SECURITY),
        UsageError,
        'Job demo in namespace team: pods "demo-0" is forbidden: violates PodSecurity',
    ),
    "unknown field": (
        JOB,
        400,
        status(400, "BadRequest", STRICT),
        UsageError,
        'Job demo in namespace team: Job in version "v1" cannot be handled as a Job: strict decoding error: '
        'unknown field "spec.paralelism"',
    ),
    "invalid": (
        JOB,
        422,
        status(422, "Invalid", 'Job.batch "demo" is invalid: spec.completions: Invalid value: 0: must be positive'),
        UsageError,
        "spec.completions: Invalid value",
    ),
    "admission": (
        JOB,
        403,
        status(403, "Forbidden", 'admission webhook "policy.example.com" denied the request: images must be signed'),
        UsageError,
        "images must be signed",
    ),
    "exists": (JOB, 409, status(409, "AlreadyExists", 'jobs.batch "demo" already exists'), AlreadyExists, "exists"),
    "conflict": (
        Request("patch", "v1", "ConfigMap", "team", "demo-config"),
        409,
        status(409, "Conflict", "the object has been modified; please apply your changes to the latest version"),
        ClusterError,
        "has been modified",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal_has_type_facts_and_remedy(name: str) -> None:
    request, code, body, expected, facts, remedy = REFUSALS[name]
    error = refused(request, code, body)
    assert type(error) is expected
    assert facts in error.what
    assert remedy in str(error.remedy)
    assert "\n" not in error.what
    assert '"kind": "Status"' not in str(error)
    assert error.exit_code == (69 if expected is ClusterError else 64)


@pytest.mark.parametrize("name", WITH_ANY_REMEDY)
def test_refusal_has_type_facts_and_any_remedy(name: str) -> None:
    request, code, body, expected, facts = WITH_ANY_REMEDY[name]
    error = refused(request, code, body)
    assert type(error) is expected
    assert facts in error.what
    assert "\n" not in error.what
    assert error.remedy


@pytest.mark.parametrize(
    "request_",
    [Request("get", "v1", "Pod", "team", "x"), Request("delete", "batch/v1", "Job", "team", "x")],
    ids=["get", "delete"],
)
def test_missing_object_is_not_an_error(request_: Request) -> None:
    assert refusal_error(request_, 404, status(404, "NotFound", 'pods "x" not found')) is None


@pytest.mark.parametrize(
    "body", ["", "{}", "[]", "null", '"x"', '{"message": null}', "\x00\xff", "{", '{"message": 3}']
)
@pytest.mark.parametrize("code", [400, 401, 403, 404, 409, 422, 429, 500, 503])
def test_any_body_makes_an_error(code: int, body: str) -> None:
    error = refusal_error(JOB, code, body)
    if error is not None:
        assert error.what
    assert error is not None or code == 404


def test_long_body_is_truncated_and_joined_to_one_line() -> None:
    error = refused(JOB, 500, status(500, "x", "line\n" * 10_000))
    assert len(str(error)) < 700
    assert "line line" in error.what


def test_quota_extracts_the_amounts() -> None:
    assert quota(QUOTA).startswith("small, requested: limits.memory=4Gi")
    assert quota("another message") == "another message"


def test_secrets_in_the_environment_are_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_canaryCanaryCanary1")
    for code in (400, 401, 403, 409, 422, 500):
        body = status(code, "x", "denied: env HF_TOKEN=hf_canaryCanaryCanary1 at https://me:word@registry.example.com")
        error = refused(JOB, code, body)
        assert "canary" not in json.dumps(error.as_dict())
        assert ":word@" not in str(error)
    assert "canary" not in redacted_line("token hf_canaryCanaryCanary1")


@pytest.mark.parametrize(
    "secret",
    [
        "hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345",
        "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJzeXN0ZW06c2VydmljZSJ9.c2lnbmF0dXJlLW9mLXRoZS10b2tlbg",
    ],
    ids=["hub", "bearer"],
)
def test_tokens_in_a_body_are_redacted(secret: str) -> None:
    """A policy may quote the request that it denies, and a proxy its headers."""
    body = status(403, "Forbidden", f"denied by policy: authorization: Bearer {secret} is not allowed")
    assert secret not in str(refused(JOB, 403, body))
    assert secret not in str(refused(JOB, 401, f"bad header: Authorization: Bearer {secret}"))
